package gpubackend

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gaiafs/gaiafs/internal/page"
)

var (
	// ErrNoMemory says that the device has no room for an allocation.
	ErrNoMemory = errors.New("device memory exhausted")
	// ErrDeviceLost says that the device no longer answers and that the contents of its memory are gone.
	ErrDeviceLost = errors.New("device lost")
	// ErrFreed says that a Memory was used after Free.
	ErrFreed = errors.New("device memory already freed")
	// ErrRange says that a call named bytes outside of a Memory, or pages that do not begin at a multiple of page.Size,
	// or a Memory of another device.
	ErrRange = errors.New("not a range of this device's memory")
	// ErrInUse says that Memory was not freed when its device was to be closed.
	ErrInUse = errors.New("device memory still allocated")
	// ErrNoPeer says that a device cannot copy from another one's memory directly.
	ErrNoPeer = errors.New("no direct way between the devices")
	// ErrClosed says that a device was used after Close.
	ErrClosed = errors.New("device closed")
)

// Kind tells a client how to map an exported Memory. kinds.go has them.
type Kind uint8

// UUID is a GPU's, in the order of bytes that the driver gives it in.
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
	// Ordinal is the device's number in the mount. No other device has it, of whatever kind. Clients name a device by
	// it that has no UUID.
	Ordinal int
	Kind    Kind
	// UUID names the same GPU in every process; zero where the kind has none.
	UUID UUID
	// Name is for people.
	Name string
	// Memory is the bytes that Alloc may hand out in all, until SetBudget says otherwise.
	Memory int64
	// Granularity divides the size of every Memory. It is a power of two and a multiple of page.Size.
	Granularity int64
	// CopyEngines says that the device's own engines copy between it and the host. Without them the host's processors
	// do.
	CopyEngines bool
	// ReadOnlyExports says that nobody can store into the memory by what was exported for reading.
	ReadOnlyExports bool
}

// Digest is a keyed universal hash of one page. Two pages with different bytes have the same Digest with a
// probability below 2^-60 over the choice of Key. Host and device compute the same value, bit by bit.
type Digest uint64

// Copy moves len(Host) bytes between Host and Mem at byte offset Off.
type Copy struct {
	Mem  Memory
	Off  int64
	Host []byte
}

// PeerCopy moves N bytes from From, memory of this or of another device, to Mem.
type PeerCopy struct {
	Mem  Memory
	Off  int64
	From Memory
	// FromOff is the byte offset in From.
	FromOff, N int64
}

// Patch brings the page at byte offset Off of Mem from Base to Next under the feet of running programs: exactly the
// bytes that differ between Base and Next, and that Mem still has as in Base, are stored, one by one. Base and Next
// have page.Size bytes.
type Patch struct {
	Mem        Memory
	Off        int64
	Base, Next []byte
	// Agreed is the Digest of Base, or nil. A device may tell by it that the page is as in Base and do without that.
	// Who has it need not find out what changed.
	Agreed *Digest
	// Changed has every granule in which Base and Next differ, and may have others: no device looks at the rest. Where
	// it has none, the device looks for them itself.
	Changed Granules
}

// Scan asks which pages of Mem, from the page at byte offset Off on, have another Digest than in Agreed.
type Scan struct {
	Mem    Memory
	Off    int64
	Agreed []Digest
}

// Memory is one allocation of device memory, contiguous and exportable.
type Memory interface {
	// Size returns the bytes allocated.
	Size() int64
	// Export returns a descriptor that another process maps the memory with. With writable false, that process
	// can only read, as far as the kind of device can enforce that: CUDA leaves it to the importing process, see
	// package cuda. The descriptor stays the Memory's and is the same every time, up to a call of Held: duplicate it to
	// keep it.
	Export(writable bool) (*os.File, error)
	// Held reports whether another process may still have what Export returned: a descriptor, on its way too, or a
	// mapping. Where that cannot be found out, it is so from the first Export on. The call closes the descriptors that
	// Export returned, so nobody may be sending them.
	Held() bool
	// Zeroed reports whether the memory is known to have held nothing but zeros when Alloc returned it, so that nobody
	// needs to zero it before it is exported.
	Zeroed() bool
	// Free gives the memory back, once the calls that are using it have ended. Every call after it, Free too, fails
	// with ErrFreed. Processes that imported it keep it until they unmap it; where that can be found out, it counts as
	// used until then. It is never handed out again.
	Free() error
}

// Device is a GPU, or what stands in for one.
type Device interface {
	Info() Info
	// Key returns the key of the device's digests. The host computes the same digests with it:
	// (*DigestKey).Sum(page []byte) Digest and (*DigestKey).SumPages(pages []byte, out []Digest), declared in
	// digest.go.
	Key() *DigestKey

	// Alloc returns size bytes, a positive multiple of Granularity. Their contents are unspecified: whoever exports
	// them fills or zeroes them first. It fails with ErrNoMemory where Used would exceed the budget, which is
	// Info.Memory at first.
	Alloc(size int64) (Memory, error)
	// AllocHost is Alloc of pinned memory of the host, which programs map and the device reads and stores into as if it
	// were its own, only slower. It takes nothing of Info.Memory and does not count in Used: whoever asks bounds it. It
	// fails with ErrNoMemory where the host has none, or lets nobody pin more.
	AllocHost(size int64) (Memory, error)
	// Used returns the bytes in Memory not yet freed, and in freed memory that other processes are known to keep.
	// Memory of the host is left out.
	Used() int64

	// SetBudget changes how many bytes Alloc may hand out in all. What was handed out stays, even where that is more.
	SetBudget(bytes int64)
	// Free returns how many bytes the device has that nobody uses, neither this process nor another one. It may block
	// while the driver does.
	Free() (int64, error)

	// CopyIn copies from the host to the device, CopyOut from the device to the host. The pieces of one call may
	// be copied in any order and at once.
	CopyIn(ctx context.Context, pieces []Copy) error
	CopyOut(ctx context.Context, pieces []Copy) error
	// CopyPeer copies from other devices' memory without a detour through the host: over NVLink or PCIe between GPUs.
	// The sources may be stored into meanwhile, as in CopyOut. It fails with ErrNoPeer, and copies nothing, where a
	// source's device is of another kind, is lost, or cannot be reached.
	CopyPeer(ctx context.Context, pieces []PeerCopy) error
	// Zero stores zeros into the n bytes of mem at byte offset off.
	Zero(ctx context.Context, mem Memory, off, n int64) error
	// Patch applies patches to pages that other processes may be storing into.
	Patch(ctx context.Context, patches []Patch) error

	// Digests computes the Digest of len(out) pages of mem, from the page at byte offset off on.
	Digests(ctx context.Context, mem Memory, off int64, out []Digest) error
	// Modified returns, for each scan, the pages whose Digest is not the agreed one, as ascending ranges counted
	// from the scan's first page.
	Modified(ctx context.Context, scans []Scan) ([][]page.Range, error)

	// HostBuffer returns n bytes of host memory that copies are fastest with, and the function that gives them
	// back. Any other host memory may be used too.
	HostBuffer(n int) (buf []byte, giveBack func(), err error)

	// Close frees the device. It fails with ErrInUse, and changes nothing, while some Memory is not freed. Every call
	// after it, Close too, fails with ErrClosed, but for Info, Key and Used.
	Close() error
}
