package demo

import (
	"fmt"
	"io"
	"strings"
)

// Lines returns a Progress that writes plain lines, for output other than a terminal.
func Lines(w io.Writer) Progress { return &lines{w: w} }

type lines struct {
	w       io.Writer
	quarter int // of the rows, as last printed
}

func (l *lines) Step(format string, args ...any) {
	l.quarter = 0
	fmt.Fprintf(l.w, format+"\n", args...)
}

func (l *lines) Rows(left, right, of int) {
	if q := 4 * min(left, right) / max(of, 1); q > l.quarter {
		l.quarter = q
		fmt.Fprintf(l.w, "  left half: %d of %d rows, right half: %d\n", left, of, right)
	}
}

// Bars returns a Progress for a terminal: it redraws the row counts in place.
func Bars(w io.Writer) Progress { return &bars{w: w} }

type bars struct {
	w    io.Writer
	open bool // the cursor is at the end of the bars
}

func (b *bars) Step(format string, args ...any) {
	if b.open {
		fmt.Fprintln(b.w)
		b.open = false
	}
	fmt.Fprintf(b.w, format+"\n", args...)
}

func (b *bars) Rows(left, right, of int) {
	const width = 30
	bar := func(n int) string {
		filled := width * n / max(of, 1)
		return strings.Repeat("#", filled) + strings.Repeat("-", width-filled)
	}
	fmt.Fprintf(b.w, "\r  left [%s]  right [%s]", bar(left), bar(right))
	b.open = true
}
