package conformance

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Allowance is a contract that a backend need not keep, because its kind of memory cannot.
type Allowance int

// ReadOnlyIsAdvice allows that a process maps a descriptor for writing that was exported for reading. A process that
// maps it for reading must still not be able to store.
const ReadOnlyIsAdvice Allowance = 1

// ImportersAreUnknown allows that a backend does not know whether another process still has exported memory.
const ImportersAreUnknown Allowance = 2

// Run tests the devices that open returns. Each must have memory of at least 16 times its granularity and at least 32
// MiB. A backend without a device must skip its test before it calls Run.
func Run(t *testing.T, open func(t *testing.T) gpubackend.Device, allowed ...Allowance) {
	tests := []struct {
		name string
		test func(*fixture)
	}{
		{"Info", testInfo},
		{"AllocSizes", testAllocSizes},
		{"Budget", testBudget},
		{"BudgetWhenAllAllocAtOnce", testBudgetAtOnce},
		{"BudgetUnderChurn", testBudgetUnderChurn},
		{"Zeroed", testZeroed},
		{"StagingMemory", testStagingMemory},
		{"HostMemory", testHostMemory},
		{"FreedMemory", testFreed},
		{"FreeBesideCalls", testFreeBesideCalls},
		{"Close", testClose},
		{"HostBuffer", testHostBuffer},
		{"LockHost", testLockHost},
		{"Copies", testCopies},
		{"CopiesAcrossBatches", testCopiesAcrossBatches},
		{"CopiesOfManyBuffers", testCopiesOfManyBuffers},
		{"Rows", testRows},
		{"RowsOfOtherDevices", testRowsOfOtherDevices},
		{"ScatteredPages", testScatteredPages},
		{"PeerCopies", testPeerCopies},
		{"Zero", testZero},
		{"FaultyArguments", testFaultyArguments},
		{"Context", testContext},
		{"Patch", testPatch},
		{"PatchOfGranules", testPatchOfGranules},
		{"PatchOfAgreed", testPatchOfAgreed},
		{"Digests", testDigests},
		{"Modified", testModified},
		{"ParallelUse", testParallelUse},
		{"Export", testExport},
		{"SharedWithProcess", testShared},
		{"ReadOnlyExport", testReadOnly},
		{"Held", testHeld},
		{"FreedUnderImporter", testFreedUnderImporter},
		{"ImporterDies", testImporterDies},
		{"PatchBesideStores", func(f *fixture) { testPatchBesideStores(f, false) }},
		{"PatchOfAgreedBesideStores", func(f *fixture) { testPatchBesideStores(f, true) }},
		{"DigestsBesideStores", testDigestsBesideStores},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := &fixture{T: t, open: open, allowed: allowed, rnd: rand.New(rand.NewPCG(1, 2)), ctx: t.Context()}
			f.dev = f.openDevice()
			f.info = f.dev.Info()
			tt.test(f)
		})
	}
}

// fixture is one test's device, with helpers for tests.
type fixture struct {
	*testing.T
	open    func(t *testing.T) gpubackend.Device
	allowed []Allowance
	dev     gpubackend.Device
	info    gpubackend.Info
	rnd     *rand.Rand
	ctx     context.Context
}

// openDevice opens a device that is closed after the test, unless the test closed it.
func (f *fixture) openDevice() gpubackend.Device {
	d := f.open(f.T)
	f.Cleanup(func() {
		err := d.Close()
		if f.Failed() {
			return
		}
		if err != nil {
			require.ErrorIs(f, err, gpubackend.ErrClosed, "the device closes once its memory is freed")
		}
		require.Zero(f, d.Used())
	})
	return d
}

// alloc returns memory of at least size bytes that is freed after the test, unless the test freed it.
func (f *fixture) alloc(size int64) gpubackend.Memory {
	f.Helper()
	g := f.info.Granularity
	m, err := f.dev.Alloc((size + g - 1) / g * g)
	require.NoError(f, err)
	f.Cleanup(func() {
		if err := m.Free(); err != nil && !f.Failed() {
			require.ErrorIs(f, err, gpubackend.ErrFreed)
		}
	})
	return m
}

func (f *fixture) write(m gpubackend.Memory, off int64, p []byte) {
	f.Helper()
	require.NoError(f, f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: m, Off: off, Host: p}}))
}

func (f *fixture) read(m gpubackend.Memory, off, n int64) []byte {
	f.Helper()
	p := make([]byte, n)
	require.NoError(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{{Mem: m, Off: off, Host: p}}))
	return p
}

// random returns n random bytes.
func (f *fixture) random(n int64) []byte {
	p := make([]byte, n)
	for i := 0; i < len(p); i += 8 {
		w := f.rnd.Uint64()
		for j := i; j < min(i+8, len(p)); j++ {
			p[j] = byte(w)
			w >>= 8
		}
	}
	return p
}

// pageAt returns page i of p.
func pageAt(p []byte, i int) []byte { return p[i*page.Size : (i+1)*page.Size] }
