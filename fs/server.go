package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Options says what to mount where, and how.
type Options struct {
	// Source is the directory to show. Mountpoint is the empty directory at which to show it.
	Source, Mountpoint string
	// Cache is the page cache of the devices, nil for a mount without devices. The caller keeps ownership.
	Cache *pagecache.Cache
	// Granter answers the helper library's ioctl. If it is nil, the ioctl fails with ENOTTY.
	Granter Granter
	// AllowOther lets users other than the mounting one use the mount. The kernel checks their permissions.
	AllowOther bool
	ReadOnly   bool
	// Restrict has options of mount(8), nosuid, nodev and noexec, that apply in addition to those of Source's mount.
	Restrict []string
	// KernelOpens lets the kernel open files and directories without asking. If changes in Source are reported (root, a
	// local filesystem), the kernel may also keep names and attributes for a minute, and a change shows at once.
	// Otherwise Mount returns NoEvents for a writable mount, and on a read-only mount a change shows after AttrTimeout.
	// Files do not pass through.
	KernelOpens bool
	// WriteBack lets the kernel cache writes before it sends them.
	WriteBack bool
	// Passthrough lets the kernel read, write and map backing files itself if it can (root, Linux 6.9), without the
	// daemon. The daemon does not see such writes, so this is for mounts without devices and for read-only mounts. It
	// turns WriteBack off, because the kernel does not do both.
	Passthrough bool
	// AttrTimeout and EntryTimeout are how long the kernel may keep attributes and names without asking. Changes made
	// directly in Source may show that late. Zero means one second; negative means not at all.
	AttrTimeout, EntryTimeout time.Duration
	// Events chooses what reports changes in Source, in addition to the files' attributes: EventsAuto, EventsAll,
	// EventsFanotify, EventsInotify or EventsOff. "" means EventsOff. If the kernel or Source does not support the
	// kind, there are no events. EventsAll watches Source's whole filesystem (root, a local filesystem), and the kernel
	// keeps names and attributes for a minute. If programs write past the daemon, EventsAll is EventsAuto.
	Events string
	// Log takes warnings and errors; nil discards them. Debug logs every request.
	Log   *slog.Logger
	Debug bool
	// Detached is called with true when the mount disappears from the mounts that this process sees, and with false
	// when it appears again. Programs may still use the mount. It must not block. It may be nil.
	Detached func(bool)

	withoutCure   bool
	withoutExpiry bool       // for a test: as on a kernel without FUSE_EXPIRE_ONLY
	unwatched     bool       // for a test: no tree
	strict        strictness // of SOURCE's mount and of Restrict
}

const (
	// maxRequest is the largest read or write request, in bytes.
	maxRequest = 1 << 20
	// maxRead is the largest read request of a mount by root, in bytes. A large read is split into several concurrent
	// requests: while one is copied, others wait for the disk. From cold disks this is a quarter faster than requests
	// of 1 MiB.
	maxRead = 128 << 10
	// readAhead is how far the kernel reads ahead in a file, in KiB.
	readAhead = 1024
	// dirtyShare is the limit for the mount's dirty pages, in percent of all dirty pages. The rest is for the backing
	// filesystem: without it, the daemon would be throttled while it writes the mount's pages home.
	dirtyShare = 50
	// maxBackground and minBackground bound the limit of background requests in flight (read-ahead, write-back). Their
	// buffers should take at most a quarter of the cache's host memory.
	maxBackground, minBackground = 256, 16
	// maxInFlight limits the bytes of all requests in flight. With a small limit, a few programs that write to a hung
	// filesystem would block all others.
	maxInFlight = 1 << 30
)

// Server is a mount that serves requests.
type Server struct {
	fs         *fileSystem
	mountpoint string
	device     string // the mount's, major:minor
	hold       hold
	served     chan struct{}
}

