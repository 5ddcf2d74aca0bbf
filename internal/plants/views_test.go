package plants

// viewsPlants are faults in views.
var viewsPlants = []plant{
	{
		name: "view: home's bytes come from the old version",
		file: "pagecache/views.go",
		old:  "		p.state.Mark(rg)\n",
		new:  "		_ = p\n",
		nets: []net{
			{pkg: "pagecache", run: "TestViewIsCoherent|TestRandomViews"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms/^write-through$", args: []string{"-steps=24000"}},
		},
	},
	{
		name: "view: a strided piece is one row off",
		file: "pagecache/view/layout.go",
		old:  "first++ // b begins in the gap behind that row",
		new:  "first += 2",
		nets: []net{
			{pkg: "pagecache/view", run: "."},
			{pkg: "pagecache", run: "TestViewPacksSegments|TestRandomViews"},
		},
	},
	{
		name: "view: an acquire of a part leaves out the last row",
		file: "pagecache/view/layout.go",
		old:  "first, last := part.Off/s.Length, (part.End-1)/s.Length",
		new:  "first, last := part.Off/s.Length, max((part.End-1)/s.Length-1, part.Off/s.Length)",
		nets: []net{{pkg: "pagecache/view", run: "."}},
	},
	{
		name: "view: a truncation marks pages past both ends",
		file: "pagecache/change.go",
		old:  "f.spoilLocked(page.From(min(before, size)).Pages())",
		new:  "f.spoilLocked(page.From(max(before, size)).Pages())",
		nets: []net{
			{pkg: "pagecache", run: "TestViewIsCoherent|TestRandomViews"},
		},
	},
	{
		name: "view: a page that changed during its transfer counts as fresh",
		file: "pagecache/view/state.go",
		old:  "				sets.remove(i, part, all)\n",
		new:  "				sets.remove(i, part, all)\n				s.stale.remove(i, part, all)\n",
		nets: []net{
			{pkg: "pagecache/view", run: "."},
			{pkg: "pagecache", run: "TestViewChangesWhileItComes"},
		},
	},
	{
		name: "view: pages that another view read go to the wrong offset",
		file: "pagecache/mover/share.go",
		old:  "from := at + left[0].Offset() - step.Pages.Offset()",
		new:  "from := at",
		nets: []net{
			{pkg: "pagecache", run: "TestShardsReadTheFileOnce|TestShardsBesideChanges"},
			{pkg: "pagecache", run: "TestRandomShards"},
		},
	},
	{
		name: "view: a view that joins late misses pages that nobody read for it",
		file: "pagecache/viewfill.go",
		old:  "rest = p.state.Coming()",
		new:  "rest = nil",
		nets: []net{{pkg: "pagecache", run: "TestPagesThatNobodyReadForAView"}},
	},
	{
		name: "view: bytes read before a page was claimed arrive after newer ones",
		file: "pagecache/view/state.go",
		old:  "		set.minus(busy)\n",
		new:  "",
		nets: []net{{pkg: "pagecache/view", run: "TestClaims"}},
	},
	{
		name: "links: staging memory of a neighbour is used again before the copy out of it has ended",
		file: "pagecache/mover/relay.go",
		old:  "if err := to.Peer(ctx, class, out); err != nil {",
		new:  "go to.Peer(ctx, class, out)\n\tif err := ctx.Err(); err != nil {",
		nets: []net{{pkg: "pagecache", run: "TestStagingOfANeighbourIsKept"}},
	},
	{
		name: "links: pages that a neighbour did not bring are lost",
		file: "pagecache/mover/relay.go",
		old:  "if err == nil || p.ctx.Err() != nil {",
		new:  "if true {",
		nets: []net{{pkg: "pagecache", run: "TestNeighboursLinksThatFail"}},
	},
	{
		name: "view: an eviction does not mark its pages stale",
		file: "pagecache/views.go",
		old:  "	v.staleIn(x) // for the next mapping\n",
		new:  "",
		nets: []net{
			{pkg: "pagecache", run: "TestViewMakesRoom|TestViewsAndChangesAtOnce|TestAPartOfAViewIsEvicted"},
		},
	},
	{
		name: "view: a follower copies before the pages arrived",
		file: "pagecache/view/state.go",
		old:  "			s.coming.and(i, &on)\n			if",
		new:  "			on = pageSet{}\n			if",
		nets: []net{
			{pkg: "pagecache/view", run: "."},
			{pkg: "pagecache", run: "TestViewsThatAreFilledAtOnce"},
		},
	},
	{
		name: "view: a follower copies pages of a lost device",
		file: "pagecache/views.go",
		old:  "		v.staleIn(x) // for views that follow this one\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestViewFollowsNoLostDevice"}},
	},
	{
		name: "view: a failed fill leaves its pages marked as coming",
		file: "pagecache/viewfill.go",
		old:  "	if err := t.run(ctx); err != nil {\n		p.state.GaveUp()\n",
		new:  "	if err := t.run(ctx); err != nil {\n",
		nets: []net{{pkg: "pagecache", run: "TestViewAfterAFault|TestViewsThatAreFilledAtOnce"}},
	},
	{
		name: "view: permissions are revoked and the key stays",
		file: "pagecache/views.go",
		old:  "add(f.serial, taken)",
		new:  "add(f.serial, taken-taken)",
		nets: []net{{pkg: "pagecache", run: "TestViewAfterRightsWereTaken"}},
	},
	{
		name: "view: users who must not share memory share a view",
		file: "pagecache/views.go",
		old:  "k := viewKey{device: dev.info.Ordinal, user: req.User}",
		new:  "k := viewKey{device: dev.info.Ordinal}",
		nets: []net{{pkg: "pagecache", run: "TestViewIsShared"}},
	},
	{
		name: "view: a mapping's pages are taken for home although SOURCE changed",
		file: "pagecache/viewpeers.go",
		old:  "subtract(unwritten, f.doubt)",
		new:  "unwritten",
		nets: []net{
			{pkg: "pagecache", run: "TestViewBesideAMappingAndAChangeInSource"},
		},
	},
	{
		name: "view: pages that programs may store into are taken for home",
		file: "pagecache/peers.go",
		old:  "			unwritten = page.Subtract(unwritten, rg)\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestViewBesideMemoryThatWasGivenAway"}},
	},
	{
		name: "view: released bytes do not go home first",
		file: "pagecache/viewfill.go",
		old:  "released, next, err := p.collectRestLocked(ctx, rg)",
		new:  "released, next, err := map[*holding][]page.Range(nil), rg.End, ctx.Err()",
		nets: []net{
			{pkg: "pagecache", run: "TestViewIsCoherent|TestRandomViews"},
			{pkg: "internal/mounttest", run: "TestViews$"},
		},
	},
	{
		name: "view: changes in SOURCE are not checked for",
		file: "pagecache/viewfill.go",
		old:  "	if err := f.checkHome(ctx); err != nil {\n",
		new:  "	if err := ctx.Err(); err != nil {\n",
		nets: []net{{pkg: "pagecache", run: "TestViewIsCoherent|TestRandomViews"}},
	},
	{
		name: "view: gathered rows go where the first of them goes",
		file: "pagecache/viewfill.go",
		old:  "if r.View != run.End || r.Len >= leastRow",
		new:  "if run.Empty() || r.Len >= leastRow",
		nets: []net{{pkg: "pagecache", run: "TestViewOfShortRows|TestRandomViews"}},
	},
}
