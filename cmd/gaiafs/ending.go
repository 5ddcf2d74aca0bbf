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
	// forcedWriteBack is how long a forced end still writes bytes home.
	forcedWriteBack = 10 * time.Second
	// keepFor is how long a daemon whose mount is gone keeps bytes that home does not accept, and retries.
	keepFor = time.Hour
	// namesAgain is how often it logs which files those are.
	namesAgain = time.Minute
	// oneAct is the time within which signals count as one. timeout(1) signals the process and then its group, and sudo
	// and container engines pass on what the terminal sends as well.
	oneAct = 200 * time.Millisecond
)

// ending is the state of a service's end.
type ending struct {
	gone chan struct{} // closed when the mount is gone
	over chan struct{} // closed when everything has ended; err is set before
	err  error

	// giveUp ends patience: bytes that home does not accept are then lost.
	patience context.Context
	giveUp   context.CancelFunc
	// closing ends some time after a forced end: calls that still hang are then abandoned.
	closing context.Context
	stop    context.CancelFunc
	once    sync.Once // closes the cache

	// forced receives the process that forces the end of a detached mount.
	forced chan int32

	mu       sync.Mutex
	asker    int32          // the last process that was told to unmount, 0 if none; protected by mu
	askers   sync.WaitGroup // requests that wait for the final result; added to with mu held while isOver is false
	isOver   bool           // protected by mu
	cause    string         // why the service ends; empty while it serves; protected by mu
	givesUp  time.Time      // when patience ends by itself, zero if it does not; protected by mu
	wanted   bool           // bytes wait to go home, so the mount should be held; protected by mu
	leaving  int            // how many calls of mayGo are in force; the mount is not held then; protected by mu
	detached bool           // no program finds the mount, so holding it is useless; protected by mu
}

