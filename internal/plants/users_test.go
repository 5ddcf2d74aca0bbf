package plants

// usersPlants are faults in what users can learn about each other, and in the effect of files that hang on other files.
var usersPlants = []plant{
	{
		name: "a stuck file counts for its lane",
		file: "pagecache/lanes.go",
		old:  "if !f.stuck() {",
		new:  "if f != nil {",
		nets: []net{{pkg: "pagecache", run: "TestAHungFileHoldsUpNoOther"}},
	},
	{
		name: "an eviction waits for a stuck file",
		file: "pagecache/evict.go",
		old:  "if givenUp() {",
		new:  "if givenUp == nil {",
		nets: []net{{pkg: "pagecache", run: "TestNoEvictionWaitsForAHungFile"}},
	},
	{
		name: "the share of a user is not checked",
		file: "pagecache/residency/pin.go",
		old:  "by.Limited && d.charges[by.User]+n > share",
		new:  "by.Limited && n > share",
		nets: []net{{pkg: "pagecache", run: "TestNoUserMapsMoreThanAShare"}},
	},
	{
		name: "a charge is not taken back",
		file: "pagecache/residency/pin.go",
		old:  "		d.dischargeLocked(by, x.size)\n",
		new:  "",
		nets: []net{{pkg: "pagecache", run: "TestNoUserMapsMoreThanAShare"}},
	},
	{
		name: "device stores go home with the daemon's right to reserved space",
		file: "fs/file_source.go",
		old:  "h.ordinary.Store(uint64(uid) + 1)",
		new:  "_ = uid",
		nets: []net{{pkg: "fs", run: "TestBlocksForRootAreNotForDevices"}},
	},
	{
		name: "the kernel's dirty pages go home with the daemon's right to reserved space",
		file: "fs/file_write.go",
		old:  "w.uid = fs.storer(of) // the request names no caller",
		new:  "w.uid = fs.creator.uid",
		nets: []net{{pkg: "fs", run: "TestBlocksForRootAreForRoot"}},
	},
	{
		name: "the mount has none of the flags of SOURCE",
		file: "fs/connection.go",
		old:  "attributes := o.strict.mountAttributes()",
		new:  "attributes := 0 * o.strict.mountAttributes()",
		nets: []net{{pkg: "fs", run: "TestFlagsOfTheSourceHold"}},
	},
	{
		name: "chmod drops hidden bits",
		file: "fs/setattr.go",
		old:  "mode = mode&^hidden | st.Mode&hidden",
		new:  "mode = mode &^ hidden",
		nets: []net{{pkg: "fs", run: "TestFlagsOfTheSourceHold"}},
	},
	{
		name: "the status of a stuck file does not show its waiting bytes",
		file: "pagecache/glance.go",
		old:  "v.WaitingBytes = f.Coming().Offset() // an upper bound; what was seen may be older than the last release",
		new:  "v.WaitingBytes = 0",
		nets: []net{{pkg: "pagecache", run: "TestAHungFileHoldsUpNoOther"}},
	},
	{
		name: "a lookup asks the server of a filesystem mounted there",
		file: "fs/attr.go",
		old:  "if err := peek(dir, name, st); err != nil {\n\t\treturn false, err",
		new:  "if err := statx(dir, name, st); err != nil {\n\t\treturn false, err",
		nets: []net{{pkg: "fs", run: "TestMountBelowSourceHangs"}},
	},
	{
		name: "one user's tokens push out those of others",
		file: "control/tokens.go",
		old:  "t.dropFrontLocked(t.mostLocked())",
		new:  "t.dropFrontLocked(privilegedUser)",
		nets: []net{{pkg: "control", run: "TestTokensAreBounded"}},
	},
}
