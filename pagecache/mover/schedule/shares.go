package schedule

import (
	"cmp"
	"maps"
	"math"
	"slices"
)

// Shares is the Discipline that shares the bytes in flight among tenants (Tanasić, 5.2.4, following the prose:
// Algorithm 1 as printed compares the tokens of the richest and the poorest, so it never serves a lone client).
//
// A tenant with requests has tokens: its part of InFlight by weight, minus its bytes in flight. Tenants with tokens for
// their next request go first, except one that is ahead of another by more than InFlight: with small requests, it has
// tokens whenever MostCalls lets something begin. Others go into debt if there is room that nobody else claims. Among
// equals, the tenant that was served least for its weight is next; a tenant that pauses does not catch up later.
// Requests that nobody waits for begin only if no tenant has a request that somebody waits for.
type Shares struct {
	// Weight returns the weight of a tenant, which is positive; nil means that all are equal. It must not block.
	Weight func(tenant uint32) float64

	tenants []*tenant // those that have requests, by ID
	// past is the service of tenants without requests, as far as it exceeds virtual.
	past map[uint32]float64
	// virtual is the service, before that, of the tenant served last.
	virtual float64
	window
}

// tenant is a tenant's waiting requests and its bytes in flight.
type tenant struct {
	id     uint32
	waits  line
	flight int64
	// served is the bytes that began, divided by the weight.
	served float64
}

// find returns the index at which a tenant is, or would be.
func (s *Shares) find(id uint32) (int, bool) {
	return slices.BinarySearchFunc(s.tenants, id, func(t *tenant, id uint32) int { return cmp.Compare(t.id, id) })
}

// of returns a tenant. If it has no requests yet, of adds it.
func (s *Shares) of(id uint32) *tenant {
	i, ok := s.find(id)
	if !ok {
		s.tenants = slices.Insert(s.tenants, i, &tenant{id: id, served: max(s.past[id], s.virtual)})
		delete(s.past, id)
	}
	return s.tenants[i]
}

// left removes a tenant that has no requests any more.
func (s *Shares) left(id uint32) {
	i, ok := s.find(id)
	if !ok || len(s.tenants[i].waits) > 0 || s.tenants[i].flight > 0 {
		return
	}
	if s.past == nil {
		s.past = make(map[uint32]float64)
	}
	s.past[id] = s.tenants[i].served
	s.tenants = slices.Delete(s.tenants, i, i+1)
	maps.DeleteFunc(s.past, func(_ uint32, served float64) bool { return served <= s.virtual })
}

func (s *Shares) weight(id uint32) float64 {
	if s.Weight == nil {
		return 1
	}
	return s.Weight(id)
}

// Arrive implements Discipline.
func (s *Shares) Arrive(r Request) {
	t := s.of(r.Tenant)
	t.waits.add(waiting{r, s.begun})
}

// Promote implements Discipline.
func (s *Shares) Promote(id ID) {
	for _, t := range s.tenants {
		t.waits.promote(id)
	}
}

// Withdraw implements Discipline.
func (s *Shares) Withdraw(id ID) bool {
	for _, t := range s.tenants {
		if _, ok := t.waits.remove(id); ok {
			s.left(t.id)
			return true
		}
	}
	return false
}

// Next implements Discipline.
func (s *Shares) Next() (call []Request) {
	all := 0.0
	for _, t := range s.tenants {
		all += s.weight(t.id)
	}
	least := s.least()
	var next *tenant
	at, best := 0, [3]float64{}
	for _, t := range s.tenants {
		if len(t.waits) == 0 {
			continue
		}
		i := t.waits.oldest()
		tokens := InFlight*s.weight(t.id)/all - float64(t.flight)
		rank := [3]float64{-1, 0, float64(t.waits[i].ID)}
		if !s.starves(t.waits[i]) {
			i = 0
			x := t.waits[0]
			later := number(x.Class > Acquire)
			ahead := (t.served - least[int(later)]) * s.weight(t.id)
			rank = [3]float64{later, number(tokens < float64(x.Size) || ahead > InFlight), t.served}
		}
		if next == nil || slices.Compare(rank[:], best[:]) < 0 {
			next, at, best = t, i, rank
		}
	}
	if next == nil || !s.fits(next.waits[at].Request) {
		return nil
	}
	call = next.waits.take(at)
	s.virtual = max(s.virtual, next.served)
	s.resume(next, call)
	return call
}

// least returns the service of the tenant that was served least, of those whose next request somebody waits for, and of
// those whose next request nobody waits for.
func (s *Shares) least() [2]float64 {
	least := [2]float64{math.Inf(1), math.Inf(1)}
	for _, t := range s.tenants {
		if len(t.waits) > 0 {
			of := &least[int(number(t.waits[0].Class > Acquire))]
			*of = min(*of, t.served)
		}
	}
	return least
}

// number returns 1 for true and 0 for false.
func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (s *Shares) resume(t *tenant, call []Request) {
	for _, r := range call {
		t.flight += r.Size
		t.served += float64(r.Size) / s.weight(t.id)
	}
	s.begin(call)
}

// End implements Discipline.
func (s *Shares) End(call []Request) {
	t := s.of(call[0].Tenant)
	for _, r := range call {
		t.flight -= r.Size
	}
	s.end(call)
	s.left(t.id)
}

// Resume implements Discipline.
func (s *Shares) Resume(call []Request) { s.resume(s.of(call[0].Tenant), call) }

// Piece implements Discipline.
func (s *Shares) Piece() int64 { return MostPiece }
