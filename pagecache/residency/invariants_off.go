//go:build !invariants

package residency

func (d *Device) checkLocked() {}
