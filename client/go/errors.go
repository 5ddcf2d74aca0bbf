package gaiafs

import (
	"errors"
	"fmt"
	"syscall"
)

// Error is the error type of every call.
type Error struct {
	// Op is the call: "map", "acquire" and so on.
	Op string
	// Errno is the reason, as the C library would report it.
	Errno syscall.Errno
	// Text says more than Errno. If the daemon failed the call, these are its words. It may be empty.
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

// asError turns any error into an Error. Unless err is one already, the text says what failed.
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

// during sets the name of the call that failed with err. It returns nil for nil.
func during(op string, err error) error {
	if err == nil {
		return nil
	}
	e := *asError(err, "%v", err)
	e.Op = op
	return &e
}
