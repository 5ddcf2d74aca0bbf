package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/cmd/gaiafs/monitor"
	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// predecessorPatience is how long a new mount waits for the daemon of a mount that umount(8) removed before. umount(8)
// returns as soon as the mountpoint is free; the daemon ends a moment later.
const predecessorPatience = 10 * time.Second

// service is a mount and everything below it.
type service struct {
	plan    *mountPlan
	log     *slog.Logger
	started time.Time
	cache   *pagecache.Cache
	control *control.Server
	mount   *fs.Server
	// inService is mount, for callers that may run before mount is set.
	inService atomic.Pointer[fs.Server]
	end       *ending
	// noGPU says why emulated devices are used instead of GPUs. It is nil if there are GPUs, or if --gpus asked for
	// emulated devices.
	noGPU   error
	monitor *monitor.Server // nil without --metrics
	live    liveState
}

// endingSignals returns the signals that end a mount, without those that this process was started to ignore: by
// nohup(1), or by a shell that starts it in the background.
func endingSignals() []os.Signal {
	return slices.DeleteFunc([]os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}, signal.Ignored)
}

// hangUp ends a service as SIGHUP does. It does not block: if the channel is full of unread signals, the service ends
// anyway.
func hangUp(signals chan<- os.Signal) {
	select {
	case signals <- syscall.SIGHUP:
	default:
	}
}

// serve makes the mount and serves it to its end. If the mount cannot be made, report turns the error into the one to
// return. If it can, report is called with nil once the mount is usable. reported says that the reader of report is
// another process of gaiafs, which has arranged for the log to be standard error.
func (m *mountPlan) serve(signals chan os.Signal, reported bool, stderr io.Writer,
	report func(ready string, err error) error) error {
	out, discard := stderr, func() {}
	if m.logFile != "" && !reported {
		f, unmake, err := makeLog(m.logFile)
		if err != nil {
			return report("", err)
		}
		defer f.Close()
		out, discard = f, unmake
	}
	log, flush, err := m.logger(out)
	if err != nil {
		return report("", err)
	}
	defer flush()
	signal.Ignore(syscall.SIGPIPE) // the mount goes on if nobody reads the log any more

	ownLog := m.logFile == "" || reported // standard error
	s, err := m.start(log)
	if err != nil {
		discard()
		if ownLog && !reported && m.logFormat.word == "json" {
			log.Error("not mounted", "error", err)
			return loggedError{err}
		}
		return report("", err)
	}
	bounded, unbound := context.WithCancel(context.Background())
	defer unbound()
	go pagecache.BoundHeap(bounded, s.cache.HostMemory())
	log.Info("mounted", "source", m.source, "mountpoint", s.mount.Mountpoint(), "socket", s.control.Socket(),
		"passthrough", s.mount.Passthrough(), "write_back", s.mount.WriteBack(),
		"source_events", s.mount.Events(), "version", version)
	if reported {
		if err := os.Chdir("/"); err != nil { // do not keep the caller's directory busy
			log.Warn("the working directory cannot be changed", "error", err)
		}
	}
	if err := report(s.ready(), nil); err != nil {
		log.Warn("the process that started this one ended before it knew of the mount; the mount is removed again",
			"error", err)
		hangUp(signals)
	}
	s.cache.Stage(bounded)
	if !reported { // otherwise the service manager did not start this process
		s.readyForManager(s.ready())
		go s.watched(bounded)
	}
	err = s.run(signals)
	s.closeMetrics()
	if err != nil && ownLog {
		return loggedError{err}
	}
	return err
}

// logger returns the log, and a function that writes its last lines.
func (m *mountPlan) logger(w io.Writer) (log *slog.Logger, flush func(), err error) {
	if err := setLevel(&m.level, m.logLevel.word); err != nil {
		return nil, nil, err
	}
	o := &slog.HandlerOptions{Level: &m.level}
	if m.debugFuse {
		m.level.Set(slog.LevelDebug)
	}
	var h slog.Handler = slog.NewTextHandler(w, o)
	if m.logFormat.word == "json" {
		h = slog.NewJSONHandler(w, o)
	}
	if m.debugFuse { // every request, as the user asked
		return slog.New(h), func() {}, nil
	}
	q := newQuietLog(h)
	return slog.New(q), q.flush, nil
}

