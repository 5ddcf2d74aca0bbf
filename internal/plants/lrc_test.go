package plants

// lrcPlants are faults in the rules.
var lrcPlants = []plant{
	{
		name: "a release does not advance the version",
		file: "lrc/release.go",
		old:  "\t\tr.v = r.v.Next(o)\n",
		new:  "",
		nets: []net{
			{pkg: "lrc", run: "TestTranscripts"},
			{pkg: "pagecache", run: "TestReleaseMakesBytesVisibleToTheCPU"},
		},
	},
	{
		name: "a release leaves the kernel's pages alone",
		file: "lrc/release.go",
		old:  "r.tracked && (s.cpu || f.HeldUnasked) {",
		new:  "r.tracked && f.HeldUnasked {",
		nets: []net{
			{pkg: "lrc", run: "TestTranscripts"},
			{pkg: "fs", run: "TestReadersSeeWhatDevicesReleased"},
		},
	},
	{
		name: "pages that the kernel reads again while they drain stay there",
		file: "lrc/release.go",
		old:  "if !s.cpu || s.firstPending() == nil {",
		new:  "if s.cpu || s.firstPending() == nil {",
		nets: []net{
			{pkg: "lrc", run: "TestTranscripts"},
			{pkg: "pagecache", run: "TestPagesWrittenWholeWhileDrainingAreDroppedAgain"},
		},
	},
	{
		name: "draining pages are collected",
		file: "lrc/pending.go",
		old:  "if entering || len(f.drain) == 0 {",
		new:  "if entering || len(f.drain) >= 0 {",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"},
			{pkg: "pagecache", run: "TestReadsWhileDraining|TestStaleWriteBack"},
		},
	},
	{
		name: "no base is kept before home changes",
		file: "lrc/write.go",
		old:  "\tranges = f.within(ranges)\n\tf.pages.scan(ranges, needs,",
		new:  "\tranges = nil\n\tf.pages.scan(ranges, needs,",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"},
			{pkg: "pagecache", run: "TestWritersOfOnePageMergeByBytes"},
		},
	},
	{
		name: "a base stays in use after its bytes were collected",
		file: "lrc/collect.go",
		old:  "r.base, r.v = BaseHome, r.v.Join(s.home)",
		new:  "r.v = r.v.Join(s.home)",
		nets: []net{{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"}},
	},
	{
		name: "pages past the new end of file stay pending",
		file: "lrc/truncate.go",
		old:  "\t\ts.home = s.released\n\t\tfor i := range s.replicas {\n\t\t\ts.replicas[i].v, s.replicas[i].base",
		new:  "\t\tfor i := range s.replicas {\n\t\t\ts.replicas[i].v, s.replicas[i].base",
		nets: []net{{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"}},
	},
	{
		name: "a write by a CPU program makes no replica stale",
		file: "lrc/write.go",
		old:  "\t\ts.released = s.released.Next(versions.CPU)\n\t\ts.home = s.home.With(versions.CPU, s.released.Get(versions.CPU))\n",
		new:  "\t\ts.released = s.released.With(versions.CPU, s.released.Get(versions.CPU))\n",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"},
			{pkg: "pagecache", run: "TestWritersOfOnePageMergeByBytes|TestAcquireKeepsUnreleasedBytes"},
		},
	},
	{
		name: "an acquire overwrites what programs stored",
		file: "lrc/acquire.go",
		old:  "case !r.tracked:\n",
		new:  "case r.base == BaseHome || r.base != BaseHome:\n",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"},
			{pkg: "pagecache", run: "TestAcquireKeepsUnreleasedBytes"},
		},
	},
	{
		name: "the lower owner wins",
		file: "lrc/merge.go",
		old:  "versions := [2][]byte{theirs, mine}",
		new:  "versions := [2][]byte{mine, theirs}",
		nets: []net{
			{pkg: "lrc", run: "TestMerge"},
			{pkg: "pagecache", run: "TestOverlapGoesToTheHighestOwnerAndIsCounted"},
		},
	},
	{
		name: "pages with releases that are not home lose their base",
		file: "lrc/expose.go",
		old:  "return r != nil && r.tracked && !r.pending(s.home) }\n\tf.scan(rg, idle,",
		new:  "return r != nil && r.tracked }\n\tf.scan(rg, idle,",
		nets: []net{{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts"}},
	},
	{
		name: "a commit forgets bytes of a concurrent collect",
		file: "lrc/collect.go",
		old:  "return keep, append(drop, more...)",
		new:  "return keep[:0], append(drop, more...)",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts|TestPlanTranscripts"},
			{pkg: "pagecache", run: "TestRandomDevices|TestAcquireKeepsUnreleasedBytes|TestWritersOfOnePageMergeByBytes"},
		},
	},
	{
		name: "an aborted write leaves a base that was never kept",
		file: "lrc/write.go",
		old:  "\tp.f.plans.end(p.ticket)\n\tp.f.notKept(p.Keep)\n",
		new:  "\tp.f.plans.end(p.ticket)\n",
		nets: []net{
			{pkg: "lrc", run: "TestAbortedPlans|TestPlanTranscripts"},
			{pkg: "pagecache", run: "TestAbortedPlansKeepNothing|TestBaseThatCannotBeReadBesideAWrite"},
		},
	},
	{
		name: "an aborted collect leaves a base that was never kept",
		file: "lrc/collect.go",
		old:  "\tp.f.plans.end(p.ticket)\n\tp.f.notKept(p.Keep)\n",
		new:  "\tp.f.plans.end(p.ticket)\n",
		nets: []net{
			{pkg: "lrc", run: "TestAbortedPlans|TestPlanTranscripts"},
			{pkg: "pagecache", run: "TestAbortedPlansKeepNothing"},
		},
	},
	{
		name: "a write forgets that the kernel holds pages that a program wrote completely",
		file: "lrc/write.go",
		old:  "p.f.cpuChanged(p.rg, held)",
		new:  "p.f.cpuChanged(p.rg, held.Intersect(page.Range{}))",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestTranscripts|TestPlanTranscripts"},
			{pkg: "pagecache", run: "TestPagesWrittenWholeWhileDrainingAreDroppedAgain"},
		},
	},
	{
		name: "a write plan covers less than the write",
		file: "lrc/write.go",
		old:  "\tranges := []page.Range{rg}\n\tp = WritePlan",
		new:  "\trg.End = min(rg.End, rg.Start+1)\n\tranges := []page.Range{rg}\n\tp = WritePlan",
		nets: []net{
			{pkg: "lrc", run: "TestRandomPrograms|TestPlanTranscripts"},
			{pkg: "pagecache", run: "TestRandomDevices|TestWritersOfOnePageMergeByBytes|TestPunchHole|TestAbortedPlansKeepNothing"},
		},
	},
}
