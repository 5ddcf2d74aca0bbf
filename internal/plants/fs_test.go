package plants

// fsPlants are faults in what requests do.
var fsPlants = []plant{
	{
		name: "the source of copy_file_range is not collected",
		file: "fs/file_space.go",
		old:  "if f := src.content.live(); f != nil {",
		new:  "if f := src.content.live(); f != nil && size < 0 {",
		nets: []net{
			{pkg: "fs", run: "TestCopiesSeeWhatDevicesReleased"},
		},
	},
	{
		name: "O_TRUNC passes the rules by",
		file: "fs/file.go",
		old:  "errno := toErrno(c.changeHome(ctx, pagecache.Change{Kind: pagecache.ChangeTruncate}, truncate))",
		new:  "_ = pagecache.ChangeTruncate\n\terrno := toErrno(truncate(0, 0))",
		nets: []net{{pkg: "fs", run: "TestTruncationAtOpenReachesDevices"}},
	},
	{
		name: "zeroing a range is taken for allocating it",
		file: "fs/file_space.go",
		old:  "case in.Mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0:",
		new:  "case in.Mode&unix.FALLOC_FL_PUNCH_HOLE != 0:",
		nets: []net{{pkg: "fs", run: "TestZeroedRangesReachDevices"}},
	},
	{
		name: "punching a hole is taken for allocating",
		file: "fs/file_space.go",
		old:  "case in.Mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0:",
		new:  "case in.Mode&unix.FALLOC_FL_ZERO_RANGE != 0:",
		nets: []net{
			{pkg: "fs", run: "TestZeroedRangesReachDevices"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=2000"}},
		},
	},
	{
		name: "a direct read is taken for one that enters the kernel's pages",
		file: "fs/file_read.go",
		old:  "direct := of.direct || in.Flags&unix.O_DIRECT != 0",
		new:  "direct := of.direct",
		nets: []net{{pkg: "fs", run: "TestDirectReadBesideADirtyPage"}},
	},
	{
		name: "a direct read does not see what devices released",
		file: "fs/file_read.go",
		old:  "if f := of.content.live(); f != nil {",
		new:  "if f := of.content.live(); f != nil && !direct {",
		nets: []net{
			{pkg: "fs", run: "TestDirectReadsSeeWhatDevicesReleased"},
		},
	},
	{
		name: "fsync leaves released bytes on the device",
		file: "fs/file.go",
		old:  "return toStatus(f.Sync(ctx, sync))",
		new:  "_, _ = f, ctx\n\t\treturn toStatus(sync())",
		nets: []net{
			{pkg: "internal/stress", run: "TestFullDisk|TestDeviceLost$"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=2000"}},
		},
	},
	{
		name: "the kernel keeps what it read during a direct write",
		file: "fs/file_write.go",
		old:  "if w.direct && !w.writeBack && of.content.filled.Load() {",
		new:  "if w.direct && w.writeBack && of.content.filled.Load() {",
		nets: []net{{pkg: "fs", run: "TestReadDuringDirectWrite"}},
	},
	{
		name: "writing keeps set-id bits",
		file: "fs/file_write.go",
		old:  "if in.WriteFlags&fuse.WRITE_KILL_SUIDGID != 0 {",
		new:  "if in.WriteFlags&fuse.WRITE_KILL_SUIDGID < 0 {",
		nets: []net{{pkg: "fs", run: "TestSetIDBitsAreCleared"}},
	},
	{
		name: "old bytes of a page that was filled too early go home",
		file: "fs/kernel_pages.go",
		old:  "if mine := data[at-off]; mine == *b {",
		new:  "if mine := data[at-off]; mine != mine {",
		nets: []net{{pkg: "fs", run: "TestSuspectPagesAreMerged"}},
	},
	{
		name: "pages that were filled too early stay",
		file: "fs/kernel_pages.go",
		old:  "\tif len(again) == 0 {\n\t\treturn\n\t}\n\tfs.corrections.Add(1)",
		new:  "\tif len(again) >= 0 {\n\t\treturn\n\t}\n\tfs.corrections.Add(1)",
		nets: []net{{pkg: "fs", run: "TestCorrectionBehindItsWrite"}},
	},
	{
		name: "an error in the middle of a read is taken for end of file",
		file: "fs/file_read.go",
		old:  "if err != nil && (len(got) == 0 || !direct) {",
		new:  "if err != nil && len(got) == 0 {",
		nets: []net{{pkg: "fs", run: "TestErrorInTheMiddleOfARead"}},
	},
	{
		name: "a WRITE does not wait for a reader of its page",
		file: "fs/kernel_pages.go",
		old:  "\t\t\tby.waiting[other] = -1\n",
		new:  "\t\t\t_ = other\n",
		nets: []net{{pkg: "fs", run: "TestHazard"}},
	},
	{
		name: "SEEK_DATA collects nothing",
		file: "fs/file_space.go",
		old:  "\t\tif err := f.ReadRange(ctx, page.From(int64(in.Offset))); err != nil {",
		new:  "\t\tif err := f.ReadRange(ctx, page.Bytes{}); err != nil {",
		nets: []net{
			{pkg: "fs", run: "TestSparseFilesAfterADeviceWroteIntoAHole"},
			{pkg: "internal/mounttest", run: "TestRandomPrograms", args: []string{"-steps=4000"}},
		},
	},
	{
		name: "the mount's own changes hide those in SOURCE",
		file: "fs/witness.go",
		old:  "\t_ = w.lookLocked(fd) // what cannot be asked for is not known\n",
		new:  "",
		nets: []net{{pkg: "internal/stress", run: "TestOwnChangesHideNothing"}},
	},
	{
		name: "zeros stay behind the end that SOURCE had when a program makes the file longer",
		file: "fs/longer.go",
		old:  "if size <= told || told%page.Size == 0",
		new:  "if size >= 0 || told%page.Size == 0",
		nets: []net{{pkg: "internal/stress", run: "TestSurpassedInSource"}},
	},
	{
		name: "changes in SOURCE are not noticed",
		file: "fs/witness.go",
		old:  "if told := w.told.Swap(false); told || w.known && now != w.last {",
		new:  "if told := w.told.Swap(false); told && !w.known {",
		nets: []net{
			{pkg: "fs", run: "TestSourceChangedUnderneathIsSeenAtOpen"},
			{pkg: "internal/stress", run: "TestSourceChanged"},
		},
	},
	{
		name: "the mount's own changes are taken for those of others",
		file: "fs/events.go",
		old:  "case !ev.own:",
		new:  "case ev.id != \"\":",
		nets: []net{{pkg: "fs", run: "TestEventsTellWhoChanged"}, {pkg: "fs", run: "TestForeignChangeDuringOwnChange"}},
	},
	{
		name: "set-id bits work although SOURCE's filesystem forbids them",
		file: "fs/strict.go",
		old:  "table[m.number] = m.strict &^ s.own",
		new:  "table[m.number] = 0 & s.own",
		nets: []net{{pkg: "fs", run: "TestFlagsOfTheSourceHold"}},
	},
}