func newEnding() *ending {
	e := &ending{gone: make(chan struct{}), over: make(chan struct{}), forced: make(chan int32, 1)}
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

// hold keeps the mount busy while bytes wait to go home. It is pagecache.Options.Hold.
func (s *service) hold() (held <-chan struct{}, end func()) {
	held = s.setHold(func(e *ending) { e.wanted = true })
	return held, func() { s.setHold(func(e *ending) { e.wanted = false }) }
}

// setHold applies change to what decides whether the mount is held, and then holds the mount or lets it go. It does not
// block. held is closed when the mount is held, or at once if it is not to be held.
func (s *service) setHold(change func(*ending)) (held <-chan struct{}) {
	e := s.end
	e.mu.Lock()
	defer e.mu.Unlock()
	change(e)
	mount := s.inService.Load()
	if mount != nil && e.wanted && e.leaving == 0 && !e.detached {
		return mount.Hold()
	}
	if mount != nil {
		mount.LetGo()
	}
	return closedChannel
}

var closedChannel = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// mayGo stops holding the mount, although bytes wait to go home, until undo is called.
func (s *service) mayGo() (undo func()) {
	s.setHold(func(e *ending) { e.leaving++ })
	return func() { s.setHold(func(e *ending) { e.leaving-- }) }
}

// noticedAfter is how long the kernel may take to end a mount that was really unmounted, not only detached.
const noticedAfter = time.Second

// noticeDetached is fs.Options.Detached. If only the daemon kept the mount busy, the mount ends now. Its bytes are kept
// and retried for keepFor.
func (s *service) noticeDetached(is bool) {
	s.setHold(func(e *ending) { e.detached = is })
	if !is {
		return
	}
	time.AfterFunc(noticedAfter, func() {
		e := s.end
		e.mu.Lock()
		still, known := e.detached && !e.isOver, e.cause != ""
		e.mu.Unlock()
		if mount := s.inService.Load(); mount != nil && still && !known && !e.isGone() {
			s.log.Warn("the mount was detached, as by umount -l: no new program finds it; this process goes on for the "+
				"programs that use it", "process", os.Getpid(), "waiting", describeWaiting(s.cache.Waiting()),
				"users", describe(mountedElsewhere(mount.Device(), "")))
		}
	})
}

// run serves until the mount is gone or a signal ends it.
func (s *service) run(signals <-chan os.Signal) error {
	e := s.end
	cause := "unmounted by another program"
	select {
	case <-e.gone:
		e.mu.Lock()
		asker := e.asker
		e.mu.Unlock()
		if asker != 0 {
			cause = fmt.Sprintf("unmounted by gaiafs umount, process %d", asker)
		}
	case sig := <-signals:
		cause = signalName(sig)
	case pid := <-e.forced:
		return s.force(fmt.Sprintf("gaiafs umount --force, process %d", pid))
	}
	began := time.Now()
	s.ends(cause)
	s.log.Info("ending", "cause", cause)
	s.tellManager(stopping(cause))
	ended := make(chan error, 1)
	go func() { ended <- s.finish() }()
	for {
		select {
		case err := <-ended:
			if err == nil {
				s.log.Info("everything is written back")
			} else {
				s.log.Error("ended with errors", "error", err)
			}
			return err
		case sig := <-signals:
			if time.Since(began) >= oneAct {
				return s.force("a second signal, " + signalName(sig))
			}
		case pid := <-e.forced:
			return s.force(fmt.Sprintf("gaiafs umount --force, process %d", pid))
		}
	}
}

func signalName(sig os.Signal) string {
	if number, ok := sig.(syscall.Signal); ok {
		return unix.SignalName(number)
	}
	return sig.String()
}

// ends records why the service ends.
func (s *service) ends(cause string) {
	s.end.mu.Lock()
	defer s.end.mu.Unlock()
	s.end.cause = cause
}

// finish takes everything down in the order of the package comment. It blocks while programs use the mount, and while
// home does not accept what devices released.
func (s *service) finish() error {
	go func() {
		select {
		case <-s.end.gone:
			s.end.mu.Lock()
			s.end.givesUp = time.Now().Add(keepFor)
			s.end.mu.Unlock()
			time.AfterFunc(keepFor, s.end.giveUp)
		case <-s.end.over:
		}
	}()
	s.untilHome() // while the mount is in service, for as long as it is
	errs := []error{s.control.Drain(s.end.closing)}
	s.untilHome() // what draining released
	errs = append(errs, s.takeAway())
	err := s.close(errs...)
	closed := make(chan error, 1)
	go func() { closed <- s.control.Close() }()
	select {
	case last := <-closed:
		return errors.Join(err, last)
	case <-s.end.closing.Done():
		return err // a client's request may be waiting for a file that never answers
	}
}

// close closes the cache, once, and tells those who asked for the end how it went.
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

// untilHome writes home what devices released. While home does not accept it, the bytes are kept and the write is
// retried until patience ends.
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
			s.log.Error("this process ends when the backing filesystem has accepted what devices released; another "+
				"signal, or 'gaiafs umount --force', discards it", "process", os.Getpid(),
				"waiting", describeWaiting(waiting),
				"mounted", !s.end.isGone(), "gives_up", s.end.limit())
		}
		select {
		case <-time.After(pause):
		case <-s.end.patience.Done():
			return
		}
	}
}

// describe fills in the status of the end.
func (e *ending) describe(m *mountStatus) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m.Detached, m.Ending = e.detached || e.isGone(), e.cause
	if !e.givesUp.IsZero() {
		at := e.givesUp.UTC().Truncate(time.Second)
		m.GivesUp = &at
	}
}

// limit returns a text that says when patience ends by itself.
func (e *ending) limit() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case !e.givesUp.IsZero():
		return "at " + e.givesUp.Format(time.DateTime)
	case e.isGone():
		return "in " + keepFor.String()
	}
	return "not while it is mounted"
}

// describeWaiting names the first few files and their bytes in one line.
func describeWaiting(waiting []pagecache.Waiting) string {
	const most = 5
	if len(waiting) == 0 {
		return "nothing"
	}
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

// takeAway unmounts. It returns when no program uses the mount any more, except through a descriptor that a client
// library keeps for its devices.
func (s *service) takeAway() error {
	s.mayGo()
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
	switch err := awaitUnmount(done, s.mountedHere); {
	case errors.Is(err, errElsewhere):
		s.awaitPrograms()
		return nil
	case !errors.Is(err, syscall.EBUSY):
		return err
	}
	s.log.Warn("the mountpoint is in use: it is detached now, and this process ends when those programs have ended; "+
		"a second signal ends it at once",
		"mountpoint", where, "users", describe(usersOf(where)))
	s.syncKernel()
	if err := s.detach(); err != nil {
		return fmt.Errorf("%s cannot be detached: %w", where, err)
	}
	s.awaitPrograms()
	return nil
}

// errElsewhere says that the mount is gone from its mountpoint, and still exists elsewhere.
var errElsewhere = errors.New("it is mounted elsewhere")

// awaitUnmount returns what an unmount sends to done. An unmount that has taken effect lasts until the mount is gone
// everywhere; awaitUnmount then returns errElsewhere. On a busy machine, an unmount may also take long before it fails.
func awaitUnmount(done <-chan error, mountedHere func() bool) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			if !mountedHere() {
				return errElsewhere
			}
		}
	}
}

