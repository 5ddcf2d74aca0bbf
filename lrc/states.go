package lrc

import "github.com/gaiafs/gaiafs/internal/page"

// states is what the rules ask of the place that keeps the states of a file's pages. All pages have the initial state
// at first: no device ever held them, and the kernel may. Nothing else of the storage is known to the rules.
//
// [runs] is what gaiafs uses, and [plain] its slow twin. A File has the one that the build tag slowtwin chooses, as
// [storage], and not a value of this interface: through one, every function that is passed to scan and update would be
// allocated, at each call.
type states interface {
	// end returns a page from which on all pages have the initial state.
	end() page.Index
	// next returns a page from p on, before which all pages from p on have the initial state; maxPage if all have.
	next(p page.Index) page.Index
	// scan calls fn for the pages of ranges whose states want reports true of, or for all if want is nil: run by run of
	// equal states, in order. Ranges are ascending and do not overlap. Neighbouring runs may have equal states. fn must
	// not keep or change a state.
	scan(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state))
	// update makes of the states of the pages of ranges, which are ascending and do not overlap, what fn makes of them.
	// Where note, unless it is nil, returns something else than BaseHome of a state before fn changes it, noted has the
	// pages that had it, in order, neighbours together. fn makes the same of the same state whenever it is called, for
	// all changes of one kind: what it made once may be taken again. note is nil unless the kind is unremembered.
	update(ranges []page.Range, note func(s *state) Base, kind changeKind, fn func(s *state)) (noted []PageBase)
	// trim gives memory back after pages became initial again.
	trim()
	// memory returns the bytes that the states take, and all that is remembered of them.
	memory() int64
	// estimate is about that, and costs nothing.
	estimate() int64
	// check panics if what is kept of rg is not consistent, under the build tag invariants.
	check(rg page.Range)
}

// changeKind is a kind of change of states.
type changeKind uint8

const (
	// keptForCPU is that of keepBases for nobody but the CPU.
	keptForCPU changeKind = iota
	// writtenByCPU is that of cpuChanged.
	writtenByCPU
	// unremembered is any other: what it makes of states depends on more than them.
	unremembered
)

var _ states = (*storage)(nil)
