package cuda

import (
	"context"
	"errors"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// lane is a goroutine locked to a thread that has the device's context current. It does one job after the other.
type lane struct {
	drv    *driver
	stream streamHandle // used by jobs only

	jobs chan func()
	quit chan struct{} // closed by stop
	gone chan struct{} // closed when the goroutine has ended
}

// startLane starts a lane with a stream. It must be stopped.
func startLane(drv *driver, ctx contextHandle) (*lane, error) {
	l := &lane{drv: drv, jobs: make(chan func()), quit: make(chan struct{}), gone: make(chan struct{})}
	started := make(chan error)
	go l.work(ctx, started)
	return l, <-started
}

func (l *lane) work(ctx contextHandle, started chan<- error) {
	defer close(l.gone)
	// The thread ends with the goroutine, since nobody unlocks it: no other goroutine ever finds the context current.
	runtime.LockOSThread()
	// Where this is refused, sleeps are longer.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, sleepSlack, 0, 0, 0)
	err := l.drv.check("cuCtxSetCurrent", l.drv.ctxSetCurrent(ctx))
	if err == nil {
		err = l.drv.check("cuStreamCreate", l.drv.streamCreate(&l.stream, streamNonBlocking))
	}
	started <- err
	if err != nil {
		return
	}
	for {
		select {
		case job := <-l.jobs:
			job()
		case <-l.quit:
			_ = l.drv.streamDestroy(l.stream) // of a lost device, perhaps
			_ = l.drv.ctxSetCurrent(0)
			return
		}
	}
}

// do has the lane do f and returns its error. It waits for the jobs before it unless ctx ends meanwhile; once f is begun,
// do waits for its end, so f may use what belongs to the caller.
func (l *lane) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	answer := make(chan error, 1)
	select {
	case l.jobs <- func() { answer <- f() }:
		return <-answer
	case <-ctx.Done():
		return ctx.Err()
	case <-l.gone:
		return gpubackend.ErrClosed
	}
}

// stop ends the lane after the job that it is doing and waits for it. It is called once.
func (l *lane) stop() {
	close(l.quit)
	<-l.gone
}

// How a lane waits: at first it asks again and again, which a small copy does not outlast; then it asks between short
// sleeps; after waitPoll it has the driver wake it, which takes a fifth of a millisecond on some machines.
const (
	waitSpin  = 30 * time.Microsecond
	waitSleep = 20 * time.Microsecond
	waitPoll  = 10 * time.Millisecond
	// sleepSlack is how much later than asked for the kernel may end a sleep, in nanoseconds; by default 50 µs.
	sleepSlack = 1000
)

// wait returns when what was in the stream before e was recorded is done. It runs in a lane.
func (d *driver) wait(e eventHandle) error {
	for start := time.Now(); ; {
		if r := d.eventQuery(e); r != notReady {
			return d.check("cuEventQuery", r)
		}
		switch waited := time.Since(start); {
		case waited > waitPoll:
			return d.check("cuEventSynchronize", d.eventSynchronize(e))
		case waited > waitSpin:
			// Not time.Sleep, of which the lane's thread would be woken by another one. An interrupted sleep is a short one.
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

// run has a lane do f, unless the device is lost, and notes when f says that it is.
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

// lost returns the error by which the device was lost, nil while it is not.
func (d *device) lost() error {
	if err := d.loss.Load(); err != nil {
		return *err
	}
	return nil
}
