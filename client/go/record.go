package gaiafs

import (
	"context"
	"io"
	"syscall"
)

// Record asks the daemon of a mountpoint to record the accesses of all programs to its files, and writes the recording
// to w in the format of docs/trace.md. When ctx ends, Record completes the recording and returns nil.
//
// Errors: EPERM for users other than root and the one who mounted, EBUSY if somebody else is recording, ENOTCONN if the
// mount ended first, the error of w if a write fails, and those of Status. After an error, what was written is a
// truncated trace.
func Record(ctx context.Context, mountpoint string, w io.Writer) error {
	return during("record", record(ctx, mountpoint, w))
}

func record(ctx context.Context, mountpoint string, w io.Writer) error {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return err
	}
	defer c.release()
	var id requestID
	// The connection's reader must not wait for the answer to STOP, because it reads that answer itself.
	began, failing, done := make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{})
	stopped := make(chan error, 1)
	go func() {
		stopped <- func() error {
			select {
			case <-began:
			case <-done:
				return nil
			}
			select {
			case <-ctx.Done():
			case <-failing:
			case <-done:
				return nil
			}
			_, err := c.simple(typeStop, stopBody(id))
			return err
		}()
	}()
	var failure error
	err = c.doAs(typeRecord, token[:], func(h header, body []byte, _ []int) error {
		switch h.typ {
		case typeDocument:
			if failure == nil {
				if _, failure = w.Write(body); failure != nil {
					notify(failing)
				}
			}
			notify(began)
			return failure
		case typeResult:
			if _, err := resultOf(body); err != nil {
				return err
			}
		}
		return failed(syscall.EPROTO, "the daemon answered a RECORD with type %#x", uint16(h.typ))
	}, func(number requestID) { id = number })
	close(done)
	if stopErr := <-stopped; err == nil {
		err = stopErr
	}
	if failure != nil {
		return failure
	}
	return err
}

// notify sends to a channel with room for one element, and drops the element if the channel is full.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
