package policy

import (
	"container/list"
	"iter"
)

// allocated evicts the least recently allocated extent first, as GAIA does (Brokhman's thesis): what programs do
// with the memory that they map is seen by nobody, so there is no better order that costs nothing.
type allocated struct {
	order list.List // of *allocation, the oldest first
	at    map[ID]*list.Element
}

type allocation struct {
	id     ID
	mapped bool
}

func newAllocated() Rule { return &allocated{at: make(map[ID]*list.Element)} }

func (r *allocated) Note(e Event) {
	switch e.Kind {
	case Placed:
		r.at[e.ID] = r.order.PushBack(&allocation{id: e.ID})
	case Mapped, Unmapped:
		r.at[e.ID].Value.(*allocation).mapped = e.Kind == Mapped
	case Left:
		r.order.Remove(r.at[e.ID])
		delete(r.at, e.ID)
	}
}

func (r *allocated) Victims() iter.Seq[ID] {
	return func(yield func(ID) bool) {
		for at := r.order.Front(); at != nil; at = at.Next() {
			if x := at.Value.(*allocation); !x.mapped && !yield(x.id) {
				return
			}
		}
	}
}
