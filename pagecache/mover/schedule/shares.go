package schedule

import (
	"cmp"
	"maps"
	"slices"
)

// Shares is the Discipline that shares the bytes in flight among tenants (Tanasić, 5.2.4, in its prose: Algorithm 1 as
// printed compares the tokens of the richest and the poorest, and so serves nobody where there is one client).
//
// A tenant that has requests has tokens: its part of InFlight by weight, less its bytes in flight. Tenants with tokens
// left go first. One that has none goes into debt where room is left that nobody else claims. Of tenants that are equal
// in this, the one that was served least for its weight is next; who comes back after a pause does not make up for it.
// Requests for which nobody waits begin only where none waits that somebody waits for, of any tenant.
type Shares struct {
	// Weight returns the weight of a tenant, which is positive. nil: all are equal. It is called without a pause, and
	// asks nobody.
	Weight func(tenant uint32) float64

	tenants []*tenant // those that have something, by their numbers
	// past is how well tenants were served that have nothing now, but for those of whom virtual says enough.
	past map[uint32]float64
	// virtual is how well served the tenant was that was served last, before that.
	virtual float64
	window
}

// tenant has what waits and what is in flight.
type tenant struct {
	id     uint32
	waits  line
	flight int64
	// served is the bytes that began, divided by the weight.
	served float64
}

// find returns where a tenant is, or would be.
func (s *Shares) find(id uint32) (int, bool) {
	return slices.BinarySearchFunc(s.tenants, id, func(t *tenant, id uint32) int { return cmp.Compare(t.id, id) })
}

// of returns a tenant, which is made where it has nothing yet.
func (s *Shares) of(id uint32) *tenant {
	i, ok := s.find(id)
	if !ok {
		s.tenants = slices.Insert(s.tenants, i, &tenant{id: id, served: max(s.past[id], s.virtual)})
		delete(s.past, id)
	}
	return s.tenants[i]
}

// left forgets a tenant that has nothing any more.
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
			rank = [3]float64{number(t.waits[i].Class > Acquire), number(tokens <= 0), t.served}
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

// number is 1 for true.
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
func (s *Shares) Piece() int64 { return CallBytes }
