package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// progress shows how far a long operation is: on a terminal in one line that it rewrites, elsewhere in a new line every
// few seconds.
type progress struct {
	w           io.Writer
	terminal    *os.File // w, if that is a terminal whose lines can be rewritten
	shown       bool
	total, done int64
	began, said time.Time
}

const (
	terminalEvery = 100 * time.Millisecond
	plainEvery    = 5 * time.Second
)

// canRewrite reports whether f is a terminal whose last line can be rewritten.
func canRewrite(f *os.File) bool { return isTerminal(f) && os.Getenv("TERM") != "dumb" }

// columnsOf returns the width of a terminal.
func columnsOf(f *os.File) int {
	if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
		return int(size.Col)
	}
	return leastWidth
}

// newProgress starts at 0 of total bytes.
func newProgress(w io.Writer, total int64) *progress {
	now := time.Now()
	p := &progress{w: w, total: total, began: now, said: now}
	if f, ok := w.(*os.File); ok && canRewrite(f) {
		p.terminal = f
	}
	return p
}

// add reports that n more bytes are done.
func (p *progress) add(n int64, what string) {
	p.done += n
	every := plainEvery
	if p.terminal != nil {
		every = terminalEvery
	}
	if now := time.Now(); now.Sub(p.said) >= every {
		p.said = now
		p.say(progressText(p.done, p.total, now.Sub(p.began)) + "  " + what)
	}
}

func (p *progress) say(text string) {
	if p.terminal != nil {
		p.shown = true
		text = cut(text, columnsOf(p.terminal)-1) // of a longer one, only the last line would be rewritten
		fmt.Fprintf(p.w, "\r\x1b[K%s", text)      // erases the line (ECMA-48, EL)
		return
	}
	fmt.Fprintln(p.w, text)
}

// line writes a separate line to out.
func (p *progress) line(out io.Writer, text string) {
	p.end()
	fmt.Fprintln(out, text)
}

// end clears the line of a terminal.
func (p *progress) end() {
	if p.shown {
		p.shown = false
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// progressText describes how far an operation is after the time took.
func progressText(done, total int64, took time.Duration) string {
	text := fmt.Sprintf("%s of %s", bytesText(done), bytesText(total))
	if done <= 0 || took <= 0 {
		return text
	}
	rate := float64(done) / took.Seconds()
	left := time.Duration(float64(max(total-done, 0)) / rate * float64(time.Second)).Round(time.Second)
	return fmt.Sprintf("%s (%d %%), %s/s, %s left", text, 100*done/max(total, 1), bytesText(int64(rate)), left)
}
