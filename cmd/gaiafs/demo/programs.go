package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"strings"
)

// running is one of the two programs, running in its process.
type running struct {
	program program
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
	stderr  bytes.Buffer
}

// start runs a program and waits until it has opened and mapped everything.
func start(cmd *exec.Cmd, j job) (*running, error) {
	r := &running{program: j.Program, cmd: cmd}
	cmd.Stderr = &r.stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if r.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	r.out = bufio.NewScanner(out)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("the %s program could not be started: %w", j.Program, err)
	}
	line, err := json.Marshal(j)
	if err == nil {
		_, err = r.in.Write(append(line, '\n'))
	}
	var m message
	if err == nil {
		m, err = r.next()
	}
	if err != nil || !m.Ready {
		return nil, r.failed(err)
	}
	return r, nil
}

func (r *running) next() (message, error) {
	var m message
	if !r.out.Scan() {
		if err := r.out.Err(); err != nil {
			return m, err
		}
		return m, io.ErrUnexpectedEOF
	}
	return m, json.Unmarshal(r.out.Bytes(), &m)
}

// failed ends the process and returns why it failed, in its own words if it gave any.
func (r *running) failed(err error) error {
	r.kill()
	if said := strings.TrimSpace(r.stderr.String()); said != "" {
		return fmt.Errorf("the %s program failed: %s", r.program, strings.TrimPrefix(said, "gaiafs: "))
	}
	return fmt.Errorf("the %s program failed without a message: %w", r.program, err)
}

func (r *running) kill() {
	_ = r.cmd.Process.Kill() // it may have ended
	_ = r.cmd.Wait()
}

// finish gives the start signal and follows the program to its end. It calls rows with the number of rows stored so
// far.
func (r *running) finish(rows func(program, int)) (work, error) {
	if _, err := io.WriteString(r.in, "go\n"); err != nil {
		return work{}, r.failed(err)
	}
	var done *work
	for done == nil {
		m, err := r.next()
		if err != nil {
			return work{}, r.failed(err)
		}
		if m.Rows > 0 {
			rows(r.program, m.Rows)
		}
		done = m.Done
	}
	// Its exit status matters as much as its messages: it unmaps after the last message.
	if err := r.cmd.Wait(); err != nil {
		return work{}, r.failed(err)
	}
	return *done, nil
}

// both runs the two programs for these devices at once, started by one signal.
func both(ctx context.Context, command func(context.Context) *exec.Cmd, j job, devices [2]int,
	rows func(program, int)) (works [2]work, err error) {
	ctx, cancel := context.WithCancel(ctx) // the end of one program ends the other
	defer cancel()
	var programs [2]*running
	for _, p := range []program{leftProgram, rightProgram} {
		j.Program, j.Device = p, devices[p]
		if programs[p], err = start(command(ctx), j); err != nil {
			if p == rightProgram {
				programs[leftProgram].kill()
			}
			return works, err
		}
	}
	type end struct {
		program program
		work    work
		err     error
	}
	ends := make(chan end)
	for _, r := range programs {
		go func() {
			w, err := r.finish(rows)
			ends <- end{r.program, w, err}
		}()
	}
	for range programs {
		e := <-ends
		if e.err != nil && err == nil {
			err = e.err
			cancel()
		}
		works[e.program] = e.work
	}
	return works, err
}
