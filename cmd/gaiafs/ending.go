package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

const (
	// forcedWriteBack is how long a forced end goes on bringing bytes home.
	forcedWriteBack = 10 * time.Second
	// keepFor is how long a daemon whose mount is gone keeps bytes that home does not take, and tries again.
	keepFor = time.Hour
	// namesAgain is how often it says which those are.
	namesAgain = time.Minute
)

// ending is what a service needs to know of its end.
type ending struct {
	gone chan struct{} // closed when the mount is gone
	over chan struct{} // closed when everything is at its end, after err was set
	err  error

	// giveUp ends the patience with bytes that home does not take; patience ends with it.
	patience context.Context
	giveUp   context.CancelFunc
	// closing ends a while after a second signal: whatever hangs then is left behind.
	closing context.Context
	stop    context.CancelFunc
	once    sync.Once // closes the cache

	mu      sync.Mutex
	asker   int32          // the process that was told last to unmount, 0 if none was; protected by mu
	askers  sync.WaitGroup // those who wait for the last word; added to with mu held, while isOver is not set
	isOver  bool           // protected by mu
	wanted  bool           // bytes wait, so the mount should be held; protected by mu
	free    bool           // it is not to be held all the same; protected by mu
	endHold func()         // protected by mu; nil while the mount is not held
}

func newEnding() *ending {
	e := &ending{gone: make(chan struct{}), over: make(chan struct{})}
	e.patience, e.giveUp = context.WithCancel(context.Background())
	e.closing, e.stop = context.WithCancel(context.Background())
	return e
}

func (e *ending) isGone() bool {
	select {
	case <-e.gone:
		return true
	default:
		return false
	}
}

// hold keeps the mount busy while bytes wait: it is pagecache.Options.Hold.
func (s *service) hold() (end func()) {
	s.setHold(true, nil)
	return func() { s.setHold(false, nil) }
}

// setHold holds the mount, or lets go of it, as it should be now.
func (s *service) setHold(wanted bool, free *bool) {
	e := s.end
	e.mu.Lock()
	defer e.mu.Unlock()
	if free != nil {
		e.free = *free
	} else {
		e.wanted = wanted
	}
	switch mount := s.inService.Load(); {
	case e.wanted && !e.free && e.endHold == nil && mount != nil:
		e.endHold = mount.Hold()
	case (!e.wanted || e.free) && e.endHold != nil:
		e.endHold()
		e.endHold = nil
	}
}

// mayGo says whether the mount may be unmounted although bytes wait.
func (s *service) mayGo(free bool) { s.setHold(false, &free) }

// run serves until the mount is gone or a signal says so.
func (s *service) run(signals <-chan os.Signal) error {
	e := s.end
	select {
	case <-e.gone:
		e.mu.Lock()
		asker := e.asker
		e.mu.Unlock()
		if asker != 0 {
			s.log.Info("unmounted by gaiafs umount, ending", "process", asker)
		} else {
			s.log.Info("unmounted by somebody else, ending")
		}
	case sig := <-signals:
		s.log.Info("ending", "signal", sig.String())
	}
	ended := make(chan error, 1)
	go func() { ended <- s.finish() }()
	select {
	case err := <-ended:
		return err
	case sig := <-signals:
		return s.force(sig)
	}
}

// finish takes everything down in the order of the package comment. It blocks while programs use the mount, and while home does
// not take what devices released.
func (s *service) finish() error {
	go func() {
		select {
		case <-s.end.gone:
			time.AfterFunc(keepFor, s.end.giveUp)
		case <-s.end.over:
		}
	}()
	s.untilHome() // while the mount is in service, for as long as it is
	errs := []error{s.control.Drain(s.end.closing)}
	s.untilHome() // what that released
	errs = append(errs, s.takeAway())
	err := s.close(errs...)
	if err == nil {
		s.log.Info("everything is written back")
	} else {
		s.log.Error("ended with errors", "error", err)
	}
	closed := make(chan error, 1)
	go func() { closed <- s.control.Close() }()
	select {
	case last := <-closed:
		return errors.Join(err, last)
	case <-s.end.closing.Done():
		return err // a client's request may wait for a file that never answers
	}
}

// close closes the cache, once, and tells those who asked for the end how that went.
func (s *service) close(errs ...error) error {
	e := s.end
	e.once.Do(func() {
		e.err = errors.Join(append(errs, s.cache.Close(e.closing))...)
		e.mu.Lock()
		e.isOver = true
		e.mu.Unlock()
		close(e.over)
		e.askers.Wait()
	})
	return e.err
}

// untilHome brings home what devices released. While home does not take it, it is kept and tried again, until patience ends.
func (s *service) untilHome() {
	const firstPause, longestPause = 100 * time.Millisecond, time.Second
	var said time.Time
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := s.cache.Flush(s.end.patience)
		if err == nil || s.end.patience.Err() != nil {
			return
		}
		waiting := s.cache.Waiting()
		if len(waiting) == 0 {
			return
		}
		if time.Since(said) >= namesAgain {
			said = time.Now()
			s.log.Error("this process ends when the backing filesystem has taken what devices released; a second signal, or "+
				"'gaiafs umount --force', gives it up", "waiting", describeWaiting(waiting), "mounted", !s.end.isGone())
		}
		select {
		case <-time.After(pause):
		case <-s.end.patience.Done():
			return
		}
	}
}