// awaitPrograms returns when no program uses the mount, which is no longer at its mountpoint.
func (s *service) awaitPrograms() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for said := false; ; {
		select {
		case <-s.end.gone:
			return
		case <-tick.C:
		}
		users := mountedElsewhere(s.mount.Device(), "")
		if len(users) == 0 && s.mount.DeviceOnly() {
			s.log.Info("the files still open are open for devices only: no longer waiting for them")
			return
		}
		if len(users) > 0 && !said {
			said = true
			s.log.Warn("the filesystem is also mounted elsewhere; this process ends when those mounts are gone; a second "+
				"signal ends it at once",
				"users", describe(users))
		}
	}
}

// mountedHere reports whether the mount is at its mountpoint.
func (s *service) mountedHere() bool {
	m, err := fs.MountAt(s.mount.Mountpoint())
	return err == nil && m.Device == s.mount.Device()
}

// syncKernel makes the kernel write its dirty pages home.
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

// detach detaches the mountpoint if it still belongs to this mount.
func (s *service) detach() error {
	if !s.mountedHere() {
		return nil
	}
	return detach(s.mount.Mountpoint())
}

// force ends at once. Programs that use the mount get errors from then on. Released bytes that home does not accept
// within forcedWriteBack are lost.
func (s *service) force(cause string) error {
	s.log.Error("ending at once; programs that use the mount get errors", "cause", cause)
	s.ends(cause)
	s.end.giveUp()
	s.mayGo()
	if err := s.detach(); err != nil {
		s.log.Error("the mountpoint stays behind", "mountpoint", s.mount.Mountpoint(), "error", err)
	}
	time.AfterFunc(forcedWriteBack, s.end.stop)
	err := errors.Join(s.close(), fmt.Errorf("ended by %s", cause))
	s.log.Error("ended", "error", err)
	return err
}

// endDocument answers an END; see docs/dev/protocol.md.
type endDocument struct {
	State   string              `json:"state"`
	Waiting []pagecache.Waiting `json:"waiting,omitempty"`
	Error   string              `json:"error,omitempty"`
	// Detached says that there is nothing to unmount. Ending says why the service ends anyway, if it does.
	Detached bool   `json:"detached,omitempty"`
	Ending   string `json:"ending,omitempty"`
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
	e := s.end
	var answer endDocument
	if err := s.cache.Flush(ctx); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		answer.Error = err.Error()
		answer.Waiting = s.cache.Waiting()
	}
	e.mu.Lock()
	answer.Detached, answer.Ending = e.detached || e.isGone(), e.cause
	e.mu.Unlock()
	if len(answer.Waiting) > 0 && !r.Force {
		s.log.Error("not unmounted: the backing filesystem does not accept what devices released", "process", r.PID,
			"waiting", describeWaiting(answer.Waiting))
		answer.State = endRefused
		return say(answer)
	}
	e.mu.Lock()
	if e.isOver {
		e.mu.Unlock()
		return syscall.ESHUTDOWN
	}
	e.askers.Add(1)
	if !answer.Detached {
		e.asker = r.PID
	}
	e.mu.Unlock()
	defer e.askers.Done()
	if r.Force {
		defer s.mayGo()() // do not hold the mount again while this client may unmount
	}
	s.mount.WaitHolds()
	answer.State = endReady
	if err := say(answer); err != nil {
		return err
	}
	if answer.Detached && r.Force {
		select {
		case e.forced <- r.PID:
		default: // another request was faster
		}
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
			if !s.mountedHere() { // the client unmounted, and did not wait until the kernel told this process
				return ctx.Err()
			}
			// The client could not unmount, or changed its mind.
			e.mu.Lock()
			if e.asker == r.PID {
				e.asker = 0
			}
			e.mu.Unlock()
			return ctx.Err()
		}
	}
}
