package gaiafs

import (
	"errors"
	"fmt"
	"syscall"
)

// Error is what every call fails with.
type Error struct {
	// Op is the call: "map", "acquire" and so on.
	Op string
	// Errno is the reason as the C library would report it.
	Errno syscall.Errno
	// Text says more than Errno, in the daemon's words where it failed there. It may be empty.
	Text string
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("gaiafs: %s: %v", e.Op, e.Errno)
	}
	return fmt.Sprintf("gaiafs: %s: %v: %s", e.Op, e.Errno, e.Text)
}

// Unwrap returns the Errno.
func (e *Error) Unwrap() error { return e.Errno }

func failed(errno syscall.Errno, format string, args ...any) *Error {
	return &Error{Errno: errno, Text: fmt.Sprintf(format, args...)}
}

// asError makes an Error of any error, with what was being done as its text.
func asError(err error, format string, args ...any) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	text := fmt.Sprintf(format, args...)
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return failed(errno, "%s", text)
	}
	return failed(syscall.EIO, "%s: %v", text, err)
}

// during names the call that err ends. It returns nil for nil.
func during(op string, err error) error {
	if err == nil {
		return nil
	}
	e := *asError(err, "%v", err)
	e.Op = op
	return &e
}
