package schedule

import "slices"

const (
	// MostCalls is the most calls that are in progress at once. FCFS does not count those of Own requests. A small call
	// takes as long to start and to end as to carry out.
	MostCalls = 4
	// CallBytes is the most bytes of a call for several requests. Requests that arrive while MostCalls are in progress
	// share a call.
	CallBytes = 2 << 20
)

// FCFS is the Discipline that serves requests in order of arrival, and those that somebody waits for first. Own
// requests begin at once: nothing holds up a caller that makes the call itself. The zero value has no requests.
type FCFS struct {
	own            []Request // they begin at once
	urgent, others []Request
	calls          int // in progress, except those of Own requests
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

// Promote implements Discipline. The request goes behind those that somebody waited for before.
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
	// Requests that nobody waits for go last.
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

// take takes the first n requests of a list. The rest move up, so that the list's memory is reused.
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
