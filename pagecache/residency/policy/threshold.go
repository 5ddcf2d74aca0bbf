package policy

// Threshold decides when an extent that lies in host memory moves into device memory: once it was accessed often enough
// (Ganguly, Equation 1). While memory is free, that is soon; where something else has to go, later, and the later the
// more often the extent has made the way already. An extent that is written to moves at once.
//
// Calls on one Threshold must not overlap. The zero value of the numbers stands for the paper's.
type Threshold struct {
	// Static is t_s: the accesses that are enough when memory is just full. Penalty is p, by which more are needed when
	// something has to go.
	Static, Penalty uint64

	extents map[ID]*visits
}

// The numbers of the paper.
const (
	DefaultStatic  = 8
	DefaultPenalty = 8
	// mostTrips is where the counter of round trips is full, and all are halved (5 bits).
	mostTrips = 1<<5 - 1
)

type visits struct{ accesses, trips uint64 }

// Access counts an access to an extent that is not in device memory, or is, and reports whether it is to be there.
// allocated and total are the bytes of device memory, fits says that the extent needs nothing else to go.
func (t *Threshold) Access(id ID, write bool, allocated, total int64, fits bool) bool {
	v := t.visits(id)
	if v.accesses++; v.accesses > mostCount {
		for _, x := range t.extents {
			x.accesses /= 2
		}
	}
	return write || v.accesses >= t.needed(v.trips, allocated, total, fits)
}

// needed is t_d of Equation 1.
func (t *Threshold) needed(trips uint64, allocated, total int64, fits bool) uint64 {
	static, penalty := t.Static, t.Penalty
	if static == 0 {
		static = DefaultStatic
	}
	if penalty == 0 {
		penalty = DefaultPenalty
	}
	if fits {
		return uint64(float64(static)*float64(allocated)/float64(total)) + 1
	}
	return static * (trips + 1) * penalty
}

// Left counts a round trip: the extent was in device memory, and is there no more.
func (t *Threshold) Left(id ID) {
	v := t.visits(id)
	if v.trips++; v.trips > mostTrips {
		for _, x := range t.extents {
			x.trips /= 2
		}
	}
}

// Forget forgets an extent that never comes back.
func (t *Threshold) Forget(id ID) { delete(t.extents, id) }

func (t *Threshold) visits(id ID) *visits {
	v := t.extents[id]
	if v == nil {
		if t.extents == nil {
			t.extents = make(map[ID]*visits)
		}
		v = new(visits)
		t.extents[id] = v
	}
	return v
}
