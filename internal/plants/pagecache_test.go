package plants

// pagecachePlants are faults in carrying the rules out.
var pagecachePlants = []plant{
	{
		name: "an eviction collects nothing",
		file: "pagecache/evict.go",
		old:  "\t// Most of it comes home a part at a time, so that requests get in between.\n",
		new:  "\tif idle() {\n\t\tf.freeExtentLocked(x)\n\t\treturn true\n\t}\n",
		nets: []net{
			{pkg: "pagecache", run: "TestEvictionMakesRoomAndBringsModifiedBytesHome"},
			{pkg: "fs", run: "TestEvictedBytesComeHome"},
		},
	},
	{
		name: "a concurrent write keeps no base",
		file: "pagecache/write.go",
		old:  "return f.keepingLocked([]page.Range{rg}, versions.CPU), true",
		new:  "f.keepingLocked([]page.Range{rg}, versions.CPU)\n\treturn keeping{}, true",
		nets: []net{
			{pkg: "pagecache", run: "TestWritersOfOnePageMergeByBytes|TestReleaseAndWriteOfOnePage"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=2000"}},
		},
	},
	{
		name: "a write does not wait for what is pending of its pages",
		file: "pagecache/write.go",
		old:  " || len(f.lrc.Pending(rg, false)) > 0 {",
		new:  " {",
		nets: []net{
			{pkg: "pagecache", run: "TestReleaseAndWriteOfOnePage|TestRandomDevices|TestWritersOfOnePageMergeByBytes"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=4000"}},
		},
	},
	{
		name: "an acquire does not collect what others released",
		file: "pagecache/acquire.go",
		old:  "\tpart.End, err = f.collectSomeLocked(ctx, part)\n",
		new:  "",
		nets: []net{
			{pkg: "pagecache", run: "TestRandomDevices"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=2000"}},
		},
	},
	{
		name: "unmapping releases nothing",
		file: "pagecache/mapping.go",
		old:  "\t\tif m.writable {\n\t\t\t_, m.unmapErr",
		new:  "\t\tif m.writable && m.pages.Empty() {\n\t\t\t_, m.unmapErr",
		nets: []net{
			{pkg: "pagecache", run: "TestUnmapIsARelease"},
			{pkg: "fs", run: "TestUnmappingReleases"},
		},
	},
	{
		name: "fsync does not wait for a release that is under way",
		file: "pagecache/collect.go",
		old:  "\tif err := f.waitDrains(ctx, whole); err != nil {\n\t\treturn err\n\t}\n\tif do == nil {",
		new:  "\t_ = whole\n\tif do == nil {",
		nets: []net{{pkg: "pagecache", run: "TestSyncWaitsForReleases"}},
	},
	{
		name: "a release does not wait for another one of its pages",
		file: "pagecache/release.go",
		old:  "\tif err := f.waitDrains(ctx, rg); err != nil {\n\t\treturn pages, err\n\t}\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestReleaseWaitsForReleases"}},
	},
	{
		name: "fsync is silent about what was lost with a device",
		file: "pagecache/collect.go",
		old:  "return errors.Join(f.reportLosses(), err)",
		new:  "return errors.Join(nil, err)",
		nets: []net{
			{pkg: "pagecache", run: "TestDeviceLost"},
			{pkg: "internal/stress", run: "TestDeviceLost$"},
		},
	},
	{
		name: "digests that changed during a scan are not looked at again",
		file: "pagecache/release.go",
		old:  "if len(moved[i]) > 0 {",
		new:  "if len(moved[i]) < 0 {",
		nets: []net{{pkg: "pagecache", run: "TestScanBesideAgreements"}},
	},
	{
		name: "bytes past end of file are written home",
		file: "pagecache/collect.go",
		old:  "if n := min(rg.Bytes(), sig.Size-rg.Offset()); n > 0 {",
		new:  "if n := rg.Bytes() + 0*sig.Size; n > 0 {",
		nets: []net{
			{pkg: "pagecache", run: "TestBytesPastEndOfFileAreNeverWritten"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=2000"}},
		},
	},
	{
		name: "pages that are mapped for writing are not tracked",
		file: "pagecache/acquire.go",
		old:  "\t\t\tf.lrc.Track(run, h.owner)\n",
		new:  "\t\t\t_ = run\n",
		nets: []net{
			{pkg: "pagecache", run: "TestReleaseMakesBytesVisibleToTheCPU"},
			{pkg: "fs", run: "TestDeviceAndProgramsShareAFile"},
		},
	},
	{
		name: "the kernel keeps pages of which something is pending while the disk is full",
		file: "pagecache/read.go",
		old:  "\t\t\tf.redropSoon(rg)\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestReadsWhileTheDiskIsFull"}},
	},
	{
		name: "a read while the disk is full merges against home instead of the base",
		file: "pagecache/read.go",
		old:  "\t\t\t\tbase = b[:]\n",
		new:  "\t\t\t\tbase = before\n",
		nets: []net{{pkg: "pagecache", run: "TestReadsWhileTheDiskIsFull"}},
	},
	{
		name: "a release is not preceded by the collect of an earlier one where the kernel caches writes",
		file: "pagecache/release.go",
		old:  "if f.lrc.HeldUnasked {",
		new:  "if f.lrc.HeldUnasked && len(modified) < 0 {",
		nets: []net{
			{pkg: "pagecache", run: "TestReleaseWithUnreadDirtyPages|TestReleaseThatIsCutShort"},
		},
	},
	{
		name: "a read from a device takes stores that nobody released",
		file: "pagecache/peerread.go",
		old:  "if sums[i] == c.agreed[i] {",
		new:  "if sums[i] == c.agreed[i] || len(sums) > 0 {",
		nets: []net{{pkg: "pagecache", run: "TestUnreleasedStoresAreNotRead"}},
	},
	{
		name: "a read from a device takes what changed while it was copied",
		file: "pagecache/peerread.go",
		old:  "if compared < p.pages.Len() && f.epoch(p.pages) != p.epoch {",
		new:  "if compared < 0 && f.epoch(p.pages) != p.epoch {",
		nets: []net{{pkg: "pagecache", run: "TestChangesDuringTheCopy|TestRandomDevicesServeReads"}},
	},
	{
		name: "a page that the end of file falls into keeps what was behind it",
		file: "pagecache/change.go",
		old:  "return f.zeroReplicasLocked(ctx, page.From(size))",
		new:  "return nil",
		nets: []net{
			{pkg: "pagecache", run: "TestTruncate"},
			{pkg: "fs", run: "TestCutPagesReachDevices"},
		},
	},
	{
		name: "what devices released is not collected before home changes",
		file: "pagecache/change.go",
		old:  "\t\tif err := f.collectLocked(ctx, rg, false); err != nil {\n\t\t\treturn err\n\t\t}\n\t\tif c.Kind != ChangeAllocate {",
		new:  "\t\tif c.Kind != ChangeAllocate {",
		nets: []net{
			{pkg: "pagecache", run: "TestPunchHole"},
			{pkg: "fs", run: "TestZeroedRangesReachDevices|TestCopiesOverWhatDevicesReleased"},
		},
	},
	{
		name: "a read that goes past the page cache collects nothing",
		file: "pagecache/read.go",
		old:  "return f.collectLocked(context.Background(), bytes.Pages().Intersect(page.Range{End: f.lrc.End()}), false)",
		new:  "return nil",
		nets: []net{
			{pkg: "fs", run: "TestSparseFilesAfterADeviceWroteIntoAHole|TestCopiesSeeWhatDevicesReleased"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=4000"}},
		},
	},
	{
		name: "memory with old bytes is given to clients",
		file: "pagecache/expose.go",
		old:  "\t\t\t\t\te.giveUp = page.AppendRange(e.giveUp, part.pages)\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestSecretsAreNotExposed"}},
	},
	{
		name: "stores into pages that were never acquired are lost",
		file: "pagecache/expose.go",
		old:  "\t\tf.hollowLocked(h, rg)\n\t}\n\treturn nil",
		new:  "\t\t_ = rg\n\t}\n\treturn nil",
		nets: []net{{pkg: "pagecache", run: "TestStoresWithoutAnAcquire"}},
	},
	{
		name: "a change in SOURCE costs bases",
		file: "pagecache/beside.go",
		old:  "\t\tfor _, run := range f.lrc.TrackedBy(part, o, onHome) {\n\t\t\tmoved = page.Subtract(moved, run)\n\t\t}\n",
		new:  "\t\t_ = o\n",
		nets: []net{{pkg: "pagecache", run: "TestBasesSurviveADirectChange|TestLostBase|TestRandomDirectChanges"}},
	},
	{
		name: "a collect moves the time of modification",
		file: "pagecache/times.go",
		old:  "if err := h.SetModified(t.mtime); err != nil {",
		new:  "if err := error(nil); err != nil {",
		nets: []net{{pkg: "fs", run: "TestReleaseIsTheMomentOfModification"}},
	},
}
