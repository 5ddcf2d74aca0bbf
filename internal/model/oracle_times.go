package model

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// What fstat may say of a file: a size that programs may take it for, and as mtime the moment of the last modification
// that went home at once, or the time that was set after it. While programs have stored bytes that are not released or
// synced, any moment since will do too, since these bytes may go home early. A release modifies the file again while
// what was released before is not home.

// coarse is how far the clock of files may be behind the clock of programs.
const coarse = 20 * time.Millisecond

type oracleTimes struct {
	now func() time.Time // nil: times are not looked at
	// last is when the last step ended, so that the next one began later.
	last time.Time
	// may has the moments that fstat may give. open is when stores began to be under way, zero if there are none.
	may  []moments
	open time.Time
	// any is set while nothing is known.
	known bool
}

// moments are those from one to another.
type moments struct{ from, to time.Time }

// WatchTimes has the Oracle look at times. now tells the time.
func (o *Oracle) WatchTimes(now func() time.Time) {
	o.times = oracleTimes{now: now, last: now()}
}

// timeOfStep is what a SetTimes sets.
func (s Step) Time() time.Time { return time.Unix(1_500_000_000+int64(s.Val), 0) }

// AppendStat makes what a Stat returns.
func AppendStat(b []byte, size int64, mtime time.Time) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(size))
	return binary.LittleEndian.AppendUint64(b, uint64(mtime.UnixNano()))
}

func (o *Oracle) checkStat(got []byte) error {
	size, mtime := int64(binary.LittleEndian.Uint64(got)), time.Unix(0, int64(binary.LittleEndian.Uint64(got[8:])))
	if !slices.Contains(o.sizes, size) {
		return fmt.Errorf("fstat says that the file has %d bytes, want %v", size, o.sizes)
	}
	t := &o.times
	if t.now == nil || !t.known || !t.open.IsZero() && !mtime.Before(t.open) {
		return nil
	}
	for _, m := range t.may {
		if !mtime.Before(m.from) && !mtime.After(m.to) {
			return nil
		}
	}
	return fmt.Errorf("fstat says mtime %v, want one of %v", mtime, t.may)
}

// event notes what a step does to times. The Oracle knows the step already.
func (t *oracleTimes) event(o *Oracle, s Step) {
	if t.now == nil {
		return
	}
	now := t.now()
	began := t.last.Add(-coarse)
	during := moments{began, now}
	switch s.Op {
	case SetTimes:
		t.known, t.may = true, []moments{{s.Time(), s.Time()}}
		if !t.open.IsZero() {
			t.open = began
		}
	case Write, Append, DirectWrite:
		t.may = []moments{during}
	case Truncate, OpenTrunc, Punch, PunchRest, Zero, Allocate, Copy, SourceWrite, SourceAppend, SourceTruncate,
		SourcePunch,
		SourceCollapse, SourceInsert, SourceClone:
		t.may = append(t.may, during)
	case MapStore, Store, Group:
		if t.open.IsZero() {
			t.open = began
		}
		if s.Op == Group {
			t.may = append(t.may, during)
		}
	case Release, DontNeed, Unmap, Kill:
		if o.publishesAgain(s) {
			t.may = append(t.may, during)
		}
	}
	if !t.open.IsZero() && !o.storing() {
		t.may = append(t.may, moments{t.open, now})
		t.open = time.Time{}
	}
	t.last = now
}

// Refused tells the Oracle of a step that SOURCE's filesystem refused. A kernel that keeps times itself moves mtime
// before it asks for an fallocate.
func (o *Oracle) Refused(s Step) {
	t := &o.times
	if t.now == nil {
		return
	}
	now := t.now()
	if o.layout.WriteBack && (s.Op == Allocate || s.Op == Zero || s.Op == PunchRest) {
		t.may = append(t.may, moments{t.last.Add(-coarse), now})
	}
	t.last = now
}

// publishesAgain reports whether the pages of s have something that its device released and that may not be home.
func (o *Oracle) publishesAgain(s Step) (again bool) {
	agent := o.layout.Device(s.Client) + 1
	o.each(s.Off, s.Len, func(_ int, pg *oraclePage, _, _ int) { again = again || pg.touched[agent] })
	return again
}

// storing reports whether programs stored bytes that nobody released or synced.
func (o *Oracle) storing() bool {
	return slices.ContainsFunc(o.pages, func(pg *oraclePage) bool {
		for agent := range pg.touched {
			if agent == 0 || pg.unreleased(agent) {
				return true
			}
		}
		return false
	})
}
