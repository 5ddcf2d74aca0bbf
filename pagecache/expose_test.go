package pagecache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// secret is what a client must not find in the memory of a file that no longer has it.
var secret = bytes.Repeat([]byte("secret! "), page.Size/8)

const exposedPages = 512 // in one extent

// exposed makes a file of one extent, full of secrets, for tests to map.
func exposed(t *testing.T) (*machine, *source) {
	t.Helper()
	testdevice.Emulated(t, "the memory is read through its descriptor")
	m := newMachine(t, 1)
	src := m.file(exposedPages * page.Size)
	for p := range exposedPages {
		copy(src.home.data[p*page.Size:], secret)
	}
	return m, src
}

func (m *machine) mapping(src *source, r MapRequest) *Mapping {
	m.t.Helper()
	mp, err := m.cache.Map(context.Background(), src, r)
	require.NoError(m.t, err)
	return mp
}

// memoryOf returns all the memory that the client of a mapping can see.
func memoryOf(t *testing.T, mp *Mapping) (all []byte) {
	t.Helper()
	for _, x := range mp.Extents() {
		b := make([]byte, x.Size)
		n, err := unix.Pread(int(x.Descriptor.Fd()), b, 0)
		require.NoError(t, err)
		require.Equal(t, len(b), n)
		all = append(all, b...)
	}
	return all
}

// TestSecretsAreNotExposed: however bytes were brought to a device and then overwritten, a client that maps one page
// finds only the file's present bytes in the memory.
func TestSecretsAreNotExposed(t *testing.T) {
	const size = exposedPages * page.Size
	zero := make([]byte, size)
	type eraser = func(t *testing.T, src *source)
	overwrite := []eraser{
		func(t *testing.T, src *source) { src.write(t, 0, zero) },
		func(_ *testing.T, src *source) { src.home.editAt(0, zero) }, // in SOURCE
	}
	for name, c := range map[string]struct {
		before func(t *testing.T, m *machine, src *source) // what happens to the secrets first
		erase  []eraser
	}{
		"mapped for reading": {func(t *testing.T, m *machine,
			src *source) {
			m.run(src, 0, 0, size, false)
		}, overwrite},
		"mapped for reading, and unmapped": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			m.run(src, 0, 0, size, false).unmap()
		}, overwrite},
		"mapped for writing": {func(t *testing.T, m *machine,
			src *source) {
			m.run(src, 0, 0, size, true)
		}, overwrite},
		"mapped and unmapped": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			m.run(src, 0, 0, size, true).unmap()
		}, overwrite},
		"mapped lazily": {func(t *testing.T, m *machine, src *source) {
			p := m.mapping(src, MapRequest{Len: size, Lazy: true, Writable: true})
			_, err := p.Acquire(t.Context(), 0, size/2, false)
			require.NoError(t, err)
		}, overwrite},
		"not needed, then cut": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			p := m.run(src, 0, 0, size, true)
			require.NoError(t, p.Advise(t.Context(), 0, size, AdviceDontNeed))
		}, []eraser{func(t *testing.T, src *source) { src.truncate(t, 0); src.truncate(t, size) }}},
		"not needed, then overwritten": {func(t *testing.T, m *machine, src *source) {
			p := m.run(src, 0, 0, size, false)
			require.NoError(t, p.Advise(t.Context(), 0, size, AdviceDontNeed))
		}, overwrite},
		"punched out": {func(t *testing.T, m *machine, src *source) { m.run(src, 0, 0, size, true) },
			[]eraser{func(t *testing.T, src *source) {
				require.NoError(t, src.attached.ChangeHome(context.Background(), Change{Kind: ChangeZero, Len: size},
					func(off, _ int64) error {
						_, err := src.home.WriteAt(zero, off)
						return err
					}))
			}}},
		"cut": {func(t *testing.T, m *machine, src *source) { m.run(src, 0, 0, size, true) },
			[]eraser{func(t *testing.T, src *source) {
				src.truncate(t, 100)
				src.write(t, 0, zero[:100])
			}}},
		"stored past end of file": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			src.truncate(t, 10)
			p := m.run(src, 0, 0, size, true)
			copy(p.host[10:], bytes.Repeat(secret, exposedPages)[10:])
			p.unmap()
		}, []eraser{
			func(t *testing.T, src *source) { src.write(t, 0, zero[:10]) },
			func(_ *testing.T, src *source) { src.home.editAt(0, zero[:10]) },
		}},
		"stored beside the mapping": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			p := m.attach(m.mapping(src, MapRequest{Len: page.Size, Writable: true}), 0, size, true)
			copy(p.host[page.Size:], bytes.Repeat(secret, exposedPages-1))
			p.unmap()
		}, overwrite},
		"evicted and brought again": {func(t *testing.T, m *machine, src *source) {
			m.keep(src)
			m.run(src, 0, 0, size, true).unmap()
			require.True(t, m.cache.evictAll(t))
			m.run(src, 0, 0, size, false)
		}, overwrite},
		"brought in part": {func(t *testing.T, m *machine, src *source) {
			p := m.mapping(src, MapRequest{Len: size, Lazy: true})
			planned := errors.New("planned")
			m.devices[0].Fail(faulty.CopyIn, 1, planned)
			_, err := p.Acquire(t.Context(), 0, size, false)
			require.ErrorIs(t, err, planned)
			// As if a device had copied some of it.
			x := p.h.sorted()[0]
			gpu, mem := m.devices[0].Inner(x.Memory())
			require.NoError(t, gpu.CopyIn(t.Context(), []gpubackend.Copy{{Mem: mem, Off: page.Size, Host: secret}}))
		}, overwrite},
	} {
		t.Run(name, func(t *testing.T) {
			for i, r := range []MapRequest{{Len: page.Size}, {Len: page.Size, Lazy: true}, {Len: size, Lazy: true},
				{Len: page.Size, Writable: true}} {
				for way, erase := range c.erase {
					m, src := exposed(t)
					c.before(t, m, src)
					if src.attached.Detached() {
						t.Fatal("nothing is left to be found")
					}
					erase(t, src)
					require.NotContains(t, string(src.home.data), "secret!")
					mp := m.mapping(src, r)
					require.Zero(t, bytes.Count(memoryOf(t, mp), []byte("cret")), "request %d, way %d", i, way)
					require.NoError(t, mp.Unmap(t.Context()))
				}
			}
		})
	}
}

