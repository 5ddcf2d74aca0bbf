package mover

// Crew is readers that are called before it is known what to read. Waking them takes longer than reading a piece, so
// they wake up during the planning. BenchmarkHeuristics shows the gain.
type Crew struct {
	begun  chan struct{} // closed by begin and Dismiss
	p      *Fill         // set before begun is closed, nil if nothing is to be read
	wanted int           // how many readers shall take part
}

// CallCrew calls as many readers as a pipeline has at most, besides its caller. The caller must call begin or Dismiss.
func CallCrew() *Crew {
	c := &Crew{begun: make(chan struct{})}
	for i := range Readers() - 1 {
		go func() {
			spinOn(c.begun)
			if c.p != nil && i < c.wanted {
				c.p.work(false)
			}
		}()
	}
	return c
}

// begin makes n of the crew take part in p.
func (c *Crew) begin(p *Fill, n int) {
	c.p, c.wanted = p, n
	close(c.begun)
}

// Dismiss sends the readers away, unless they have begun. c may be nil.
func (c *Crew) Dismiss() {
	if c != nil && c.p == nil {
		close(c.begun)
	}
}
