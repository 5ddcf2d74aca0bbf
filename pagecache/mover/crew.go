package mover

// Crew is readers that were called before there was something to read. To be woken takes them longer than to read a
// piece, so they are while it is being found out what to read. BenchmarkHeuristics shows what that gains.
type Crew struct {
	begun  chan struct{} // closed by begin and Dismiss
	p      *Fill         // set before begun is closed, nil if nothing is to be read
	wanted int           // so many of them
}

// CallCrew calls as many readers as a pipeline has at most beside its caller. In the end begin or Dismiss is called.
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

// begin has n of the crew take part in p.
func (c *Crew) begin(p *Fill, n int) {
	c.p, c.wanted = p, n
	close(c.begun)
}

// Dismiss sends the readers of a crew away, if there is one and they have not begun.
func (c *Crew) Dismiss() {
	if c != nil && c.p == nil {
		close(c.begun)
	}
}