// start makes devices, cache, socket and mount. If one fails, it leaves none of them.
func (m *mountPlan) start(log *slog.Logger) (_ *service, err error) {
	if err := m.clearMountpoint(log); err != nil {
		return nil, err
	}
	tellEarlier(m.mountpoint, func(text string) { log.Warn(text) })
	if err := fs.Check(m.source, m.mountpoint, m.allowOther); err != nil { // before devices, which take long to open
		return nil, err
	}
	s := &service{plan: m, log: log, started: time.Now(), end: newEnding(), live: liveState{now: *m.settings}}
	devices, noGPU, err := m.gpus.open(int64(m.gpuMemory.size), log)
	if err != nil {
		return nil, err
	}
	s.noGPU = noGPU
	options := fs.Options{
		Source:       m.source,
		Mountpoint:   m.mountpoint,
		AllowOther:   m.allowOther,
		ReadOnly:     m.readOnly,
		Restrict:     m.restrict.words(),
		KernelOpens:  m.kernelOpens,
		WriteBack:    m.writeBack,
		Passthrough:  m.passthrough.word == "auto" && (len(devices) == 0 || m.readOnly),
		AttrTimeout:  kernelTimeout(m.attrTimeout),
		EntryTimeout: kernelTimeout(m.entryTimeout),
		Detached:     s.noticeDetached,
		Events:       m.sourceEvents.word,
		Log:          log,
		Debug:        m.debugFuse,
	}
	s.cache, err = pagecache.New(pagecache.Options{
		Devices:           devices,
		HostMemory:        int64(m.hostMemory),
		PinnedMemory:      int64(m.pinnedMemory),
		WriteBackInterval: m.writeBackInterval.Duration,
		WriteBack:         options.WritesBack(),
		BufferedReads:     m.directReads.word == "off",
		NeighbourLinks:    m.neighbourLinks.word == "auto",
		TrustUsers:        m.trustUsers,
		DeviceReads:       pagecache.DeviceReadsNamed(m.deviceReads.word),
		Hold:              s.hold,
		UserShare:         float64(m.userShare) / 100,
		Eviction:          m.eviction.word,
		Placement:         m.placing(),
		Transfers:         m.transfers.word,
		Tenants:           m.tenants.list,
		Preferences:       m.priorities.list,
		LiveBudget:        m.gpuMemory.size == 0,
		Log:               log,
	})
	if err != nil {
		return nil, errors.Join(err, closeDevices(devices))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.cache.Close(context.Background()))
		}
	}()
	s.control, err = s.listen(control.Options{
		AllowOther: m.allowOther,
		Cache:      control.ForCache(s.cache),
		Status:     func(v control.Viewer) any { return s.status().shownTo(v) },
		Record:     s.cache.Record,
		End:        s.serveEnd,
		File:       s.serveFile,
		Profile:    serveProfile,
		Live:       s.cache.Live(),
		Set:        s.serveSet,
		Log:        log,
	})
	if err != nil {
		return nil, err
	}
	if s.monitor, err = s.listenMetrics(); err != nil {
		return nil, errors.Join(err, s.control.Close())
	}
	options.Cache, options.Granter = s.cache, granter{s.control}
	s.mount, err = fs.Mount(options)
	if err != nil {
		s.closeMetrics()
		return nil, errors.Join(err, s.control.Close())
	}
	go func() {
		s.mount.Wait()
		close(s.end.gone)
	}()
	s.inService.Store(s.mount)
	if s.monitor != nil {
		s.monitor.Serve()
		log.Info("metrics and a live page are served", "address", "http://"+s.monitor.Address()+"/", "token",
			m.metricsToken != "")
	}
	s.setHold(func(*ending) {}) // bytes may be waiting already
	return s, nil
}

