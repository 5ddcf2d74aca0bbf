package gpubackend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
)

var (
	// ErrNoMemory means that the device has no room for an allocation.
	ErrNoMemory = errors.New("device memory exhausted")
	// ErrDeviceLost means that the device no longer answers and that the contents of its memory are gone.
	ErrDeviceLost = errors.New("device lost")
	// ErrFreed means that a Memory was used after Free.
	ErrFreed = errors.New("device memory already freed")
	// ErrRange means that a call named bytes outside of a Memory, pages that do not begin at a multiple of page.Size,
	// or a Memory of another device.
	ErrRange = errors.New("not a range of this device's memory")
	// ErrInUse means that a device cannot be closed because some of its Memory is not freed.
	ErrInUse = errors.New("device memory still allocated")
	// ErrNoPeer means that a device cannot copy directly from another device's memory.
	ErrNoPeer = errors.New("no direct way between the devices")
	// ErrHostGone means that CopyIn could not read host memory: it shows a file that has become shorter.
	ErrHostGone = errors.New("the host memory shows a file that has become shorter")
	// ErrClosed means that a device was used after Close.
	ErrClosed = errors.New("device closed")
)

// Kind tells a client how to map an exported Memory. kinds.go has the kinds.
type Kind uint8

// UUID is the UUID of a GPU, in the driver's byte order.
type UUID [16]byte

