package gaiafs

import (
	"context"
	"io"
	"syscall"
)

// Watch makes the daemon of a mountpoint report what it does. It writes the reports to w, one JSON document of
// docs/trace.md per line, until ctx ends; then it returns nil. filter is a JSON document that chooses what to report.
// Root and the user who mounted see everything; others see what their own programs ask for. Errors: ENOSYS if the
// daemon is too old, EINVAL if the filter cannot be parsed, EPERM for other users who filter by path, and those of
// Status and of w.
func Watch(ctx context.Context, mountpoint string, filter []byte, w io.Writer) error {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return during("watch", err)
	}
	defer c.release()
	var failure error
	stop := context.AfterFunc(ctx, func() { c.shut(failed(syscall.ECANCELED, "the watch ended")) })
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
		return during("watch", failure)
	case ctx.Err() != nil:
		return nil
	}
	return during("watch", err)
}