// TestSecretsThatAnotherDeviceOverwrote: they are not exposed either, although the backing file has them until the new
// bytes are collected.
func TestSecretsThatAnotherDeviceOverwrote(t *testing.T) {
	const size = exposedPages * page.Size
	testdevice.Emulated(t, "the memory is read through its descriptor")
	for name, before := range map[string]func(m *machine, src *source){
		"mapped for reading":  func(m *machine, src *source) { m.run(src, 0, 0, size, false) },
		"mapped for writing":  func(m *machine, src *source) { m.run(src, 0, 0, size, true) },
		"mapped and unmapped": func(m *machine, src *source) { m.keep(src); m.run(src, 0, 0, size, true).unmap() },
	} {
		t.Run(name, func(t *testing.T) {
			for i, r := range []MapRequest{{Len: page.Size}, {Len: size, Lazy: true},
				{Len: page.Size, Writable: true, Lazy: true}} {
				m := newMachine(t, 2)
				src := m.file(size)
				for p := range exposedPages {
					copy(src.home.data[p*page.Size:], secret)
				}
				before(m, src)
				other := m.run(src, 1, 0, size, true)
				clear(other.host)
				require.EqualValues(t, exposedPages, other.release())
				require.Zero(t, bytes.Count(memoryOf(t, m.mapping(src, r)), []byte("cret")), "request %d", i)
			}
		})
	}
}

// keep keeps the File of src attached, by an extent that no test looks at.
func (m *machine) keep(src *source) {
	m.run(src, 0, 64*exposedPages*page.Size, page.Size, false)
}

// evictAll evicts the unmapped extents of the first device, and reports whether there were any.
func (c *Cache) evictAll(t *testing.T) (any bool) {
	for _, f := range c.snapshotFiles() {
		f.mu.Lock()
		var all []*extent
		for h := range f.holdersLocked() {
			if h.dev == c.devices[0] {
				all = append(all, h.extents...)
			}
		}
		f.mu.Unlock()
		for _, x := range all {
			if f.evict(t.Context(), x.h, x.Extent, false) {
				any = true
			}
		}
	}
	return any
}

