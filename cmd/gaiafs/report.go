package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// A serving process reports to the process that started it how mounting went: one line of JSON through a socket. The
// other process answers with one byte that says whether the serving process goes on without it. If there is no answer,
// nobody wants the mount any more, and it is unmounted again.
const (
	goOnAlone  = 'a'
	endAfterMe = 'e' // the end of the connection ends the mount
)

// outcome is the JSON line.
type outcome struct {
	// Error is empty if the mount is usable.
	Error string `json:"error,omitempty"`
	Usage bool   `json:"usage,omitempty"`
	// Ready is the text for the user about a usable mount.
	Ready string `json:"ready,omitempty"`
}

// reporter returns the report function of serve for a socket's descriptor. The function is called once. orphaned is
// called when the process that started this one has ended, if this one is to end with it.
func reporter(fd int, orphaned func()) func(ready string, err error) error {
	unix.CloseOnExec(fd) // otherwise processes that this one starts would keep the connection open
	conn := os.NewFile(uintptr(fd), "ready socket")
	return func(ready string, err error) error {
		o := outcome{Ready: ready}
		if err != nil {
			var usage usageError
			o = outcome{Error: err.Error(), Usage: errors.As(err, &usage)}
		}
		answer := make([]byte, 1)
		werr := json.NewEncoder(conn).Encode(o)
		if err != nil {
			conn.Close()
			return err
		}
		if werr == nil {
			_, werr = io.ReadFull(conn, answer)
		}
		if werr != nil || answer[0] == goOnAlone {
			conn.Close()
			return werr
		}
		go func() {
			_, _ = io.Copy(io.Discard, conn)
			conn.Close()
			orphaned()
		}()
		return nil
	}
}

// errDiedSilently says that a serving process ended before it reported how mounting went.
var errDiedSilently = errors.New("the process that should serve the mount ended before it was ready")

// awaitOutcome reads the line that reporter wrote. ready is a text for the user.
func awaitOutcome(conn io.Reader) (ready string, err error) {
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return "", errDiedSilently
	}
	var o outcome
	if err := json.Unmarshal(line, &o); err != nil {
		return "", fmt.Errorf("%w: %w", errDiedSilently, err)
	}
	switch {
	case o.Error == "":
		return o.Ready, nil
	case o.Usage:
		return "", usageError{errors.New(o.Error)}
	}
	return "", errors.New(o.Error)
}
