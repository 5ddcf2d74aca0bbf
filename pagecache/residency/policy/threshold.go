package policy

// Threshold decides when an extent in host memory moves into device memory: once it was accessed often enough (Ganguly,
// Equation 1). While memory is free, few accesses are enough. If another extent has to leave, more are needed, and the
// more round trips the extent has made, the more. An extent that is written to moves at once.
//
// Calls on one Threshold must not overlap. For numbers that are zero, the paper's are used.
type Threshold struct {
	// Static is t_s: how many accesses are enough when memory is almost full. Penalty is p: the factor by which more
	// are needed if another extent has to leave.
	Static, Penalty uint64

	extents map[ID]*visits
}

// The paper's numbers.
const (
	DefaultStatic  = 8
	DefaultPenalty = 8
	// mostTrips is the largest count of round trips. When a counter exceeds it, all are halved (5 bits).
	mostTrips = 1<<5 - 1
)

type visits struct{ accesses, trips uint64 }

// Access counts an access to an extent, in device memory or not, and reports whether the extent should be there.
// allocated and total are amounts of device memory. fits means that no other extent has to leave for it.
func (t *Threshold) Access(id ID, write bool, allocated, total int64, fits bool) bool {
	v := t.visits(id)
	if v.accesses++; v.accesses > mostCount {
		for _, x := range t.extents {
			x.accesses /= 2
		}
	}
	return write || v.accesses >= t.needed(v.trips, allocated, total, fits)
}

// Claim counts n accesses that a program says there were. They fill the counter by half at most.
func (t *Threshold) Claim(id ID, n uint32) {
	v := t.visits(id)
	v.accesses = max(v.accesses, min(v.accesses+uint64(n), mostClaimed))
}

// Reached reports whether the accesses so far are enough. It counts none.
func (t *Threshold) Reached(id ID, allocated, total int64, fits bool) bool {
	v := t.extents[id]
	return v != nil && v.accesses >= t.needed(v.trips, allocated, total, fits)
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

// Left counts a round trip: the extent left device memory.
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
