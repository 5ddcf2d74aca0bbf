package schedule

import "slices"

const (
	// MostCalls is the number of calls that FCFS has under way at once, those of requests that are Own aside. A
	// small one takes as long to make and to end as to carry out.
	MostCalls = 4
	// CallBytes is the bytes of one call, a request more or less, and of a piece. What comes while calls are under way
	// goes together.
	CallBytes = 2 << 20
)

// FCFS is the Discipline that serves first who came first, and those who wait before those who do not. Requests that
// are Own begin at once: whoever makes the call himself is kept from it by nobody. The zero value has no requests.
type FCFS struct {
	own            []Request // they begin at once
	urgent, others []Request
	calls          int // under way, but for those that are Own
}

// Arrive implements Discipline.
func (f *FCFS) Arrive(r Request) {
	switch {
	case r.Own:
		f.own = append(f.own, r)
	case r.Class <= CPURead:
		f.urgent = append(f.urgent, r)
	default:
		f.others = append(f.others, r)
	}
}

// Promote implements Discipline. The request goes behind those that somebody waits for already.
func (f *FCFS) Promote(id ID) {
	if i := find(f.others, id); i >= 0 {
		f.urgent = append(f.urgent, f.others[i])
		f.others = slices.Delete(f.others, i, i+1)
	}
}

// Withdraw implements Discipline.
func (f *FCFS) Withdraw(id ID) bool {
	for _, list := range []*[]Request{&f.own, &f.urgent, &f.others} {
		if i := find(*list, id); i >= 0 {
			*list = slices.Delete(*list, i, i+1)
			return true
		}
	}
	return false
}

func find(list []Request, id ID) int {
	return slices.IndexFunc(list, func(r Request) bool { return r.ID == id })
}

// Next implements Discipline.
func (f *FCFS) Next() (call []Request) {
	if len(f.own) > 0 {
		return take(&f.own, 1)
	}
	if f.calls == MostCalls {
		return nil
	}
	// Nobody waits for what can wait.
	for _, list := range []*[]Request{&f.urgent, &f.others} {
		n, size := 0, int64(0)
		for n < len(*list) && (n == 0 || size+(*list)[n].Size <= CallBytes) {
			size += (*list)[n].Size
			n++
		}
		if n > 0 {
			f.calls++
			return take(list, n)
		}
	}
	return nil
}

// take takes the first n requests of a list. What is left moves up, so that the list's memory goes round.
func take(list *[]Request, n int) (call []Request) {
	call = slices.Clone((*list)[:n])
	*list = slices.Delete(*list, 0, n)
	return call
}

// End implements Discipline.
func (f *FCFS) End(call []Request) {
	if !call[0].Own {
		f.calls--
	}
}

// Resume implements Discipline.
func (f *FCFS) Resume(call []Request) {
	if !call[0].Own {
		f.calls++
	}
}

// Piece implements Discipline: transfers are made whole.
func (f *FCFS) Piece() int64 { return 0 }