// Mount shows o.Source at o.Mountpoint and returns when the mount is usable. It sets the process's umask to 0 and
// raises its limit of descriptors. Its errors are sentences that say what to do.
func Mount(o Options) (*Server, error) {
	setDefaults(&o)
	place, err := checkPlace(o.Source, o.Mountpoint)
	if err != nil {
		return nil, err
	}
	o.Source, o.Mountpoint = place.source, place.mountpoint
	if err := CheckRights(o.AllowOther); err != nil {
		return nil, err
	}
	writeBackAsked := o.WriteBack
	o.WriteBack, o.Passthrough = o.WritesBack(), o.passes()
	o.strict = strictnessOf(o.Source) | strictnessNamed(o.Restrict)
	if os.Geteuid() != 0 {
		o.strict = o.strict&^noFollow | noSetID | noDevices // as fusermount mounts
	}
	unix.Umask(0) // the caller's umask counts, see credentials.go
	fs, err := newFileSystem(&o)
	if none := (*NoEvents)(nil); errors.As(err, &none) {
		return nil, none
	}
	if err != nil {
		return nil, fmt.Errorf("%s cannot be opened: %w", o.Source, err)
	}
	fs.writeBackLost = writeBackAsked && !o.WriteBack
	m := mountOptions(&o)
	fs.idmapped = m.IDMappedMount
	c, err := connect(&o, m)
	if err != nil {
		fs.close()
		return nil, fmt.Errorf("%s cannot be mounted: %w", o.Mountpoint, err)
	}
	fs.device = c.device
	server, err := c.serve(fs, m, o.withoutExpiry)
	if err != nil {
		err = errors.Join(err, c.discard(o.Mountpoint))
		fs.close()
		return nil, fmt.Errorf("%s cannot be mounted: %w", o.Mountpoint, err)
	}
	s := &Server{fs: fs, mountpoint: o.Mountpoint, device: c.device, served: make(chan struct{}), hold: hold{fd: -1}}
	s.hold.closed.L = &s.hold.mu
	guarded := make(chan *guard, 1)
	reaping, stop := context.WithCancel(context.Background())
	fs.background.Go(func() { fs.reap(reaping) })
	if fs.kernelOpens {
		fs.background.Go(func() { fs.closeIdle(reaping) })
	}
	fs.background.Go(func() { fs.followBelow(reaping) })
	fs.background.Go(func() { fs.descriptors.closeBelow(reaping) })
	if fs.tree != nil {
		go fs.tree.run()
	}
	go func() {
		defer close(s.served)
		server.Serve()
		stop()
		(<-guarded).stop()
		fs.close()
		c.close()
	}()
	if writeBackAsked && s.Passthrough() {
		o.Log.Info("--write-back has no effect: files pass through, and the kernel cannot do both")
	}
	s.tune()
	guarded <- c.guard(&o)
	if err := c.attach(o.Mountpoint); err != nil {
		c.release()
		<-s.served
		return nil, fmt.Errorf("%s cannot be mounted: %w", o.Mountpoint, err)
	}
	c.release()
	s.watchPlace(o.Detached)
	return s, nil
}

// passes reports whether Mount asks the kernel for passthrough.
func (o *Options) passes() bool {
	return o.Passthrough && !o.KernelOpens && passthroughPossible(o.Source)
}

// WritesBack reports whether Mount will ask the kernel to cache writes. It is for callers that need to know before
// there is a mount. The kernel may refuse; Server.WriteBack reports the result.
func (o *Options) WritesBack() bool { return o.WriteBack && !o.passes() }

func setDefaults(o *Options) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	for _, t := range []*time.Duration{&o.AttrTimeout, &o.EntryTimeout} {
		if *t == 0 {
			*t = defaultTimeout
		}
		*t = max(*t, 0)
	}
}