// clearMountpoint detaches mounts of gaiafs at the mountpoint whose daemons have ended. It fails if a daemon serves
// one.
func (m *mountPlan) clearMountpoint(log *slog.Logger) error {
	for {
		if is, err := fs.IsMount(m.mountpoint); err != nil || !is {
			return nil // errors about the mountpoint are reported later
		}
		// Not stat(2): the kernel may still have the attributes cached.
		_, err := within(m.mountpoint, askedFor, func() (struct{}, error) {
			return struct{}{}, unix.Statfs(m.mountpoint, new(unix.Statfs_t))
		})
		if errors.Is(err, errNoAnswer) {
			return fmt.Errorf("MOUNTPOINT %s is already a mountpoint of gaiafs, and its daemon does not answer: %s",
				m.mountpoint, silentDaemons(m.mountpoint))
		}
		if !errors.Is(err, syscall.ENOTCONN) {
			return fmt.Errorf("MOUNTPOINT %s is already a mountpoint of gaiafs: unmount it with 'gaiafs umount "+
				"%s' or choose another directory",
				m.mountpoint, m.mountpoint)
		}
		users := mountUsers(m.mountpoint)
		if err := detach(m.mountpoint); err != nil {
			return fmt.Errorf("MOUNTPOINT %s is a mount whose daemon has ended, and cannot be unmounted: %w",
				m.mountpoint, err)
		}
		log.Warn("detached a mount whose daemon had ended; programs with open files there get errors",
			"mountpoint", m.mountpoint,
			"programs", len(users))
	}
}

// listen binds the control socket. A socket named after a mountpoint at which nothing is mounted may still belong to
// the daemon of an earlier mount. That daemon is probably about to end and may be writing bytes home, so listen waits
// for it. If the daemon goes on because its mount still exists elsewhere, this one takes another name. Clients ask the
// mount for the name.
func (s *service) listen(o control.Options) (server *control.Server, err error) {
	if o.Socket = s.plan.socket; o.Socket != "" {
		if server, err = control.Listen(o); err != nil {
			return nil, err
		}
		if err := server.Announce(s.plan.mountpoint); err != nil {
			s.log.Warn("after umount -l, 'gaiafs status' will not find this process", "error", err)
		}
		return server, nil
	}
	o.Socket = control.DefaultSocket(s.plan.mountpoint, 0)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		server, err = control.Listen(o)
		left := predecessorPatience - time.Since(s.started)
		if !errors.Is(err, syscall.EADDRINUSE) || left <= 0 {
			break
		}
		if pause == 10*time.Millisecond {
			s.log.Info("waiting for the daemon of an earlier mount here to end", "socket", o.Socket, "at_most",
				left.Round(time.Millisecond).String())
		}
		time.Sleep(min(pause, left))
	}
	for n := 1; errors.Is(err, syscall.EADDRINUSE) && n < control.MostDaemons; n++ {
		if n == 1 {
			s.log.Warn("the daemon of an earlier mount here goes on; what it still writes is treated as a direct change "+
				"of SOURCE", "socket", o.Socket)
		}
		o.Socket = control.DefaultSocket(s.plan.mountpoint, n)
		server, err = control.Listen(o)
	}
	if err == nil {
		s.removeStale(o.Socket)
	}
	return server, err
}

// removeStale removes the sockets that killed daemons of the mountpoint left under other names than socket.
func (s *service) removeStale(socket string) {
	for n := range control.MostDaemons {
		other := control.DefaultSocket(s.plan.mountpoint, n)
		if other == socket {
			continue
		}
		if err := control.RemoveStale(other); err != nil && !errors.Is(err, syscall.EADDRINUSE) {
			s.log.Warn("a socket, possibly of an earlier daemon, cannot be removed", "error", err)
		}
	}
}

// kernelTimeout converts 0, "not at all", for package fs, in which 0 means the default.
func kernelTimeout(d span) time.Duration {
	if d.Duration == 0 {
		return -1
	}
	return d.Duration
}

// granter connects package fs and package control, which do not know each other.
type granter struct{ *control.Server }

func (g granter) Grant(src pagecache.Source, uid uint32) (fs.Grant, error) {
	grant, err := g.Server.Grant(src, uid)
	return fs.Grant(grant), err
}

func (g granter) GrantStatus(uid uint32) (fs.Grant, error) {
	grant, err := g.Server.GrantStatus(uid)
	return fs.Grant(grant), err
}
