package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"

	"github.com/gaiafs/gaiafs/pagecache"
)

const statxMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME | unix.STATX_MNT_ID

// statx describes name in the directory dir without following it. If name is empty, it describes dir itself.
func statx(dir int, name string, st *unix.Statx_t) error { return statxWith(dir, name, 0, st) }

// peek is statx with the attributes that the kernel has cached. On a filesystem with a server they may be old, and the
// birth time may be unknown. If name is a mountpoint, peek does not ask the server of the filesystem mounted there.
func peek(dir int, name string, st *unix.Statx_t) error {
	return statxWith(dir, name, unix.AT_STATX_DONT_SYNC, st)
}

func statxWith(dir int, name string, flags int, st *unix.Statx_t) error {
	flags |= unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	return retry(func() error { return unix.Statx(dir, name, flags, statxMask, st) })
}

// statxIn describes name in the directory parent, whose descriptor is dir. It is for callers that hold parent.names, or
// whose request makes the kernel lock the directory. If another filesystem is mounted on name, statxIn sets foreign and
// does not ask that filesystem's server, which may hang. The attributes may be old then, so the kernel must not keep
// them.
func (fs *fileSystem) statxIn(parent *node, dir int, name string, st *unix.Statx_t) (foreign bool, err error) {
	if err := peek(dir, name, st); err != nil {
		return false, err
	}
	dev := unix.Mkdev(st.Dev_major, st.Dev_minor)
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && dev != parent.key.dev {
		return true, nil
	}
	if dev == fs.root.key.dev && !fs.remote {
		return false, nil // the kernel's attributes are current
	}
	return false, statx(dir, name, st)
}

// identify returns the identity of the inode that st describes. The birth is zero if the filesystem has no birth times.
func identify(st *unix.Statx_t) identity {
	who := identity{
		key:  inodeKey{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino},
		kind: uint32(st.Mode) & unix.S_IFMT,
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		who.birth = st.Btime
	}
	return who
}

// inodeNumber returns the inode number that programs see. On the device of SOURCE it is the backing file's own. For
// filesystems mounted below, it is mixed with the device, because the mount has only one st_dev.
func (fs *fileSystem) inodeNumber(k inodeKey) uint64 {
	if k.dev == fs.root.key.dev {
		return k.ino
	}
	// The finaliser of splitmix64. The top bit avoids the numbers that filesystems count up from 1.
	h := k.dev*0x9e3779b97f4a7c15 + k.ino
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return (h ^ h>>31) | 1<<63
}

// Inode returns the inode number by which programs see a file of the cache.
func (s *Server) Inode(id pagecache.FileID) uint64 { return s.fs.inodeNumber(inodeKey{id.Dev, id.Ino}) }

// encodeDevice packs a device number as the protocol does (new_encode_dev of the kernel).
func encodeDevice(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | (minor&^0xff)<<12
}

// decodeDevice is the inverse of encodeDevice, in the form for mknod(2).
func decodeDevice(rdev uint32) int {
	return int(unix.Mkdev(rdev>>8&0xfff, rdev&0xff|rdev>>12&0xfff00))
}

// fillAttr fills the answer to the kernel from the attributes of the backing file.
func (fs *fileSystem) fillAttr(a *fuse.Attr, st *unix.Statx_t) {
	a.Ino = fs.inodeNumber(inodeKey{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino})
	a.Size = st.Size
	a.Blocks = st.Blocks
	a.Atime, a.Atimensec = uint64(st.Atime.Sec), st.Atime.Nsec
	a.Mtime, a.Mtimensec = uint64(st.Mtime.Sec), st.Mtime.Nsec
	a.Ctime, a.Ctimensec = uint64(st.Ctime.Sec), st.Ctime.Nsec
	a.Mode = uint32(st.Mode)
	a.Nlink = st.Nlink
	a.Uid, a.Gid = st.Uid, st.Gid
	a.Rdev = encodeDevice(st.Rdev_major, st.Rdev_minor)
	a.Blksize = st.Blksize
}

