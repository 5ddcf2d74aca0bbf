package quanta

import (
	"maps"
	"time"
)

// Client identifies a program that opens brackets. 0 stands for one that takes no part.
type Client uint64

const (
	// keeps says for how many times the time of bringing its memory a client may keep it.
	keeps = 4
	// Grace is how long a client must have had no bracket, and have asked for none, to give its quantum up. A client
	// that has asked for no memory for so long has brought its memory.
	Grace = time.Millisecond
	// forgets is how long an idle client is remembered, and that clients competed.
	forgets = 2 * time.Second
	// speed is how many bytes moving brings in a second, until some have moved.
	speed = 10e9
	// A client whose quantum was in vain gets none for so many brackets that lack memory, and twice as many the next
	// time. If it got nothing, these are a few.
	leastSkips, mostSkips, fewSkips = 64, 1024, 4
	// weight is that of all earlier values in an average, if that of the next one is 1. Pauses have no such weight.
	weight = 3
)

// Quanta are those of one device and tenant. The zero value gives none.
type Quanta struct {
	// Longest is the longest quantum. 0: there are no quanta.
	Longest time.Duration

	clients map[Client]*client
	line    []Client  // who waits for a quantum, the first to go first
	speed   float64   // at which memory is brought, in bytes per second; 0: none was
	pressed time.Time // when clients last lacked memory that others had
	swept   time.Time
}

type client struct {
	open   int       // its brackets
	kept   int       // of open, those that it may have ended without telling
	proven bool      // it did not pause in its last quantum
	hidden bool      // its last bracket was a kept one, so nobody knows how long it has had none
	asking int       // brackets that lack memory, until they have their bytes
	idle   time.Time // since when it has neither

	pause, bytes float64 // averages: seconds without a bracket before one that lacks memory, and what that lacks
	samples      int     // in these averages
	away         int64   // bytes in pinned memory

	began time.Time     // of the quantum; zero: it has none
	ready time.Time     // when it last had what a bracket lacked
	moved time.Duration // bringing memory took so long in this quantum

	skips int // so many brackets that lack memory are not hungry any more
	vain  int // what skips becomes if the next quantum is in vain
}

// Ask notes that a bracket of c lacks so many bytes of the device's own memory, and that c has so many in pinned memory
// (away). Ready or Failed follow.
func (q *Quanta) Ask(c Client, now time.Time, bytes, away int64) {
	if c == 0 {
		return
	}
	q.sweep(now)
	of := q.of(c)
	switch unseen := of.hidden || of.kept > 0; {
	case bytes == 0 || q.Protected(c, now) || unseen && of.proven:
	case unseen:
		of.samples = 0
	case !of.idle.IsZero() || of.open+of.asking > 0:
		pause := 0.0
		if of.open+of.asking == 0 {
			pause = now.Sub(of.idle).Seconds()
		}
		of.samples++
		of.pause = average(of.pause, pause, of.samples, 1)
		of.bytes = average(of.bytes, float64(bytes), of.samples, weight)
	}
	of.asking++
	of.away = away
	of.hidden = false
	of.skips = max(of.skips-1, 0)
}

// Press notes that clients of the tenant lack memory that others of them have.
func (q *Quanta) Press(now time.Time) { q.pressed = now }

// Granted notes that c has memory for a bracket that lacked some. Only now its quantum begins, if it is the first one.
func (q *Quanta) Granted(c Client, now time.Time) {
	if of := q.clients[c]; of != nil && !of.began.IsZero() && of.moved == 0 {
		of.began, of.ready = now, now
	}
}

// Ready notes that a bracket that lacked memory has its bytes. It took so long to bring so many bytes to the device.
func (q *Quanta) Ready(c Client, now time.Time, moved int64, took time.Duration) {
	of := q.clients[c]
	if of == nil {
		return
	}
	of.asking--
	of.rests(now)
	if moved == 0 || took <= 0 {
		return
	}
	of.ready = now
	if !of.began.IsZero() {
		of.moved += took
	}
	if q.speed == 0 {
		q.speed = float64(moved) / took.Seconds()
	}
	q.speed = average(q.speed, float64(moved)/took.Seconds(), 2, weight)
}

// Failed notes that a bracket that lacked memory was not granted.
func (q *Quanta) Failed(c Client, now time.Time) {
	if of := q.clients[c]; of != nil {
		of.asking--
		of.rests(now)
	}
}

// Open notes that c has one more bracket.
func (q *Quanta) Open(c Client, now time.Time) {
	if c != 0 {
		q.sweep(now)
		q.of(c).open++
	}
}

// Keep notes that c may end one of its brackets without telling.
func (q *Quanta) Keep(c Client) {
	if of := q.clients[c]; of != nil {
		of.kept++
	}
}

// Closed notes that c has one bracket fewer. kept: Keep was called for it.
func (q *Quanta) Closed(c Client, now time.Time, kept bool) {
	of := q.clients[c]
	if of == nil {
		return
	}
	of.open--
	if kept {
		of.kept--
	}
	of.hidden = kept
	of.rests(now)
}

// Queue puts c in line for a quantum, and Leave takes it out.
func (q *Quanta) Queue(c Client) { q.line = append(q.line, c) }

