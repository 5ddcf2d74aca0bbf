package cuda

import (
	"context"
	"errors"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// lane is a stream, and the right to use it. One job at a time has the lane. A job runs on its caller's thread, and
// makes the device's context current there. If the lane had its own thread, that thread and then the caller would have
// to be woken. That takes 30 to 400 µs each in virtual machines, more than most jobs take.
type lane struct {
	drv    *driver
	ctx    contextHandle
	stream streamHandle // used by jobs only

	turn chan struct{} // has a token while there is no job
	gone chan struct{} // closed by stop
}

// startLane makes a lane with a stream. It must be stopped.
func startLane(drv *driver, ctx contextHandle) (*lane, error) {
	l := &lane{drv: drv, ctx: ctx, turn: make(chan struct{}, 1), gone: make(chan struct{})}
	l.turn <- struct{}{}
	if err := l.do(context.Background(), func() error {
		return drv.check("cuStreamCreate", drv.streamCreate(&l.stream, streamNonBlocking))
	}); err != nil {
		return nil, err
	}
	return l, nil
}

// do runs f as a job and returns its error. It waits for earlier jobs until ctx ends.
func (l *lane) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, err := receive(ctx, l.turn, l.gone); err != nil {
		return err
	}
	defer func() { l.turn <- struct{}{} }()
	return l.here(f)
}

// receive waits for an element until ctx ends or gone is closed. It asks ctx for its channel only if it has to wait,
// because that starts a goroutine for a request of the kernel.
func receive[T any](ctx context.Context, from <-chan T, gone <-chan struct{}) (t T, err error) {
	select {
	case t = <-from:
		return t, nil
	default:
	}
	select {
	case t = <-from:
		return t, nil
	case <-ctx.Done():
		return t, ctx.Err()
	case <-gone:
		return t, gpubackend.ErrClosed
	}
}

// here calls f with the context current, and leaves the thread without a context. A job must not call a job.
func (l *lane) here(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := l.drv.check("cuCtxSetCurrent", l.drv.ctxSetCurrent(l.ctx)); err != nil {
		return err
	}
	defer func() { _ = l.drv.ctxSetCurrent(0) }()
	return f()
}

// stop ends the lane after the current job. It is called once.
func (l *lane) stop() {
	<-l.turn
	close(l.gone)
	// This may fail if the device is lost.
	_ = l.here(func() error { return l.drv.check("cuStreamDestroy", l.drv.streamDestroy(l.stream)) })
}

// How a lane waits: at first it polls without a pause, which is long enough for a small copy. Then it polls between
// short sleeps. After waitPoll it lets the driver wake it, which takes a fifth of a millisecond on some machines.
const (
	waitSpin  = 30 * time.Microsecond
	waitSleep = 20 * time.Microsecond
	waitPoll  = 10 * time.Millisecond
	// sleepSlack is how much later than asked for the kernel may end a sleep, in nanoseconds; by default 50 µs.
	sleepSlack = 1000
)

// wait returns when everything in the stream before e is done. Only jobs call it.
func (d *driver) wait(e eventHandle) error {
	precise := false
	for start := time.Now(); ; {
		if r := d.eventQuery(e); r != notReady {
			return d.check("cuEventQuery", r)
		}
		switch waited := time.Since(start); {
		case waited > waitPoll:
			return d.check("cuEventSynchronize", d.eventSynchronize(e))
		case waited > waitSpin:
			if !precise {
				// If this is refused, sleeps are longer. The thread may keep this setting.
				_ = unix.Prctl(unix.PR_SET_TIMERSLACK, sleepSlack, 0, 0, 0)
				precise = true
			}
			// Not time.Sleep: another thread would have to wake this one. An interrupted sleep is just shorter.
			_ = unix.Nanosleep(&unix.Timespec{Nsec: int64(waitSleep)}, nil)
		}
	}
}

// sync records e and waits for it.
func (l *lane) sync(e eventHandle) error {
	if err := l.drv.check("cuEventRecord", l.drv.eventRecord(e, l.stream)); err != nil {
		return err
	}
	return l.drv.wait(e)
}

// run runs f as a job of a lane, unless the device is lost. If f reports the loss of the device, run records it.
func (d *device) run(ctx context.Context, l *lane, f func() error) error {
	if err := d.lost(); err != nil {
		return err
	}
	err := l.do(ctx, f)
	if errors.Is(err, gpubackend.ErrDeviceLost) {
		d.loss.CompareAndSwap(nil, &err)
	}
	return err
}

// lost returns the error by which the device was lost, or nil.
func (d *device) lost() error {
	if err := d.loss.Load(); err != nil {
		return *err
	}
	return nil
}
