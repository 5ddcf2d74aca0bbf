package plants

// movingPrograms are random programs on mounts with memory that moves.
var movingPrograms = net{pkg: "internal/mounttest", run: "TestRandomPrograms/^moving", args: []string{"-steps=30000"}}

// movesPlants are faults in moving memory, and in groups.
var movesPlants = []plant{
	{
		name: "a collect copies a moved extent from its old place",
		file: "pagecache/residency/move.go",
		old:  "\tx.place(tier, mem)\n",
		new:  "\t_ = mem\n",
		nets: []net{
			{pkg: "pagecache", run: "TestReleaseAfterMove"},
			{pkg: "pagecache", run: "TestRandomMoves"},
			movingPrograms,
		},
	},
	{
		name: "a bracket does not wait until its client has the memory",
		file: "pagecache/bracket.go",
		old:  "\tanswered()\n\treturn err\n",
		new:  "\treturn err\n",
		nets: []net{{pkg: "pagecache", run: "TestRandomMoves"}, movingPrograms},
	},
	{
		name: "a bracket assumes that every page has its bytes",
		file: "pagecache/bracket.go",
		old:  "\tthere := p.thereLocked()\n",
		new:  "\tthere := p.thereLocked() || true\n",
		nets: []net{{pkg: "pagecache", run: "TestRandomMoves"}, movingPrograms},
	},
	{
		name: "an extent in a bracket is evicted",
		file: "pagecache/bracket.go",
		old:  "\tb.grant, err = dev.room.Grant(ctx, wants,",
		new:  "\tdefer func() {\n\t\tif b.grant != nil {\n\t\t\tb.grant.Free()\n\t\t}\n\t}()\n\tb.grant, err = dev.room.Grant(ctx, wants,",
		nets: []net{{pkg: "pagecache", run: "TestRandomMoves"}, movingPrograms},
	},
	{
		name: "stores are lost if pinned memory is full",
		file: "pagecache/evict.go",
		old:  "\t\t\tif !f.releaseExtentLocked(ctx, x) {\n\t\t\t\treturn false\n\t\t\t}\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestRandomMoves"}, movingPrograms},
	},
	{
		name: "stores before a move are not seen",
		file: "pagecache/movable.go",
		old:  "\tstored, err := f.storedLocked(ctx, x.h, x.pages())\n\treturn len(stored) > 0, err\n",
		new:  "\treturn false, nil\n",
		nets: []net{{pkg: "pagecache", run: "TestRandomMoves"}, movingPrograms},
	},
	{
		name: "a client that is to make a hole is not waited for",
		file: "pagecache/movable.go",
		old:  "err := wait(patience)",
		new:  "err := patience.Err()",
		nets: []net{{pkg: "pagecache", run: "TestStoppedClient"}},
	},
	{
		name: "memory that a client does not give back is charged to nobody",
		file: "pagecache/movable.go",
		old:  "\t\tl.m.chargeLeases(nil)\n",
		new:  "",
		nets: []net{
			{pkg: "pagecache", run: "TestChargeEndsWithTheMapping"},
			{pkg: "control", run: "TestClosedServiceConnectionIsCharged"},
		},
	},
	{
		name: "only one extent that a client does not give back is charged",
		file: "pagecache/movable.go",
		old:  "if l.m != m || m.charged[l] != nil || !l.has() {",
		new:  "if l.m != m || len(m.charged) > 0 || !l.has() {",
		nets: []net{
			{pkg: "pagecache", run: "TestUnansweredMovesAreCharged"},
			{pkg: "control", run: "TestClosedServiceConnectionIsCharged"},
		},
	},
	{
		name: "a bracket that ends while the client does not answer is charged to nobody",
		file: "pagecache/bracket.go",
		old:  "\t\t\t\tp.whole.chargeLeases(nil)\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestClientsThatDoNotAttendAreCharged"}},
	},
	{
		name: "nobody waits for an extent that is moving",
		file: "pagecache/residency/grant.go",
		old:  "\t\t\t\tmoves = true\n",
		new:  "",
		nets: []net{{pkg: "pagecache/residency", run: "TestKeepsWhatMoves"}},
	},
	{
		name: "brackets are not counted",
		file: "control/bracket.go",
		old:  "s.openLocked() > s.server",
		new:  "s.openLocked()-len(s.brackets) > s.server",
		nets: []net{{pkg: "control", run: "TestBracketsAreCounted"}},
	},
	{
		name: "only the first range of a group is held back",
		file: "pagecache/group.go",
		old:  "p.h.grouped = union(p.h.grouped, p.pages)",
		new:  "p.h.grouped = union(p.h.grouped, p.pages[:1])",
		nets: []net{{pkg: "pagecache", run: "TestEachRangeOfAGroupIsHeldBack"}},
	},
	{
		name: "a version is announced before its pages arrive",
		file: "pagecache/publications.go",
		old:  "\t\t\tf.published.state.Add(1)\n",
		new:  "\t\t\tf.published.state.Add(2)\n",
		nets: []net{{pkg: "pagecache", run: "TestVersionIsToldLast"}},
	},
}
