package plants

// residencyPlants are faults in who gets how much of a device's memory, and when.
var residencyPlants = []plant{
	{
		name: "what was evicted for one reservation is given to another",
		file: "pagecache/residency/room.go",
		old:  "return promised == 0 || d.backend.Used()+promised+size <= d.info.Memory",
		new:  "_ = promised\n\treturn true",
		nets: []net{{pkg: "pagecache/residency", run: "TestWhatFitsDoesNotWait"}},
	},
	{
		name: "what fits waits for others' evictions",
		file: "pagecache/residency/room.go",
		old:  "\tif d.spare(size) {",
		new:  "\tif d.spare(size) && len(d.turns) == 0 {",
		nets: []net{{pkg: "pagecache/residency", run: "TestWhatFitsDoesNotWait"}},
	},
	{
		name: "reservations take no turns",
		file: "pagecache/residency/room.go",
		old:  "if waited = len(d.turns) > 1; !waited {\n\t\tclose(mine)\n\t}",
		new:  "close(mine)",
		nets: []net{{pkg: "pagecache/residency", run: "TestTurns|TestWhoGivesUpTakesNoTurn"}},
	},
	{
		name: "who gives up keeps the place in the row",
		file: "pagecache/residency/room.go",
		old:  "\t\td.yield(mine)\n\t\treturn nil, waited, ctx.Err()",
		new:  "\t\treturn nil, waited, ctx.Err()",
		nets: []net{{pkg: "pagecache/residency", run: "TestWhoGivesUpTakesNoTurn"}},
	},
	{
		name: "a reservation does not see that others got its memory",
		file: "pagecache/residency/room.go",
		old:  "\tcase there():\n\t\treturn errThere\n",
		new:  "",
		nets: []net{{pkg: "pagecache/residency", run: "TestSamePagesAtOnce"}},
	},
	{
		name: "mapped memory is given away",
		file: "pagecache/residency/extent.go",
		old:  "if x.mapped > 0 && !lost {",
		new:  "if x.mapped < 0 && !lost {",
		nets: []net{
			{pkg: "pagecache/residency", run: "TestStates"},
		},
	},
	{
		name: "memory that is being copied is freed",
		file: "pagecache/residency/extent.go",
		old:  "func (x *Extent) Hold() { x.users.Add(1) }",
		new:  "func (x *Extent) Hold() {}",
		nets: []net{
			{pkg: "pagecache/residency", run: "TestStates|TestCopiedGoesLast"},
			{pkg: "pagecache", run: "TestMemoryIsKeptForACopy|TestNoEvictionDuringACopy"},
		},
	},
	{
		name: "what is mapped is a victim",
		file: "pagecache/residency/policy/allocated.go",
		old:  "!x.mapped && !yield(x.id)",
		new:  "!yield(x.id)",
		nets: []net{{pkg: "pagecache/residency/policy", run: "TestTranscripts"}, {pkg: "pagecache/residency/policy", run: "TestTwins"}},
	},
	{
		name: "the youngest goes first",
		file: "pagecache/residency/policy/allocated.go",
		old:  "r.order.PushBack(",
		new:  "r.order.PushFront(",
		nets: []net{{pkg: "pagecache/residency/policy", run: "TestTranscripts"}, {pkg: "pagecache/residency/policy", run: "TestTwins"}},
	},
	{
		name: "extents of a file that grew are as small as the first",
		file: "pagecache/evict.go",
		old:  "residency.Size(d.info, max(f.size, m.pages.End.Offset()))",
		new:  "residency.Size(d.info, 0)",
		nets: []net{
			{pkg: "pagecache", run: "TestGrownFile"},
			{pkg: "internal/stress", run: "TestGrownFile"},
		},
	},
	{
		name: "new extents overlap those that are there",
		file: "pagecache/evict.go",
		old:  "\tif i < len(h.extents) && h.extents[i].pages().Overlaps(x.Pages()) {\n\t\treturn false\n\t}\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestSamePagesMappedAtOnce"}},
	},
	{
		name: "who is about to be given memory counts as one who has it",
		file: "pagecache/sharing.go",
		old:  "!f.givenToOthersLocked(x, m)",
		new:  "x.Mapped() == 0",
		nets: []net{{pkg: "pagecache", run: "TestWhoWasGivenNothingKeepsNoMemoryShared"}},
	},
	{
		name: "nobody is told where memory is",
		file: "pagecache/residency/extent.go",
		old:  "\t\tp.told(x, next)\n",
		new:  "\t\t_ = p\n",
		nets: []net{{pkg: "pagecache/residency", run: "TestWhoMapsIsTold"}},
	},
}