// fillEntry answers a request that gave the kernel a reference to n.
func (fs *fileSystem) fillEntry(out *fuse.EntryOut, n *node, st *unix.Statx_t) {
	out.NodeId = uint64(n.id)
	out.SetEntryTimeout(fs.keeps(n, fs.entryTimeout))
	fs.tellSize(n, st)
	out.SetAttrTimeout(fs.attrTimeoutOf(n, st.Size))
	shown := *st
	n.showReleases(&shown)
	fs.conceal(n, &shown)
	fs.fillAttr(&out.Attr, &shown)
}

func (fs *fileSystem) fillAttrOut(out *fuse.AttrOut, n *node, st *unix.Statx_t) {
	fs.tellSize(n, st)
	out.SetTimeout(fs.attrTimeoutOf(n, st.Size))
	shown := *st
	n.showReleases(&shown)
	fs.conceal(n, &shown)
	fs.fillAttr(&out.Attr, &shown)
}

// showReleases changes st from what home says now to what it will say once all released bytes are home. Otherwise
// programs that copy files, such as tar, would take a file with fewer blocks than bytes for a sparse one, and a file
// without blocks for one without data.
func (n *node) showReleases(st *unix.Statx_t) {
	c := n.data.Load()
	if c == nil {
		return
	}
	f := c.live()
	if f == nil {
		return
	}
	const perPage = page.Size / 512
	most := max(st.Blocks, uint64(page.Count(page.Clamp(st.Size)))*perPage)
	st.Blocks = min(st.Blocks+uint64(f.Coming())*perPage, most)
	mtime, ctime := time.Unix(st.Mtime.Sec, int64(st.Mtime.Nsec)), time.Unix(st.Ctime.Sec, int64(st.Ctime.Nsec))
	mtime, ctime = f.ShownTimes(mtime, ctime)
	st.Mtime.Sec, st.Mtime.Nsec = mtime.Unix(), uint32(mtime.Nanosecond())
	st.Ctime.Sec, st.Ctime.Nsec = ctime.Unix(), uint32(ctime.Nanosecond())
}

// GetAttr implements fuse.RawFileSystem.
func (fs *fileSystem) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	var st unix.Statx_t
	fs.beforeWrite(cancel, &in.InHeader)
	n, errno := fs.statFor(in.NodeId, in.Flags()&fuse.FUSE_GETATTR_FH != 0, in.Fh(), &st)
	if errno != 0 {
		return fuse.Status(errno)
	}
	fs.freshen(cancel, &in.Caller, n, &st)
	fs.fillAttrOut(out, n, &st)
	return fuse.OK
}

// Statx implements fuse.RawFileSystem. The kernel sends it when a program asks for the birth time.
func (fs *fileSystem) Statx(cancel <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	var st unix.Statx_t
	fs.beforeWrite(cancel, &in.InHeader)
	n, errno := fs.statFor(in.NodeId, in.GetattrFlags&fuse.FUSE_GETATTR_FH != 0, in.Fh, &st)
	if errno != 0 {
		return fuse.Status(errno)
	}
	fs.freshen(cancel, &in.Caller, n, &st)
	fs.tellSize(n, &st)
	out.SetTimeout(fs.attrTimeoutOf(n, st.Size))
	n.showReleases(&st)
	fs.conceal(n, &st)
	out.FromStatx(&st)
	out.Ino = fs.inodeNumber(inodeKey{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino})
	return fuse.OK
}

// statFor returns and describes a node, through the open file if the request names one.
func (fs *fileSystem) statFor(id uint64, hasHandle bool, handle uint64, st *unix.Statx_t) (*node, unix.Errno) {
	if hasHandle {
		if of := fs.files.get(handle); of != nil {
			return of.node, toErrno(statx(of.fd, "", st))
		}
	}
	n := fs.node(id)
	if n == nil {
		return nil, unix.ESTALE
	}
	return n, fs.stat(n, st)
}

// timespec returns the argument of utimensat for one of the two times of a request.
func timespec(valid, set, now uint32, sec uint64, nsec uint32) unix.Timespec {
	switch {
	case valid&now != 0:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	case valid&set != 0:
		return unix.Timespec{Sec: int64(sec), Nsec: int64(nsec)}
	}
	return unix.Timespec{Nsec: unix.UTIME_OMIT}
}

// defaultTimeout is how long the kernel may keep attributes and names without asking.
const defaultTimeout = time.Second
