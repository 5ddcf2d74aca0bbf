package model

import (
	"fmt"
	"math"
	"slices"
)

// Event tells the Oracle of a step that was carried out, and of the bytes that it returned. It returns an error if no
// order of events allows these.
func (o *Oracle) Event(s Step, got []byte) error {
	defer o.times.event(o, s)
	switch {
	case s.Op.InSource():
		o.changeSource(s, got)
		return nil
	case s.Op.byCPU():
		return o.cpuEvent(s, got)
	}
	agent := o.layout.Device(s.Client) + 1
	switch s.Op {
	case Store, Group:
		if s.Off+s.Len > o.size() {
			o.junk = true
		}
		o.touch(agent, s.Off, s.Len)
		o.store(agent, s.Off, s.Len, valuesOf(s, s.Off))
		if s.Op == Group {
			o.publish(agent, s)
			o.finish(s.Client)
		}
	case Load:
		return o.checkLoad(agent, s.Off, got)
	case Acquire:
		o.acquire(agent, s)
	case Use:
		if !s.Lazy {
			o.acquire(agent, s)
		}
	case Map:
		if !s.Lazy && !s.Movable {
			o.acquire(agent, s)
		}
	case Publish:
		o.publish(agent, s)
	case Finish:
		o.finish(s.Client)
	case Release, DontNeed, Unmap, Kill:
		o.publish(agent, s)
		o.finish(s.Client)
	case Peek:
		return o.checkPeek(agent, got)
	case View:
		o.views[s.Client] = s
	case Look:
		o.traceLook(s, got)
		return o.checkLook(s, got)
	}
	return nil
}

func (o *Oracle) cpuEvent(s Step, got []byte) error {
	switch s.Op {
	case Append:
		s.Off = o.size()
		for i := range o.sizes {
			o.sizes[i] += s.Len // the kernel adds them to the size that it knows
		}
		o.write(s)
	case Write, DirectWrite:
		o.growTo(s.Off + s.Len)
		o.write(s)
	case MapStore:
		o.touch(0, s.Off, s.Len)
		o.store(0, s.Off, s.Len, valuesOf(s, s.Off))
	case Truncate:
		o.resize(s.Off)
	case OpenTrunc:
		o.notice()
		o.resize(0)
	case Allocate:
		if !s.Keep {
			o.growTo(s.Off + s.Len)
		}
	case Zero:
		if !s.Keep {
			o.growTo(s.Off + s.Len)
		}
		o.store(0, s.Off, s.Len, zeros)
	case Punch:
		o.store(0, s.Off, s.Len, zeros)
	case PunchRest:
		o.store(0, s.Off, o.size()-s.Off, zeros)
	case Copy:
		o.growTo(s.Off + s.Len)
		o.copyRange(s)
	case Read, DirectRead, SeekRead, CopyOut:
		if !slices.ContainsFunc(o.sizes,
			func(size int64) bool { return int64(len(got)) == max(min(s.Len, size-s.Off), 0) }) {
			return fmt.Errorf("read %d of %d bytes at %d; the size is %v", len(got), s.Len, s.Off, o.sizes)
		}
		return o.check(0, s.Off, got)
	case Fsync:
		return o.synced(got)
	case SetTimes:
		o.collected()
	case Reopen:
		o.notice()
	case Stat:
		return o.checkStat(got)
	}
	return nil
}

func (o *Oracle) write(s Step) {
	if o.layout.WriteBack && s.Op != DirectWrite {
		o.touch(0, s.Off, s.Len)
	}
	o.store(0, s.Off, s.Len, valuesOf(s, s.Off))
}

// growTo makes the file at least size bytes long. The new bytes are zero.
func (o *Oracle) growTo(size int64) {
	old := o.size()
	for i := range o.sizes {
		o.sizes[i] = max(o.sizes[i], size)
	}
	o.everywhere(old, size-old)
}

// resize sets the size. Bytes past either size are zero for all agents.
func (o *Oracle) resize(size int64) {
	old := o.size()
	o.sizes = []int64{size}
	o.everywhere(min(old, size), max(old, size)-min(old, size))
}

