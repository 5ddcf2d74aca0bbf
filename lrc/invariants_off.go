//go:build !invariants

package lrc

import "github.com/gaiafs/gaiafs/internal/page"

// checkInvariants does nothing without the build tag invariants.
func (f *File) checkInvariants(page.Range) {}

// checkDropped does nothing without the build tag invariants.
func (f *File) checkDropped([]page.Range) {}

// check does nothing without the build tag invariants.
func (rs *runs) check(page.Range) {}
