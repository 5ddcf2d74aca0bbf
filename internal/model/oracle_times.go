package model

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// fstat may return: a size that programs may see, and as mtime the moment of the last modification that went home at
// once, or a time that was set after it. While bytes are stored but neither released nor synced, any moment since is
// allowed too, because these bytes may go home early. A release modifies the file again while earlier released bytes
// are not home.

// coarse is how far file times may lag behind the programs' clock.
const coarse = 20 * time.Millisecond

type oracleTimes struct {
	now func() time.Time // nil: times are not checked
	// last is when the last step ended. The next one began after it.
	last time.Time
	// may has the moments that fstat may return. open is when the pending stores began, zero if there are none.
	may  []moments
	open time.Time
	// known is set once a program has set the time; before that, any time is allowed.
	known bool
}

// moments are all times from one to another.
type moments struct{ from, to time.Time }

// WatchTimes makes the Oracle check times. now returns the current time.
func (o *Oracle) WatchTimes(now func() time.Time) {
	o.times = oracleTimes{now: now, last: now()}
}

// Time returns the time that a SetTimes sets.
func (s Step) Time() time.Time { return time.Unix(1_500_000_000+int64(s.Val), 0) }

// AppendStat appends the result of a Stat.
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

// event updates the possible times after a step that the Oracle has already handled.
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

// Refused tells the Oracle of a step that SOURCE's filesystem refused. A kernel that keeps times itself changes mtime
// before it sends a fallocate.
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

// publishesAgain reports whether the device of s has released bytes of the pages of s that may not be home.
func (o *Oracle) publishesAgain(s Step) (again bool) {
	agent := o.layout.Device(s.Client) + 1
	o.each(s.Off, s.Len, func(_ int, pg *oraclePage, _, _ int) { again = again || pg.touched[agent] })
	return again
}

// storing reports whether there are stores that were neither released nor synced.
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
