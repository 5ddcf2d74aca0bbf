package gaiafs

import (
	"context"
	"io"
	"syscall"
)

// Watch has the daemon of a mountpoint write what it does to w, a JSON document of docs/trace.md a line, until ctx
// ends; then it returns nil. filter is a JSON document, too: what is to be watched. Root and the user who mounted see
// all of it, others what their own programs ask for. ENOSYS for a daemon that cannot do that, EINVAL for a filter that
// cannot be read, EPERM for other users who filter by path, the errors of Status and of w.
func Watch(ctx context.Context, mountpoint string, filter []byte, w io.Writer) error {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return during("watch", err)
	}
	defer c.release()
	var failure error
	stop := context.AfterFunc(ctx, func() { c.shut(failed(syscall.ECANCELED, "nobody watches any more")) })
	defer stop()
	err = c.do(typeWatch, append(token[:], filter...), func(h header, body []byte, _ []int) error {
		switch h.typ {
		case typeDocument:
			_, failure = w.Write(body)
			return failure
		case typeResult:
			if _, err := resultOf(body); err != nil {
				return err
			}
		}
		return failed(syscall.EPROTO, "the daemon answered a WATCH with type %#x", uint16(h.typ))
	})
	switch {
	case failure != nil:
		return failure
	case ctx.Err() != nil:
		return nil
	}
	return during("watch", err)
}