// describeWaiting names files and bytes in one line, the first few of them.
func describeWaiting(waiting []pagecache.Waiting) string {
	const most = 5
	var names []string
	for _, w := range waiting[:min(len(waiting), most)] {
		names = append(names, w.String())
	}
	text := strings.Join(names, "; ")
	if left := waiting[min(len(waiting), most):]; len(left) > 0 {
		var bytes int64
		for _, w := range left {
			bytes += w.Bytes
		}
		text += fmt.Sprintf("; %d bytes of %d more files", bytes, len(left))
	}
	return text
}

// takeAway unmounts. It returns when no program uses the mount any more but by a descriptor that its client library keeps.
func (s *service) takeAway() error {
	s.mayGo(true)
	where := s.mount.Mountpoint()
	if s.end.isGone() {
		return s.detach() // `umount -f` ends the connection, and may leave the mount
	}
	if !s.mountedHere() { // it was detached, or unmounted here and not in another mount namespace
		s.awaitPrograms()
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- s.mount.Unmount() }()
	select {
	case err := <-done:
		if !errors.Is(err, syscall.EBUSY) {
			return err
		}
	case <-time.After(time.Second): // it is unmounted here
		s.awaitPrograms()
		return nil
	}
	s.log.Warn("the mountpoint is in use: it is detached now, and this process ends when those programs have; a second signal ends it at once",
		"mountpoint", where, "users", describe(mountUsers(where)))
	s.syncKernel()
	if err := s.detach(); err != nil {
		return fmt.Errorf("%s cannot be detached: %w", where, err)
	}
	s.awaitPrograms()
	return nil
}

// awaitPrograms returns when no program uses the mount, which is at its place no more.
func (s *service) awaitPrograms() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for said := false; ; {
		select {
		case <-s.end.gone:
			return
		case <-tick.C:
		}
		users := mountedElsewhere(s.mount.Device())
		if len(users) == 0 && s.mount.DeviceOnly() {
			s.log.Info("what is still open was open for devices only, and is waited for no longer")
			return
		}
		if len(users) > 0 && !said {
			said = true
			s.log.Warn("the filesystem is mounted elsewhere too, and this process ends when it is not; a second signal ends it at once",
				"users", describe(users))
		}
	}
}

// mountedHere reports whether the mount is at its place.
func (s *service) mountedHere() bool {
	m, err := fs.MountAt(s.mount.Mountpoint())
	return err == nil && m.Device == s.mount.Device()
}

// syncKernel has the kernel write its dirty pages home.
func (s *service) syncKernel() {
	fd, err := unix.Open(s.mount.Mountpoint(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Syncfs(fd)
		unix.Close(fd)
	}
	if err != nil {
		s.log.Warn("the kernel's pages could not all be written back", "error", err)
	}
}

// detach takes the mountpoint out of sight, if it is still this mount's.
func (s *service) detach() error {
	if !s.mountedHere() {
		return nil
	}
	return detach(s.mount.Mountpoint())
}

// force ends without waiting for programs that use the mount, which get errors from then on, nor for a home that does not take
// what devices released, which is lost.
func (s *service) force(sig os.Signal) error {
	s.log.Error("ending at once; programs that use the mount get errors", "signal", sig.String())
	s.end.giveUp()
	s.mayGo(true)
	if err := s.detach(); err != nil {
		s.log.Error("the mountpoint stays behind", "mountpoint", s.mount.Mountpoint(), "error", err)
	}
	time.AfterFunc(forcedWriteBack, s.end.stop)
	err := errors.Join(s.close(), fmt.Errorf("ended by a second signal (%s)", strings.ToLower(sig.String())))
	s.log.Error("ended", "error", err)
	return err
}

// endDocument is what an END is answered with, see docs/protocol.md.
type endDocument struct {
	State   string              `json:"state"`
	Waiting []pagecache.Waiting `json:"waiting,omitempty"`
	Error   string              `json:"error,omitempty"`
}

const (
	endRefused = "refused"
	endReady   = "ready"
	endOver    = "ended"
)

// serveEnd is control.Options.End.
func (s *service) serveEnd(ctx context.Context, r control.EndRequest) error {
	say := func(d endDocument) error {
		text, err := json.Marshal(d)
		if err != nil {
			return err
		}
		return r.Say(append(text, '\n'), d.State != endReady)
	}
	var answer endDocument
	if err := s.cache.Flush(ctx); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		answer.Error = err.Error()
		answer.Waiting = s.cache.Waiting()
	}
	if len(answer.Waiting) > 0 && !r.Force {
		s.log.Error("not unmounted: the backing filesystem does not take what devices released", "process", r.PID,
			"waiting", describeWaiting(answer.Waiting))
		answer.State = endRefused
		return say(answer)
	}
	e := s.end
	e.mu.Lock()
	if e.isOver {
		e.mu.Unlock()
		return syscall.ESHUTDOWN
	}
	e.askers.Add(1)
	e.asker = r.PID
	e.mu.Unlock()
	defer e.askers.Done()
	if r.Force {
		s.mayGo(true)
	}
	s.mount.WaitHolds()
	answer.State = endReady
	if err := say(answer); err != nil {
		return err
	}
	for gone := e.gone; ; {
		select {
		case <-e.over:
			last := endDocument{State: endOver}
			if e.err != nil {
				last.Error = e.err.Error()
			}
			return say(last)
		case <-gone:
			if gone = nil; r.Force {
				e.giveUp()
			}
		case <-ctx.Done():
			if e.isGone() {
				if r.Force {
					e.giveUp()
				}
				return ctx.Err()
			}
			// It could not unmount, or changed its mind.
			s.mayGo(false)
			e.mu.Lock()
			e.asker = 0
			e.mu.Unlock()
			return ctx.Err()
		}
	}
}
