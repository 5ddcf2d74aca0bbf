package gaiafs

import (
	"bytes"
	"context"
	"syscall"
)

// End asks the daemon of a mountpoint to write back everything that devices released. Then it calls answer with the
// daemon's first JSON document (docs/dev/protocol.md). If answer unmounts and returns true, End waits for the daemon's
// second and last document and returns it. If answer returns false or an error, the mount goes on, and End returns the
// error. With force, the daemon gives up what it cannot write back.
//
// Errors: EPERM for users other than root and the one who mounted, ECANCELED if ctx ended first, ENOTCONN if the daemon
// ended without a last document, and the errors of Status.
func End(ctx context.Context, mountpoint string, force bool, answer func(document []byte) (unmounted bool,
	err error)) (last []byte, err error) {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return nil, during("end", err)
	}
	defer c.release()
	stop := context.AfterFunc(ctx, func() { c.shut(failed(syscall.ECANCELED, "%v", context.Cause(ctx))) })
	defer stop()
	var flags uint32
	if force {
		flags = endForce
	}
	said := make(chan []byte, 2) // room for both, because the connection's reader must not wait
	answered := make(chan error, 1)
	go func() {
		var buf []byte
		answered <- c.do(typeEnd, endBody(token, flags), func(h header, body []byte, _ []int) error {
			switch h.typ {
			case typeDocument:
				buf = append(buf, body...)
				for {
					line, rest, whole := bytes.Cut(buf, []byte{'\n'})
					if !whole {
						return nil
					}
					select {
					case said <- line:
					default:
						return failed(syscall.EPROTO, "the daemon answered an END with more than two documents")
					}
					buf = rest
				}
			case typeResult:
				if _, err := resultOf(body); err != nil {
					return err
				}
			}
			return failed(syscall.EPROTO, "the daemon answered an END with type %#x", uint16(h.typ))
		})
	}()
	var ended error
	select {
	case first := <-said:
		if unmounted, err := answer(first); err != nil || !unmounted {
			return nil, err
		}
		ended = <-answered
	case ended = <-answered:
		select {
		case first := <-said: // the daemon answered before the outer select ran
			_, err := answer(first)
			return nil, err
		default:
		}
	}
	select {
	case last = <-said:
		return last, nil
	default:
	}
	if ended == nil {
		ended = failed(syscall.EPROTO, "the daemon said nothing")
	}
	return nil, during("end", ended)
}
