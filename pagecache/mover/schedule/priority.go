package schedule

// Priority is the Discipline that serves the most urgent class first, and equals in order of arrival.
type Priority struct {
	// Preemptive makes transfers come in pieces, so that urgent requests do not wait for whole transfers.
	Preemptive bool
	// Exclusive prevents less urgent requests from beginning while a more urgent one is in progress. Otherwise they use
	// the room that is left.
	Exclusive bool

	waits line
	window
}

// Arrive implements Discipline.
func (p *Priority) Arrive(r Request) { p.waits.add(waiting{r, p.begun}) }

// Promote implements Discipline.
func (p *Priority) Promote(id ID) { p.waits.promote(id) }

// Withdraw implements Discipline.
func (p *Priority) Withdraw(id ID) bool { _, ok := p.waits.remove(id); return ok }

// Next implements Discipline.
func (p *Priority) Next() (call []Request) {
	if len(p.waits) == 0 {
		return nil
	}
	i := p.waits.oldest()
	if starves := p.starves(p.waits[i]); !starves {
		if i = 0; p.Exclusive && p.above(p.waits[0].Class) {
			return nil
		}
	}
	if !p.fits(p.waits[i].Request) {
		return nil
	}
	call = p.waits.take(i)
	p.begin(call)
	return call
}

// End implements Discipline.
func (p *Priority) End(call []Request) { p.end(call) }

// Resume implements Discipline.
func (p *Priority) Resume(call []Request) { p.begin(call) }

// Piece implements Discipline.
func (p *Priority) Piece() int64 {
	if p.Preemptive {
		return MostPiece
	}
	return 0
}
