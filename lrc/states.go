package lrc

import "github.com/gaiafs/gaiafs/internal/page"

// states is the storage of the states of a file's pages, as the rules see it. At first all pages have the initial
// state: no device ever held them, and the kernel may hold them.
//
// gaiafs uses [runs]; [plain] is its slow twin. The build tag slowtwin chooses the type [storage] of a File. A File
// does not use this interface directly, because then each call of scan and update would allocate the functions passed
// to it.
type states interface {
	// end returns a page; that page and all after it have the initial state.
	end() page.Index
	// next returns a page q ≥ p such that all pages in [p, q) have the initial state; maxPage if all from p on have.
	next(p page.Index) page.Index
	// scan calls fn for the pages of ranges for whose states want returns true, or for all pages if want is nil: run by
	// run of equal states, in order. Ranges are ascending and do not overlap. Neighbouring runs may have equal states.
	// fn must not keep or change a state.
	scan(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state))
	// update applies fn to the states of the pages of ranges, which are ascending and do not overlap. note, unless it
	// is nil, is called with each state before fn changes it. noted has the pages for which it returned anything but
	// BaseHome, in order, with neighbours joined. For all changes of one kind, fn must have the same result for the
	// same state, because results are cached. note is nil unless the kind is unremembered.
	update(ranges []page.Range, note func(s *state) Base, kind changeKind, fn func(s *state)) (noted []PageBase)
	// trim gives memory back after pages became initial again.
	trim()
	// memory returns the bytes that the states and their caches take.
	memory() int64
	// estimate is about that, and costs nothing.
	estimate() int64
	// check panics if the storage of rg is not consistent, under the build tag invariants.
	check(rg page.Range)
}

// changeKind is a kind of change of states.
type changeKind uint8

const (
	// keptForCPU is the change made by keepBases for the CPU.
	keptForCPU changeKind = iota
	// writtenByCPU is the change made by cpuChanged.
	writtenByCPU
	// unremembered is any other change: its result does not depend only on the state.
	unremembered
)

var _ states = (*storage)(nil)
