package fs

import (
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A mount can forbid set-id bits and file capabilities (nosuid), devices (nodev), programs (noexec) and symbolic links
// (nosymfollow). The kernel checks the flags of the mount through which a program comes. That is ours, not SOURCE's. So
// our mount is made with the flags of SOURCE's mount.
//
// Another filesystem mounted below SOURCE may have more flags, or SOURCE may get more later. Then nodes there are shown
// without what the flags forbid: without set-id bits and file capabilities, as devices with number 0, without execute
// bits. Programs can still map such a file with PROT_EXEC, or execute it by an ACL entry, and symbolic links there are
// followed.

// strictness is a set of these flags, with the values of statfs(2).
type strictness uint32

const (
	noSetID   strictness = unix.ST_NOSUID
	noDevices strictness = unix.ST_NODEV
	noExec    strictness = unix.ST_NOEXEC
	noFollow  strictness = 0x2000 // ST_NOSYMFOLLOW
)

// mountWords has each flag's word in mount(8) and mountinfo, and its value in fsmount(2).
var mountWords = []struct {
	flag      strictness
	word      string
	attribute int
}{
	{noSetID, "nosuid", unix.MOUNT_ATTR_NOSUID},
	{noDevices, "nodev", unix.MOUNT_ATTR_NODEV},
	{noExec, "noexec", unix.MOUNT_ATTR_NOEXEC},
	{noFollow, "nosymfollow", unix.MOUNT_ATTR_NOSYMFOLLOW},
}

// strictnessOf returns the flags of the mount that path is on.
func strictnessOf(path string) strictness {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return 0
	}
	return strictness(st.Flags) & (noSetID | noDevices | noExec | noFollow)
}

// strictnessNamed returns the flags with these words.
func strictnessNamed(words []string) (s strictness) {
	for _, w := range mountWords {
		if slices.Contains(words, w.word) {
			s |= w.flag
		}
	}
	return s
}

// mountAttributes returns the attributes of fsmount(2) that ask for s.
func (s strictness) mountAttributes() (attributes int) {
	for _, w := range mountWords {
		if s&w.flag != 0 {
			attributes |= w.attribute
		}
	}
	return attributes
}

// strictMounts knows how much stricter than our own mount each mount is.
type strictMounts struct {
	own   strictness
	table atomic.Pointer[map[uint64]strictness] // by the kernel's mount number
	stop  *os.File                              // closed to end watch
	done  chan struct{}                         // closed when watch has ended

	mu        sync.Mutex          // held while the mounts are read
	followers []func([]MountInfo) // protected by mu, which is held while they are called
}

// newStrictMounts reads the mounts and starts a goroutine that close ends.
func newStrictMounts(own strictness) (*strictMounts, error) {
	s := &strictMounts{own: own, done: make(chan struct{})}
	// Not an os.File: the runtime would poll it too, and the kernel reports a change only to the first who polls.
	mounts, err := unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	stopped, stop, err := os.Pipe()
	if err != nil {
		unix.Close(mounts)
		return nil, err
	}
	s.stop = stop
	s.read()
	go s.watch(mounts, stopped)
	return s, nil
}

// watch reads the mounts again when they change.
func (s *strictMounts) watch(mounts int, stopped *os.File) {
	defer close(s.done)
	defer unix.Close(mounts)
	defer stopped.Close()
	on := []unix.PollFd{{Fd: int32(mounts), Events: unix.POLLPRI}, {Fd: int32(stopped.Fd()), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(on, -1)
		switch {
		case err == unix.EINTR:
		case err != nil || on[1].Revents != 0:
			return
		default:
			s.read()
		}
	}
}

func (s *strictMounts) close() {
	s.stop.Close()
	<-s.done
}

// read reads the mounts, makes the table and calls the followers.
func (s *strictMounts) read() {
	s.mu.Lock() // so that an older table never replaces a newer one
	defer s.mu.Unlock()
	mounts, err := readMounts()
	if err != nil {
		return // the old one is better than none
	}
	table := make(map[uint64]strictness, len(mounts))
	for _, m := range mounts {
		table[m.number] = m.strict &^ s.own
	}
	s.table.Store(&table)
	for _, f := range s.followers {
		f(mounts)
	}
}

// follow calls f with all mounts, now and after each change. f must not block.
func (s *strictMounts) follow(f func([]MountInfo)) {
	s.mu.Lock()
	s.followers = append(s.followers, f)
	s.mu.Unlock()
	s.read()
}

// of returns how much stricter than ours the mount with this number is.
func (s *strictMounts) of(mount uint64) strictness {
	table := *s.table.Load()
	more, known := table[mount]
	if !known && mount != 0 {
		s.read() // a new mount that watch has not read yet
		more = (*s.table.Load())[mount]
	}
	return more
}

// conceal removes from st what the mount forbids on which n was found. If n was found on several mounts, all of them
// count.
func (fs *fileSystem) conceal(n *node, st *unix.Statx_t) {
	more := fs.strict.of(st.Mnt_id)
	if more != 0 {
		n.strict.Or(uint32(more))
	}
	if more = strictness(n.strict.Load()); more == 0 {
		return
	}
	st.Mode &^= uint16(n.concealed())
	if n.kind == unix.S_IFCHR || n.kind == unix.S_IFBLK {
		if more&noDevices != 0 {
			st.Rdev_major, st.Rdev_minor = 0, 0
		}
	}
}

// concealed returns the mode bits of n that are hidden.
func (n *node) concealed() (bits uint32) {
	more := strictness(n.strict.Load())
	if more == 0 || !n.isRegular() {
		return 0 // set-id bits of directories affect only new files
	}
	if more&noSetID != 0 {
		bits |= unix.S_ISUID | unix.S_ISGID
	}
	if more&noExec != 0 {
		bits |= 0111
	}
	return bits
}

// concealsAttribute reports whether an extended attribute of n is hidden.
func (n *node) concealsAttribute(name string) bool {
	return strictness(n.strict.Load())&noSetID != 0 && name == "security.capability"
}

// parseStrictness parses the mount options in mountinfo.
func parseStrictness(options string) (s strictness) {
	for option := range strings.SplitSeq(options, ",") {
		for _, w := range mountWords {
			if option == w.word {
				s |= w.flag
			}
		}
	}
	return s
}