// TestExposingKeepsWhatOthersDo: a client that maps part of a file destroys no other client's stores, and no client
// sees its page change to something that was never in the file.
func TestExposingKeepsWhatOthersDo(t *testing.T) {
	m, src := exposed(t)
	writer := m.run(src, 0, 0, 4*page.Size, true)
	reader := m.run(src, 0, 8*page.Size, 4*page.Size, false)
	writer.store(5, 'x')
	writer.store(2*page.Size, 'y')
	src.write(t, page.Size, []byte("now"))
	src.write(t, 8*page.Size, []byte("now"))
	late := m.run(src, 0, 16*page.Size, page.Size, false)
	require.Equal(t, byte('x'), writer.byteAt(5))
	require.Equal(t, "nowret! ", string(writer.load(page.Size, page.Size+8)), "it was stale, and was not dropped")
	require.Equal(t, "nowret! ", string(reader.load(0, 8)))
	require.EqualValues(t, 2, writer.release())
	require.Equal(t, "secrex! ", string(src.read(t, 0, 8)))
	require.Equal(t, "nowret! ", string(src.read(t, page.Size, 8)))
	require.Equal(t, byte('y'), src.read(t, 2*page.Size, 1)[0])
	late.unmap()
}

// TestMappingAgainCostsNothing: if all pages are current, mapping makes no device calls.
func TestMappingAgainCostsNothing(t *testing.T) {
	m, src := exposed(t)
	const size = exposedPages * page.Size
	m.run(src, 0, 0, size, false)
	count := func() (n int) {
		for _, op := range []faulty.Op{faulty.CopyIn, faulty.CopyOut, faulty.Zero, faulty.Patch, faulty.Digests,
			faulty.Modified} {
			n += m.devices[0].Calls(op)
		}
		return n
	}
	before := count()
	for range 3 {
		m.run(src, 0, 0, size, false)
		m.mapping(src, MapRequest{Len: page.Size, Lazy: true})
	}
	require.Equal(t, before, count())
}

// TestStoresWithoutAnAcquire: stores into pages of a lazy mapping that were never acquired are released, and merged
// with home.
func TestStoresWithoutAnAcquire(t *testing.T) {
	const size = exposedPages * page.Size
	m := newMachine(t, 2)
	src := m.noisyFile(size)
	want := src.home.bytes(0, size)
	p := m.attach(m.mapping(src, MapRequest{Len: size, Lazy: true, Writable: true}), 0, size, true)
	put := func(at int) { p.store(at, ^want[at]|1); want[at] = ^want[at] | 1 }
	require.Zero(t, p.release())
	put(7)
	put(3*page.Size + 9)
	require.EqualValues(t, 2, p.release())
	require.True(t, bytes.Equal(want, src.read(t, 0, size)))
	require.Zero(t, m.cache.counters.OverlappingBytes.Load())
	// Another device changes a page that the first one still lacks and stores into again.
	other := m.run(src, 1, 0, size, true)
	other.store(100, want[100]+1)
	want[100]++
	require.EqualValues(t, 1, other.release())
	put(200)
	require.EqualValues(t, 1, p.release())
	require.True(t, bytes.Equal(want, src.read(t, 0, size)))
	// The page is acquired at last, with an unreleased store in it.
	put(5*page.Size + 1)
	p.acquire()
	require.True(t, bytes.Equal(want, p.all()))
	require.EqualValues(t, 1, p.release())
	// The page is given up and stored into again.
	require.NoError(t, p.Advise(t.Context(), 0, size, AdviceDontNeed))
	put(9 * page.Size)
	require.EqualValues(t, 1, p.release())
	p.unmap()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.True(t, bytes.Equal(want, src.home.bytes(0, size)))
	other.unmap()
	m.cache.collectDue(t.Context())
	require.Zero(t, src.attached.bases.n)
}