// copyRange stores at Off the values that may be read at From.
func (o *Oracle) copyRange(s Step) {
	type piece struct {
		off, n int64
		vals   []values
	}
	var pieces []piece
	o.each(s.From, s.Len, func(p int, pg *oraclePage, from, to int) {
		c := pg.clocks[0]
		c.join(pg.released)
		list := pg.within(from, to)
		for i, seg := range list {
			end := to
			if i+1 < len(list) {
				end = list[i+1].from
			}
			x := piece{off: int64(p)*PageSize + int64(seg.from) + s.Off - s.From, n: int64(end - seg.from)}
			for _, t := range current(seg.stores, c) {
				x.vals = appendValues(x.vals, t.vals)
			}
			for i := range x.vals {
				x.vals[i].offset += s.Off - s.From
			}
			pieces = append(pieces, x)
		}
	})
	for _, x := range pieces {
		o.store(0, x.off, x.n, x.vals...)
	}
}

func (o *Oracle) acquire(agent int, s Step) {
	o.trace.add("acquire", agent, o.trace.touched(s.Off, s.Len), 0)
	o.each(s.Off, s.Len, func(_ int, pg *oraclePage, _, _ int) {
		pg.clocks[agent].join(pg.released)
		pg.clocks[agent].join(pg.clocks[0])
		pg.clocks[agent].join(pg.clocks[o.source()])
	})
}

func (o *Oracle) publish(agent int, s Step) {
	o.trace.add("publish", agent, o.trace.touched(s.Off, s.Len), byte(s.Client))
	rel := make(map[int]clock)
	o.published[s.Client] = rel
	o.each(s.Off, s.Len, func(p int, pg *oraclePage, _, _ int) { rel[p] = slices.Clone(pg.clocks[agent]) })
}

func (o *Oracle) finish(c Client) {
	o.trace.add("finish", 0, o.trace.touched(0, math.MaxInt64/2), byte(c))
	for p, at := range o.published[c] {
		at[o.source()] = 0
		o.pages[p].released.join(at)
	}
	delete(o.published, c)
}

// unreleased reports whether an agent stored into a page since its last release of it.
func (pg *oraclePage) unreleased(agent int) bool { return pg.clocks[agent][agent] > pg.released[agent] }

// collected notes that everything that devices released is home.
func (o *Oracle) collected() {
	for _, pg := range o.pages {
		for agent := range pg.touched {
			if agent != 0 && !pg.unreleased(agent) {
				delete(pg.touched, agent)
			}
		}
	}
}

// synced notes that everything that CPU programs stored and devices released is home. home is the backing file's bytes,
// or nil if they were not read.
func (o *Oracle) synced(home []byte) error {
	o.collected()
	for _, pg := range o.pages {
		delete(pg.touched, 0)
	}
	if home == nil {
		return nil
	}
	if int64(len(home)) != o.size() {
		return fmt.Errorf("after fsync, the backing file has %d bytes, want %d", len(home), o.size())
	}
	if err := o.check(0, 0, home); err != nil {
		return fmt.Errorf("after fsync, the backing file: %w", err)
	}
	return nil
}

// checkLoad checks the bytes that a device's program loads. Past end of file they are zero, unless programs stored
// there.
func (o *Oracle) checkLoad(agent int, off int64, got []byte) error {
	n := min(int64(len(got)), max(o.size()-off, 0))
	if err := o.check(agent, off, got[:n]); err != nil {
		return err
	}
	for i, b := range got[n:] {
		if b != 0 && !o.junk {
			return fmt.Errorf("byte %d reads 0x%02x, past end of file at %d", off+n+int64(i), b, o.size())
		}
	}
	return nil
}

// checkPeek checks all of the memory that a client got: it may contain only zeros and bytes that the client may read in
// the file now.
func (o *Oracle) checkPeek(agent int, got []byte) (err error) {
	o.each(0, min(int64(len(got)), o.size()), func(p int, pg *oraclePage, from, to int) {
		c := slices.Clone(pg.clocks[agent])
		c.join(pg.released)
		c.join(pg.clocks[0])
		part := got[int64(p)*PageSize+int64(from):]
		for i := from; i < to; i++ {
			if part[i-from] != 0 && err == nil {
				err = o.checkAt(p, i, i+1, part[i-from:], c, false)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("in memory that a client was given: %w", err)
	}
	return nil
}
