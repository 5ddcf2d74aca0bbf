package grants

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Client names who asks: a session of the daemon.
type Client uint64

// ID names an ask and the grant that it becomes. IDs are not used again.
type ID uint64

// Ask is a bracket that wants to begin.
type Ask struct {
	ID     ID
	Client Client
	// Priority: higher ones go first. It counts as no higher than that of an ask of the same client that waits already.
	Priority int
	// Inside is the grant in which this ask is nested, one that its thread holds. 0 stands for none.
	Inside ID
	// Since is when it came, and Until when it is refused where it still waits. The zero time stands for never.
	Since, Until time.Time
}

// Decision is what became of an ask: granted, or refused where Refused is not nil.
type Decision struct {
	Ask     Ask
	Refused *Refusal
}

// Queue has the asks that wait and the grants that are held. The zero value has none.
type Queue struct {
	nested []Ask // they are decided at once, in the order in which they came
	waits  []Ask // the first to be granted first
	held   map[ID]Ask
}

// Ask adds an ask. It waits until Next decides on it.
func (q *Queue) Ask(a Ask) {
	if a.Inside != 0 {
		q.nested = append(q.nested, a)
		return
	}
	for _, b := range q.waits {
		if b.Client == a.Client {
			a.Priority = min(a.Priority, b.Priority)
		}
	}
	at := len(q.waits)
	for at > 0 && q.waits[at-1].Priority < a.Priority {
		at--
	}
	q.waits = slices.Insert(q.waits, at, a)
}

// Next returns what is decided at the moment now, one ask at a time; false where nothing is. It is to be called after
// each of the other methods, when memory became free, and at the time that Wake says, each time until it returns false.
//
// fits says whether the whole of an ask can be had now, beside what is granted. What Next grants is held from then on:
// the caller takes it before he calls again.
func (q *Queue) Next(now time.Time, fits func(Ask) bool) (Decision, bool) {
	if len(q.nested) > 0 {
		a := q.nested[0]
		q.nested = q.nested[1:]
		if outer, ok := q.held[a.Inside]; !ok || outer.Client != a.Client {
			return Decision{a, &Refusal{Reason: NotHeld, Ask: a}}, true
		}
		if !fits(a) {
			return Decision{a, &Refusal{Reason: Holds, Ask: a, Holders: q.holders(a.Client)}}, true
		}
		return q.grant(a), true
	}
	for i, a := range q.waits {
		if !a.Until.IsZero() && !now.Before(a.Until) && (i > 0 || !fits(a)) {
			q.waits = slices.Delete(q.waits, i, i+1)
			return Decision{a, &Refusal{Timeout, a, now.Sub(a.Since), i, q.holders(0)}}, true
		}
	}
	if len(q.waits) > 0 && fits(q.waits[0]) {
		a := q.waits[0]
		q.waits = slices.Delete(q.waits, 0, 1)
		return q.grant(a), true
	}
	return Decision{}, false
}

func (q *Queue) grant(a Ask) Decision {
	if q.held == nil {
		q.held = make(map[ID]Ask)
	}
	q.held[a.ID] = a
	return Decision{Ask: a}
}

// Done ends a grant. It reports false where none of that client has this ID: grants end once.
func (q *Queue) Done(c Client, id ID) bool {
	if a, ok := q.held[id]; !ok || a.Client != c {
		return false
	}
	delete(q.held, id)
	return true
}

// Withdraw takes back an ask that waits. It reports false where it does not wait any more.
func (q *Queue) Withdraw(id ID) bool {
	n := q.Waiting()
	gone := func(a Ask) bool { return a.ID == id }
	q.waits, q.nested = slices.DeleteFunc(q.waits, gone), slices.DeleteFunc(q.nested, gone)
	return q.Waiting() < n
}

// Leave forgets a client that ended. It returns the grants that it held, which are done, in the order of their IDs.
func (q *Queue) Leave(c Client) (held []ID) {
	gone := func(a Ask) bool { return a.Client == c }
	q.waits, q.nested = slices.DeleteFunc(q.waits, gone), slices.DeleteFunc(q.nested, gone)
	for id, a := range q.held {
		if a.Client == c {
			held = append(held, id)
			delete(q.held, id)
		}
	}
	slices.Sort(held)
	return held
}

// Wake is when the next ask is refused unless something happens before; false where none ever is.
func (q *Queue) Wake() (at time.Time, ok bool) {
	for _, a := range q.waits {
		if !a.Until.IsZero() && (!ok || a.Until.Before(at)) {
			at, ok = a.Until, true
		}
	}
	return at, ok
}

// Waiting is how many asks wait, and Held how many grants are held.
func (q *Queue) Waiting() int { return len(q.nested) + len(q.waits) }

// Held is how many grants are held.
func (q *Queue) Held() int { return len(q.held) }

// holders returns the clients that hold grants, but for one.
func (q *Queue) holders(but Client) (all []Client) {
	for _, a := range q.held {
		if a.Client != but && !slices.Contains(all, a.Client) {
			all = append(all, a.Client)
		}
	}
	slices.Sort(all)
	return all
}

// Reason is why an ask was refused.
type Reason uint8

const (
	// Timeout says that it waited until Ask.Until.
	Timeout Reason = iota
	// Holds says that it is nested and does not fit: it would hold and wait.
	Holds
	// NotHeld says that it is nested in a grant that its client does not hold.
	NotHeld
)

// Refusal is an error that says why an ask was refused.
type Refusal struct {
	Reason Reason
	Ask    Ask
	// Waited is how long it waited, and Before how many were before it.
	Waited time.Duration
	Before int
	// Holders are the clients that hold grants, its own aside where it is nested.
	Holders []Client
}

func (r *Refusal) Error() string {
	switch r.Reason {
	case Holds:
		return "a nested bracket does not fit beside what is in use, and may not wait, since others wait for what the outer one holds" +
			r.held() + "; end the outer bracket, and ask for both ranges at once"
	case NotHeld:
		return fmt.Sprintf("a bracket is nested in %d, which is no open bracket of this program", r.Ask.Inside)
	}
	why := ", and the memory that brackets can use is too small or taken by mappings that never move"
	switch held := r.held(); {
	case r.Before > 0:
		why = fmt.Sprintf(" behind %d others%s", r.Before, held)
	case held != "":
		why = held
	}
	return fmt.Sprintf("a bracket waited %v for memory%s", r.Waited.Round(time.Millisecond), why)
}

// held names those that hold grants.
func (r *Refusal) held() string {
	if len(r.Holders) == 0 {
		return ""
	}
	var names []string
	for _, c := range r.Holders {
		names = append(names, fmt.Sprint(c))
	}
	return " (open brackets: client " + strings.Join(names, ", ") + ")"
}