// Leave takes c out of the line.
func (q *Quanta) Leave(c Client) {
	for i, other := range q.line {
		if other == c {
			q.line = append(q.line[:i], q.line[i+1:]...)
			return
		}
	}
}

// Hungry reports whether c is better off with quanta: it needs memory again sooner than bringing it takes, and before
// it would have to give its quantum up; and bringing what it has in pinned memory takes less than half of a quantum.
func (q *Quanta) Hungry(c Client) bool {
	of := q.clients[c]
	if q.Longest == 0 || of == nil || of.samples == 0 || of.skips > 0 {
		return false
	}
	rate := q.speed
	if rate == 0 {
		rate = speed
	}
	return of.pause < min(Grace.Seconds(), of.bytes/rate) && 2*float64(of.away)/rate < q.Longest.Seconds()
}

// Skips reports whether c gets no quantum now because its last one was in vain.
func (q *Quanta) Skips(c Client) bool {
	of := q.clients[c]
	return of != nil && of.skips > 0
}

// May reports whether c has a quantum, or begins one now. spare reports whether there is memory without a quantum. If
// not, it is worth asking again at again.
func (q *Quanta) May(c Client, now time.Time, spare func() bool) (may bool, again time.Time) {
	if q.Protected(c, now) {
		return true, now
	}
	if !q.Next(c) {
		return false, now.Add(Grace)
	}
	again = now.Add(q.Longest)
	for other, of := range q.clients {
		switch {
		case !q.Protected(other, now):
		case of.brings(now):
			return false, now.Add(Grace)
		default:
			if end := of.end(q.Longest, now); end.Before(again) {
				again = end
			}
		}
	}
	if !spare() {
		return false, again
	}
	of := q.of(c)
	of.began, of.ready, of.moved = now, now, 0
	return true, now
}

// Protected reports whether c has a quantum, so that others of its tenant may not take its memory.
func (q *Quanta) Protected(c Client, now time.Time) bool {
	of := q.clients[c]
	if of == nil || of.began.IsZero() {
		return false
	}
	if q.Longest > 0 && now.Before(of.end(q.Longest, now)) {
		return true
	}
	of.over(q.Longest, now)
	return false
}

// over ends a quantum. It was in vain if the client got nothing, or brought memory most of the time.
func (c *client) over(longest time.Duration, now time.Time) {
	lasted := min(now.Sub(c.began), longest)
	c.proven = c.open+c.asking > 0
	switch {
	case c.open+c.asking == 0:
		c.samples = 0 // it has to show anew that it is hungry
	case c.moved == 0:
		c.skips = fewSkips // brackets of others would not end
	case 2*c.moved > lasted:
		c.vain = min(2*max(c.vain, leastSkips/2), mostSkips)
		c.skips = c.vain
	default:
		c.vain = 0
	}
	c.began = time.Time{}
}

// MayKeep reports whether c may keep brackets. While clients compete for memory, only those with a quantum may: whether
// the others pause must be seen.
func (q *Quanta) MayKeep(c Client, now time.Time) bool {
	return q.Longest == 0 || now.Sub(q.pressed) >= forgets || q.Protected(c, now)
}

// Any reports whether a client has a quantum.
func (q *Quanta) Any(now time.Time) bool {
	for c := range q.clients {
		if q.Protected(c, now) {
			return true
		}
	}
	return false
}

// Next reports whether nobody is in line before c.
func (q *Quanta) Next(c Client) bool { return len(q.line) == 0 || q.line[0] == c }

// First reports whether c is the first in line.
func (q *Quanta) First(c Client) bool { return len(q.line) > 0 && q.line[0] == c }

// brings reports whether a client with a quantum still brings its memory.
func (c *client) brings(now time.Time) bool { return c.asking > 0 || now.Sub(c.ready) < Grace }

// end returns the end of a client's quantum, if it asks for nothing more.
func (c *client) end(longest time.Duration, now time.Time) time.Time {
	end := c.began.Add(longest)
	if 2*c.moved > longest {
		return now // it will not have much of it
	}
	if kept := c.began.Add((1 + keeps) * c.moved); !c.brings(now) && kept.Before(end) {
		end = kept
	}
	if rests := c.idle.Add(Grace); c.open+c.asking == 0 && rests.Before(end) {
		end = rests
	}
	return end
}

func (c *client) rests(now time.Time) {
	if c.open+c.asking == 0 {
		c.idle = now
	}
}

func (q *Quanta) of(c Client) *client {
	if q.clients == nil {
		q.clients = make(map[Client]*client)
	}
	if q.clients[c] == nil {
		q.clients[c] = new(client)
	}
	return q.clients[c]
}

// sweep forgets idle clients.
func (q *Quanta) sweep(now time.Time) {
	if now.Sub(q.swept) < forgets {
		return
	}
	q.swept = now
	maps.DeleteFunc(q.clients, func(_ Client, of *client) bool {
		return of.open+of.asking == 0 && now.Sub(of.idle) >= forgets
	})
}

// average returns an average of n values, of which the last one is next. The others weigh so many times as much.
func average(all, next float64, n int, weight float64) float64 {
	if n <= 1 {
		return next
	}
	return (weight*all + next) / (weight + 1)
}