// TestStoresWithoutAnAcquireAndSource does the same while SOURCE is changed directly.
func TestStoresWithoutAnAcquireAndSource(t *testing.T) {
	const size = exposedPages * page.Size
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	p := m.attach(m.mapping(src, MapRequest{Len: size, Lazy: true, Writable: true}), 0, size, true)
	p.store(7, 1)
	p.store(page.Size, 2)
	_, err := p.Release(t.Context(), page.Size, page.Size)
	require.NoError(t, err)
	src.home.editAt(20, []byte("under"))
	want := src.home.bytes(0, size)
	changed, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.True(t, changed)
	want[7], want[page.Size] = 1, 2
	p.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.True(t, bytes.Equal(want, src.home.bytes(0, size)))
}

// sparseHome is a backing file of any size with few bytes written.
type sparseHome struct {
	*memoryHome
	size int64
}

func (h *sparseHome) ReadAt(p []byte, off int64) (int, error) {
	n := int(min(int64(len(p)), h.size-off))
	clear(p[:n])
	return n, nil
}

func (h *sparseHome) Signature() (Signature, error) {
	sig, err := h.memoryHome.Signature()
	sig.Size = h.size
	return sig, err
}

type sparseSource struct {
	*source
	home *sparseHome
}

func (s *sparseSource) OpenHome(bool) (Home, error) { return s.home, nil }

// TestSparseMappingTakesNoMemory: the release of a lazy mapping examines only the pages that programs stored into.
func TestSparseMappingTakesNoMemory(t *testing.T) {
	testdevice.Emulated(t, "a GPU has no holes in its memory")
	const size = 64 << 30
	gpu, err := emulated.New(emulated.Options{Memory: size})
	require.NoError(t, err)
	c, err := New(Options{Devices: []gpubackend.Device{gpu}, WriteBackInterval: time.Hour})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
	src := &sparseSource{source: &source{id: FileID{1, 1}, kernel: &testKernel{}}, home: &sparseHome{newHome(0), size}}
	mp, err := c.Map(t.Context(), src, MapRequest{Len: size, Lazy: true, Writable: true})
	require.NoError(t, err)
	extents := mp.Extents()
	_, err = unix.Pwrite(int(extents[0].Descriptor.Fd()), []byte("here"), 12345)
	require.NoError(t, err)
	n, err := mp.Release(t.Context(), 0, size)
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	blocks := int64(0)
	for _, x := range extents {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(int(x.Descriptor.Fd()), &st))
		blocks += st.Blocks
	}
	require.LessOrEqual(t, blocks*512, int64(1<<20))
	src.attached.mu.Lock()
	defer src.attached.mu.Unlock()
	require.Zero(t, glanceLocked(src.attached).digests)
}

// TestMappingTheEndBesideAnotherDevice: programs map the last page of the file, which another device tracks, in memory
// where stores past the end have to be zeroed. They find the file's bytes there, and their stores are detected.
func TestMappingTheEndBesideAnotherDevice(t *testing.T) {
	const size = page.Size + 100
	for _, request := range []MapRequest{
		{Off: page.Size, Len: page.Size},
		{Off: page.Size, Len: page.Size, Writable: true},
		{Off: page.Size, Len: page.Size, Lazy: true},
		{Off: page.Size, Len: page.Size, Lazy: true, Writable: true},
	} {
		for _, used := range []bool{false, true} {
			t.Run(fmt.Sprintf("lazy %v, writable %v, used %v", request.Lazy, request.Writable, used),
				func(t *testing.T) {
					m := newMachine(t, 2)
					src := m.noisyFile(size)
					want := src.home.bytes(page.Size, 100)
					m.run(src, 0, 0, page.Size, true) // may store past the end
					reader := m.run(src, 0, page.Size, page.Size, false)
					other := m.run(src, 1, page.Size, page.Size, true)
					if !used {
						reader.unmap()
					}
					other.add(7)
					p := m.attach(m.mapping(src, request), page.Size, page.Size, request.Writable)
					if !request.Lazy {
						requireSame(t, want, p.load(0, 100))
					}
					if request.Writable {
						want[5] ^= 0x55
						p.store(5, want[5])
						require.EqualValues(t, 1, p.release())
					}
					want[7]++
					require.EqualValues(t, 1, other.release())
					p.acquire()
					requireSame(t, want, p.load(0, 100))
					if used {
						reader.acquire()
						requireSame(t, want, reader.load(0, 100))
					}
					requireSame(t, want, src.read(t, page.Size, 100))
					other.acquire()
					requireSame(t, want, other.load(0, 100))
				})
		}
	}
}
