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

// outcome is what a serving process tells the one that started it: one line of JSON through a pipe.
type outcome struct {
	// Error is empty where the mount can be used.
	Error string `json:"error,omitempty"`
	Usage bool   `json:"usage,omitempty"`
}

// reporter returns the report function of serve for a pipe's descriptor. It is called once.
func reporter(fd int) func(error) error {
	unix.CloseOnExec(fd) // or what this process starts would keep the pipe open
	pipe := os.NewFile(uintptr(fd), "ready pipe")
	return func(err error) error {
		var o outcome
		if err != nil {
			var usage usageError
			o = outcome{Error: err.Error(), Usage: errors.As(err, &usage)}
		}
		werr := json.NewEncoder(pipe).Encode(o)
		if cerr := pipe.Close(); werr == nil {
			werr = cerr
		}
		if err == nil {
			return werr
		}
		return err
	}
}

// errDiedSilently says that a serving process ended before it told how mounting went.
var errDiedSilently = errors.New("the process that should serve the mount ended before it was ready")

// awaitOutcome reads what reporter wrote, to the end.
func awaitOutcome(pipe io.Reader) error {
	line, err := bufio.NewReader(pipe).ReadBytes('\n')
	if err != nil {
		return errDiedSilently
	}
	var o outcome
	if err := json.Unmarshal(line, &o); err != nil {
		return fmt.Errorf("%w: %w", errDiedSilently, err)
	}
	switch {
	case o.Error == "":
		return nil
	case o.Usage:
		return usageError{errors.New(o.Error)}
	}
	return errors.New(o.Error)
}
