package gaiafs

import (
	"context"
	"io"
	"syscall"
)

// Record has the daemon of a mountpoint record the accesses of all programs to its files, and writes the recording to w
// in the format of docs/trace.md, until ctx ends; then it returns nil once the recording is complete. EPERM for users
// other than root and the one who mounted, EBUSY while somebody else records, and the errors of Status. ENOTCONN where
// the mount ended first, and the error of w where writing fails: what was written until then is a trace that is cut
// short.
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
	// The reader of the connection must not wait for the answer to a STOP, which it reads itself.
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

// notify puts an element into a channel with room for one.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