// String returns the UUID as nvidia-smi shows it, or "" for zero.
func (u UUID) String() string {
	if u == (UUID{}) {
		return ""
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// Info describes a device. It never changes.
type Info struct {
	// Ordinal is the device's number in the mount. It is unique, whatever the device's kind. Clients name a device
	// without a UUID by it.
	Ordinal int
	Kind    Kind
	// UUID names the same GPU in every process; zero if the kind has none.
	UUID UUID
	// Name is for people.
	Name string
	// Memory is the budget in bytes: what Alloc may hand out in all, until SetBudget changes it.
	Memory int64
	// Granularity divides the size of every Memory. It is a power of two and a multiple of page.Size.
	Granularity int64
	// CopyEngines is true if the device's own engines copy between it and the host. Without them the host's processors
	// copy.
	CopyEngines bool
	// ReadOnlyExports is true if an export for reading cannot be used to store into the memory.
	ReadOnlyExports bool
}

// CheckSize returns ErrRange unless memory may have so many bytes.
func (i *Info) CheckSize(size int64) error {
	if size <= 0 || size&(i.Granularity-1) != 0 {
		return fmt.Errorf("%w: %d bytes are not a positive multiple of %d", ErrRange, size, i.Granularity)
	}
	return nil
}

// Digest is a keyed universal hash of one page. Two pages with different bytes have the same Digest with a
// probability below 2^-60 over the choice of Key. Host and device compute the same value, bit by bit.
type Digest uint64

// PeerCopy moves N bytes from From, memory of this or of another device, to Mem.
type PeerCopy struct {
	Mem  Memory
	Off  int64
	From Memory
	// FromOff is the byte offset in From.
	FromOff, N int64
}

// Patch brings the page at byte offset Off of Mem from Base to Next while programs may be storing into it. It stores
// exactly the bytes that differ between Base and Next and that are still as in Base, one by one. Base and Next have
// page.Size bytes.
type Patch struct {
	Mem        Memory
	Off        int64
	Base, Next []byte
	// Agreed is the Digest of Base, or nil. If the page has this digest, the device may use its own copy instead of
	// Base. A caller that sets Agreed need not set Changed.
	Agreed *Digest
	// Changed has every granule in which Base and Next differ, and may have others. Devices ignore all other granules.
	// If Changed is empty, the device finds the differences itself.
	Changed Granules
}

// Scan asks which pages of Mem, from the page at byte offset Off on, have a Digest that differs from Agreed.
type Scan struct {
	Mem    Memory
	Off    int64
	Agreed []Digest
}

// CheckHostPages returns ErrRange unless mem begins and ends at pages of the host, as LockHost needs, and is not empty.
func CheckHostPages(mem []byte) error {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	if len(mem) == 0 || (start|uintptr(len(mem)))%uintptr(os.Getpagesize()) != 0 {
		return fmt.Errorf("%w: %d bytes at %#x are not pages of the host", ErrRange, len(mem), start)
	}
	return nil
}

// Memory is one allocation of device memory, contiguous and exportable.
type Memory interface {
	// Size returns the bytes allocated.
	Size() int64
	// Export returns a descriptor that another process maps the memory with. With writable false, that process can only
	// read, as far as the kind of device can enforce that: CUDA leaves it to the importing process, see package cuda.
	// The Memory owns the descriptor, and returns the same one until a call of Held. Duplicate it to keep it.
	Export(writable bool) (*os.File, error)
	// Held reports whether another process may still have the memory: a descriptor, even one that is being sent, or a
	// mapping. If the kind of device cannot know that, Held is true from the first Export on. The call closes the
	// descriptors that Export returned, so they must not be in use.
	Held() bool
	// Zeroed reports whether the memory is known to have been all zeros when Alloc returned it. Then it need not be
	// zeroed before it is exported.
	Zeroed() bool
	// Free gives the memory back after the calls that are using it have ended. Every later call, Free included, fails
	// with ErrFreed. Processes that imported the memory keep it until they unmap it. If the kind of device knows that,
	// the memory counts as used until then. It is never handed out again.
	Free() error
}

// Device is a GPU, or an emulated device.
type Device interface {
	Info() Info
	// Key returns the key of the device's digests. The host computes the same digests with it:
	// (*DigestKey).Sum(page []byte) Digest and (*DigestKey).SumPages(pages []byte, out []Digest), declared in
	// digest.go.
	Key() *DigestKey

	// Alloc returns size bytes, a positive multiple of Granularity. Their contents are unspecified: the caller must
	// fill or zero them before it exports them. Alloc fails with ErrNoMemory if Used would exceed the budget, which is
	// Info.Memory at first.
	Alloc(size int64) (Memory, error)
	// AllocStaging is Alloc for memory through which bytes go to other devices, and which the caller frees within a
	// minute. It does not count in the budget or Used, so it takes nothing of what Alloc promises to others. It is
	// never exported.
	AllocStaging(size int64) (Memory, error)
	// AllocHost allocates pinned memory of the host. Programs map it, and the device accesses it like its own memory,
	// only slower. It does not count in Info.Memory or Used: the caller limits it. It fails with ErrNoMemory if the
	// host has no memory, or allows no more to be pinned.
	AllocHost(size int64) (Memory, error)
	// Used returns the bytes in Memory not yet freed, and in freed memory that other processes are known to keep.
	// Memory of the host does not count.
	Used() int64

	// SetBudget changes how many bytes Alloc may hand out in all. Existing memory stays, even if it is more.
	SetBudget(bytes int64)
	// Free returns how many bytes of the device are used by no process. It may block while the driver does.
	Free() (int64, error)

	// CopyIn copies from the host to the device, CopyOut from the device to the host. The pieces of one call may be
	// copied in any order and at the same time.
	CopyIn(ctx context.Context, pieces []Copy) error
	CopyOut(ctx context.Context, pieces []Copy) error
	// CopyPeer copies from other devices' memory without a detour through the host: over NVLink or PCIe between GPUs.
	// Programs may be storing into the sources, as in CopyOut. It fails with ErrNoPeer, and copies nothing, if a
	// source's device is of another kind, is lost, or cannot be reached.
	CopyPeer(ctx context.Context, pieces []PeerCopy) error
	// Zero stores zeros into the n bytes of mem at byte offset off.
	Zero(ctx context.Context, mem Memory, off, n int64) error
	// Patch applies patches to pages that other processes may be storing into.
	Patch(ctx context.Context, patches []Patch) error

	// Digests computes the Digest of len(out) pages of mem, from the page at byte offset off on.
	Digests(ctx context.Context, mem Memory, off int64, out []Digest) error
	// Modified returns, for each scan, the pages whose Digest differs from the agreed one, as ascending ranges counted
	// from the scan's first page.
	Modified(ctx context.Context, scans []Scan) ([][]page.Range, error)

	// HostBuffer returns n bytes of the host memory that is fastest for copies, and the function that gives them back.
	// Copies accept any other host memory too.
	HostBuffer(n int) (buf []byte, giveBack func(), err error)
	// LockHost page-locks mem, which begins and ends at pages of the host, and may be mapped for reading only: the
	// pages of a file. All devices of the same kind then copy from it as from a HostBuffer, and only CopyIn may use it.
	// Pages that the file loses meanwhile are copied as they were, or CopyIn fails with ErrHostGone. The caller unmaps
	// mem after unlock, which it calls once. LockHost blocks on the file. It fails if the device or the host does not
	// allow it.
	LockHost(mem []byte) (unlock func() error, err error)

	// Close frees the device. It fails with ErrInUse, and changes nothing, while some Memory is not freed. Every later
	// call, Close included, fails with ErrClosed, except Info, Key and Used.
	Close() error
}
