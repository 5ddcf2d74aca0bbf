package kernel

import "context"

// With its write-back cache, the kernel extends files without a request. Home is then shorter than the kernel knows,
// until the kernel has sent everything.

// MayExtend notes that the kernel may begin to extend the file. It needs no lock.
func (k *Kernel) MayExtend() { k.asked.Add(1) }

// MayBeLonger reports whether the kernel may know the file to be longer than home.
func (k *Kernel) MayBeLonger() bool { return k.cachesWrites && k.sentAll != k.asked.Load() }

// SendGrowth makes home as long as the kernel knows the file to be. The caller does not hold the file's lock.
func (k *Kernel) SendGrowth(ctx context.Context) error {
	if err := k.mu.LockIn(ctx); err != nil {
		return err
	}
	pages, grows := k.pages.(GrowingPages)
	from, asked := k.file.Size(), k.asked.Load()
	k.mu.Unlock()
	if !grows {
		return nil
	}
	if err := pages.SendFrom(from); err != nil {
		return err
	}
	if err := k.mu.LockIn(ctx); err != nil {
		return err
	}
	k.sentAll = asked
	k.mu.Unlock()
	return nil
}