// mountOptions returns the options with which to mount.
func mountOptions(o *Options) *fuse.MountOptions {
	m := &fuse.MountOptions{
		FsName:        o.Source,
		Name:          "gaiafs",
		AllowOther:    o.AllowOther,
		MaxWrite:      maxRequest,
		MaxBackground: maxBackground,

		MaxInflightRequestBytes: maxInFlight,
		Options:                 []string{"default_permissions"},
		Logger:                  slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn),
		Debug:                   o.Debug,
		DisableSplice:           true,
		EnableAcl:               true,
		// A symbolic link never changes its target, so the kernel may keep it with the inode.
		EnableSymlinkCaching:     true,
		ExplicitDataCacheControl: true,
		// Not CAP_READDIRPLUS_AUTO: with it the kernel asks only for names after the first batch, and programs that
		// list a directory and then stat every entry pay a request for each.
		ExtraCapabilities: fuse.CAP_DONT_MASK | fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_IOCTL_DIR |
			fuse.CAP_HANDLE_KILLPRIV_V2 | fuse.CAP_SETXATTR_EXT | fuse.CAP_ASYNC_DIO | fuse.CAP_DIRECT_IO_ALLOW_MMAP,
	}
	if o.Cache != nil {
		m.MaxBackground = int(min(max(o.Cache.HostMemory()/4/maxRequest, minBackground), maxBackground))
	}
	if !o.Passthrough {
		m.DisabledCapabilities = fuse.CAP_PASSTHROUGH
	}
	if o.KernelOpens {
		// The kernel would truncate files by itself, as it sends no OPEN.
		m.ExtraCapabilities &^= fuse.CAP_ATOMIC_O_TRUNC
	}
	if o.WriteBack {
		m.ExtraCapabilities |= fuse.CAP_WRITEBACK_CACHE
	}
	if os.Geteuid() == 0 {
		m.IDMappedMount = seesAllProcesses()
		return m // connection.makeDetached does the rest
	}
	if o.strict&noExec != 0 {
		m.Options = append(m.Options, "noexec")
	}
	if o.ReadOnly {
		m.Options = append(m.Options, "ro")
	}
	return m
}

// tune sets what the protocol cannot set, but root can set for the mount's device. The kernel then reads ahead as much
// as one request can carry, and keeps more dirty pages than its default for FUSE, a hundredth of all. Without tune,
// everything is correct but somewhat slower.
func (s *Server) tune() {
	if os.Geteuid() != 0 {
		return
	}
	device := "/sys/class/bdi/" + s.device + "/"
	for name, value := range map[string]int{"read_ahead_kb": readAhead, "max_ratio": dirtyShare} {
		if err := os.WriteFile(device+name, []byte(strconv.Itoa(value)), 0); err != nil {
			s.fs.log.Debug("a default of the kernel stays in force", "setting", device+name, "error", err)
		}
	}
}

// Mountpoint returns the absolute path of the mountpoint, without symbolic links.
func (s *Server) Mountpoint() string { return s.mountpoint }

// Passthrough reports whether files may pass through. The kernel decides for each file, so this may change to false
// later.
func (s *Server) Passthrough() bool { return s.fs.passes.Load() }

// PassthroughRefused returns the number of opens for which the kernel refused passthrough.
func (s *Server) PassthroughRefused() int64 { return s.fs.refused.Load() }

// WriteBack reports whether the kernel caches writes before it sends them.
func (s *Server) WriteBack() bool { return s.fs.writeBack }

// Device returns the device number of the mount, major:minor.
func (s *Server) Device() string { return s.device }

// Events returns the kind of events in force: EventsAll, EventsFanotify, EventsInotify or EventsOff.
func (s *Server) Events() string {
	if t := s.fs.tree; t != nil && (!s.fs.kernelOpens || s.fs.unseenOpens) && t.alive.Load() {
		return EventsAll
	}
	return s.fs.events.kind
}

// EventsLost returns how often the kernel dropped events.
func (s *Server) EventsLost() int64 { return s.fs.events.overflows.Load() }

// Wait returns when the mount is gone and every request has been answered.
func (s *Server) Wait() { <-s.served }

// Unmount unmounts and waits until every request is answered. While programs use the mount, it fails with an error that
// wraps EBUSY, and the mount stays in service. It may be called again.
func (s *Server) Unmount() error {
	select {
	case <-s.served:
		return nil
	default:
	}
	s.WaitHolds()
	s.fs.touching.Lock()
	err := unmountPatiently(s.mountpoint)
	s.fs.touching.Unlock()
	if err != nil {
		select {
		case <-s.served: // unmounted by another process
			return nil
		default:
		}
		if isBusy(err) {
			return busyError(s.mountpoint)
		}
		return fmt.Errorf("%s cannot be unmounted: %w", s.mountpoint, err)
	}
	<-s.served
	return nil
}

func isBusy(err error) bool {
	return toErrno(err) == syscall.EBUSY || strings.Contains(err.Error(), "busy")
}

func busyError(mountpoint string) error {
	return fmt.Errorf("%s is in use (%w): end the programs that use it, which `fuser -vm %s` lists, and try again",
		mountpoint, syscall.EBUSY, mountpoint)
}
