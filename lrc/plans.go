//go:build !invariants

package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// plans has the open plans of a File. Without the build tag invariants it is empty.
type plans struct{}

// ticket identifies an open plan.
type ticket struct{}

func (plans) begin(planKind, versions.Owner, []page.Range) ticket { return ticket{} }
func (plans) widen(ticket, page.Range)                            {}
func (plans) advance(t ticket, ranges []page.Range)               {}
func (plans) end(ticket)                                          {}
func (plans) event(string, []page.Range)                          {}
func (plans) lose(page.Range, versions.Owner)                     {}
func (f *File) mustBePending([]Pending)                           {}
func (f *File) mustNotPend(string, page.Range)                    {}
func (f *File) mustNotPendOf(string, page.Range, versions.Owner)  {}
func (f *File) mustBeStale([]page.Range, versions.Owner)          {}
func (f *File) mustBeUntracked([]page.Range, versions.Owner)      {}

// CheckEnded panics if a plan is open, under the build tag invariants. Releases may be draining.
func (f *File) CheckEnded() {}
