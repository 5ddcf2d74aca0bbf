package replay

import (
	"container/heap"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// Score is the result of a predictor on a trace. Sizes are in bytes.
type Score struct {
	// Accesses counts accesses, Hits those that found all their pages, Late those that waited only for pages on their
	// way.
	Accesses, Hits, Late int64
	// Read is what accesses asked for, in whole pages. Distinct is that without repetition.
	Read, Distinct int64
	// Fetched is what was requested, Ahead the part that the predictor proposed, and Wasted the part that nobody used.
	Fetched, Ahead, Wasted int64
	// Requests is the number of runs of pages that were requested.
	Requests int64
	// Time is when the last access had its bytes. Waited is the sum of all waits.
	Time, Waited time.Duration
}

// HitRate is the share of accesses that found all their pages.
func (s Score) HitRate() float64 { return ratio(s.Hits, s.Accesses) }

// WasteRate is the share of fetched bytes that nobody used.
func (s Score) WasteRate() float64 { return ratio(s.Wasted, s.Fetched) }

// Bandwidth is the distinct bytes read per second.
func (s Score) Bandwidth() float64 {
	if s.Time <= 0 {
		return 0
	}
	return float64(s.Distinct) / s.Time.Seconds()
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

const (
	// maxRead bounds the work of a replay, in pages: 16 TiB.
	maxRead = 16 << 40 >> page.Shift
	// maxSections bounds its memory: the accesses may touch 1 TiB, for which it takes 2.4 GB.
	maxSections = 1 << 40 >> (page.Shift + sectionShift)
)

// Run replays a trace with a predictor for each file. It fails if the model is invalid. It also fails if the trace,
// perhaps a hostile one, asks for more than 16 TiB, or touches more than 1 TiB.
func Run(t *trace.Trace, m Model, make func() prefetch.Predictor) (Score, error) {
	if err := m.Check(); err != nil {
		return Score{}, err
	}
	if err := Check(t); err != nil {
		return Score{}, err
	}
	p := &player{t: t, way: newWay(m), piece: page.Index(m.Piece >> page.Shift)}
	for _, f := range t.Files {
		x := &file{predictor: make(), end: page.Count(f.Size), pages: map[page.Index]*section{}}
		x.predictor.Resize(x.end)
		p.files = append(p.files, x)
	}
	p.run()
	return p.score, nil
}

// Check returns an error if a trace is too large to replay.
func Check(t *trace.Trace) error {
	total := int64(0)
	type place struct {
		file    uint32
		section page.Index
	}
	sections := make(map[place]struct{})
	last := place{section: -1}
	for i := range t.Events {
		x := &t.Events[i]
		if x.Resize {
			continue
		}
		rg := page.Covering(x.Off, x.Len)
		if total += rg.Len(); total > maxRead {
			return fmt.Errorf("the accesses of the trace come to more than %d bytes", int64(maxRead)<<page.Shift)
		}
		for c := rg.Start >> sectionShift; c <= (rg.End-1)>>sectionShift; c++ {
			if at := (place{x.File, c}); at != last {
				sections[at] = struct{}{}
				last = at
			}
			if len(sections) > maxSections {
				return fmt.Errorf("the accesses of the trace are spread over more than %d bytes",
					int64(maxSections)<<(page.Shift+sectionShift))
			}
		}
	}
	return nil
}

// file is the state of a file in a replay.
type file struct {
	predictor prefetch.Predictor
	end       page.Index
	pages     map[page.Index]*section
}

const (
	sectionShift = 9
	sectionPages = 1 << sectionShift
)

// section has the pages of 2 MiB: when they arrive, 0 for pages not requested, and whether they were used.
type section struct {
	arrives [sectionPages]time.Duration
	used    [sectionPages]bool
}

func (f *file) at(i page.Index) (*section, int) {
	c := f.pages[i>>sectionShift]
	if c == nil {
		c = new(section)
		f.pages[i>>sectionShift] = c
	}
	return c, int(i & (sectionPages - 1))
}

// player is the state of a replay.
type player struct {
	t     *trace.Trace
	way   *way
	piece page.Index
	files []*file
	score Score
	ahead []page.Range
}

// source is the state of a source in a replay: its remaining events, and when it makes the next.
type source struct {
	number int
	events []int32
	at     time.Duration
}

// sources is a heap of the sources that have events left, the earliest first.
type sources []*source

func (s sources) Len() int      { return len(s) }
func (s sources) Swap(i, j int) { s[i], s[j] = s[j], s[i] }
func (s sources) Less(i, j int) bool {
	return s[i].at < s[j].at || s[i].at == s[j].at && s[i].number < s[j].number
}
func (s *sources) Push(x any) { *s = append(*s, x.(*source)) }
func (s *sources) Pop() any {
	last := (*s)[len(*s)-1]
	*s = (*s)[:len(*s)-1]
	return last
}

func (p *player) run() {
	// Changes of size come from a source of their own, at their recorded times.
	all := make([]*source, len(p.t.Sources)+1)
	for i := range all {
		all[i] = &source{number: i}
	}
	for i := range p.t.Events {
		x := &p.t.Events[i]
		if x.Write {
			continue
		}
		s := all[len(all)-1]
		if !x.Resize {
			s = all[x.Source]
		}
		s.events = append(s.events, int32(i))
	}
	var ready sources
	for _, s := range all {
		if len(s.events) > 0 {
			s.at = p.t.Events[s.events[0]].Time
			ready = append(ready, s)
		}
	}
	heap.Init(&ready)
	for len(ready) > 0 {
		s := ready[0]
		x := &p.t.Events[s.events[0]]
		end := s.at
		if x.Resize {
			p.resize(x)
		} else {
			end = p.access(s.at, x)
		}
		s.events = s.events[1:]
		if len(s.events) == 0 {
			heap.Pop(&ready)
			continue
		}
		next := &p.t.Events[s.events[0]]
		if x.Resize {
			s.at = max(next.Time, s.at)
		} else {
			s.at = end + max(next.Time-x.Time-x.Took, 0)
		}
		heap.Fix(&ready, 0)
	}
	for _, f := range p.files {
		f.unused(page.Range{End: 1 << 62}, func(n int64) { p.score.Wasted += n })
	}
}

// access makes an access and returns when it has its bytes.
func (p *player) access(now time.Duration, x *trace.Event) time.Duration {
	f := p.files[x.File]
	rg := page.Covering(x.Off, x.Len).Intersect(page.Range{End: f.end})
	p.score.Accesses++
	p.score.Read += rg.Bytes()
	p.ahead = f.predictor.Access(rg, x.Pattern, p.ahead[:0])
	missed := p.fetch(f, now, rg, p.ahead)
	arrives := now
	for i := rg.Start; i < rg.End; i++ {
		c, k := f.at(i)
		arrives = max(arrives, c.arrives[k])
		if !c.used[k] {
			c.used[k] = true
			p.score.Distinct += page.Size
		}
	}
	switch {
	case missed:
	case arrives > now:
		p.score.Late++
	default:
		p.score.Hits++
	}
	p.score.Waited += arrives - now
	p.score.Time = max(p.score.Time, arrives)
	return arrives
}

// fetch requests what an access to rg lacks, and then what the predictor proposes. It reports whether the access lacked
// something. A proposed range next to rg is requested together with it.
func (p *player) fetch(f *file, now time.Duration, rg page.Range, ahead []page.Range) (missed bool) {
	lacks := int64(0)
	for i := rg.Start; i < rg.End; i++ {
		if c, k := f.at(i); c.arrives[k] == 0 {
			lacks += page.Size
		}
	}
	end := page.Range{End: f.end}
	if lacks > 0 {
		for i, a := range ahead {
			if a = a.Intersect(end); a.Start == rg.End && !a.Empty() {
				rg.End, ahead[i] = a.End, page.Range{}
			} else if a.End == rg.Start && !a.Empty() {
				rg.Start, ahead[i] = a.Start, page.Range{}
			}
		}
	}
	before := p.score.Fetched
	if lacks > 0 {
		p.request(f, now, rg)
	}
	for _, a := range ahead {
		p.request(f, now, a.Intersect(end))
	}
	p.score.Ahead += p.score.Fetched - before - lacks
	return lacks > 0
}

// request requests those pages of rg that were not requested before.
func (p *player) request(f *file, now time.Duration, rg page.Range) {
	for i := rg.Start; i < rg.End; {
		if c, k := f.at(i); c.arrives[k] != 0 {
			i++
			continue
		}
		end := i + 1
		for end < rg.End {
			if c, k := f.at(end); c.arrives[k] != 0 {
				break
			}
			end++
		}
		p.score.Requests++
		for i < end {
			part := page.Range{Start: i, End: min(i+p.piece, end)}
			arrives := max(p.way.send(now, part.Bytes()), 1)
			for ; i < part.End; i++ {
				c, k := f.at(i)
				c.arrives[k] = arrives
			}
			p.score.Fetched += part.Bytes()
		}
	}
}

// resize changes the size of a file. Pages past its new end are gone; unused ones count as wasted.
func (p *player) resize(x *trace.Event) {
	f := p.files[x.File]
	end := page.Count(x.Len)
	f.unused(page.Range{Start: end, End: 1 << 62}, func(n int64) { p.score.Wasted += n })
	for c, k := range f.pages {
		for i := range k.arrives {
			if c<<sectionShift+page.Index(i) >= end {
				k.arrives[i], k.used[i] = 0, false
			}
		}
	}
	f.end = end
	f.predictor.Resize(end)
}

// unused counts the bytes of rg that were fetched and not used.
func (f *file) unused(rg page.Range, count func(bytes int64)) {
	for c, k := range f.pages {
		for i, arrives := range k.arrives {
			if arrives != 0 && !k.used[i] && rg.Contains(c<<sectionShift+page.Index(i)) {
				count(page.Size)
			}
		}
	}
}
