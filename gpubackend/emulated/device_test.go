package emulated_test

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

func open(t testing.TB, o emulated.Options) gpubackend.Device {
	d, err := emulated.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func alloc(t testing.TB, d gpubackend.Device, size int64) gpubackend.Memory {
	m, err := d.Alloc(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Free()) })
	return m
}

// TestTaken: memory that other programs use is neither free nor allocatable.
func TestTaken(t *testing.T) {
	const m = emulated.Granularity
	taken := int64(2 * m)
	d := open(t, emulated.Options{Memory: 3 * m, Total: 4 * m, Taken: func() int64 { return taken }})
	alloc(t, d, m)
	free, err := d.Free()
	require.NoError(t, err)
	require.EqualValues(t, m, free)
	_, err = d.Alloc(2 * m)
	require.ErrorIs(t, err, gpubackend.ErrNoMemory)
	taken = m
	alloc(t, d, 2*m)
	taken = 3 * m
	free, err = d.Free()
	require.NoError(t, err)
	require.Zero(t, free)
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]emulated.Options{
		"no memory":             {},
		"less than one extent":  {Memory: 2<<20 - 1},
		"negative memory":       {Memory: -1},
		"granularity no power":  {Memory: 1 << 30, Granularity: 3 << 20},
		"granularity below 4 K": {Memory: 1 << 30, Granularity: 2048},
		"negative granularity":  {Memory: 1 << 30, Granularity: -4096},
		"negative ordinal":      {Memory: 1 << 30, Ordinal: -1},
	} {
		_, err := emulated.New(o)
		require.Error(t, err, name)
	}
	d := open(t, emulated.Options{Ordinal: 7, Memory: 5<<20 + 1})
	require.Equal(t, gpubackend.Info{
		Ordinal: 7, Kind: gpubackend.KindEmulated, Name: "Emulated device 7", Memory: 4 << 20, Granularity: 2 << 20,
		ReadOnlyExports: true,
	}, d.Info())
}

func TestKeys(t *testing.T) {
	a, b := open(t, emulated.Options{Memory: 1 << 30}), open(t, emulated.Options{Memory: 1 << 30})
	require.Same(t, a.Key(), b.Key(), "drawn once, so that devices can compare digests")
	own, err := gpubackend.NewDigestKey(rand.Reader)
	require.NoError(t, err)
	require.Same(t, own, open(t, emulated.Options{Memory: 1 << 30, Key: own}).Key())
}

// TestUnusedDevicesCostNothing opens more devices than any machine has. They take hardly any memory, and no goroutine,
// descriptor or address space.
func TestUnusedDevicesCostNothing(t *testing.T) {
	const devices = 160
	open(t, emulated.Options{Memory: 1 << 40}) // whatever the first one needs of the runtime
	before := cost(t)
	for i := range devices {
		open(t, emulated.Options{Ordinal: i, Memory: 80 << 30})
	}
	after := cost(t)
	require.Equal(t, before.goroutines, after.goroutines)
	require.Equal(t, before.descriptors, after.descriptors)
	require.Less(t, after.resident-before.resident, int64(16<<20))
	require.Less(t, after.virtual-before.virtual, int64(256<<20), "Go reserves addresses for its heap in large steps")
}

// TestUntouchedMemoryCostsNothing allocates more than any host has.
func TestUntouchedMemoryCostsNothing(t *testing.T) {
	d := open(t, emulated.Options{Memory: 4 << 40})
	before := cost(t)
	m := alloc(t, d, 1<<40)
	require.True(t, m.Zeroed())
	require.Less(t, cost(t).resident-before.resident, int64(16<<20))
	p := make([]byte, 3)
	require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Off: 1<<40 - 3, Host: []byte("end")}}))
	require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Off: 1<<40 - 3, Host: p}}))
	require.Equal(t, "end", string(p))
	require.Less(t, cost(t).resident-before.resident, int64(16<<20))
}

func TestFreeLeavesNothing(t *testing.T) {
	d := open(t, emulated.Options{Memory: 1 << 30})
	cycle := func() {
		m, err := d.Alloc(2 << 20)
		require.NoError(t, err)
		for _, writable := range []bool{false, true} {
			_, err = m.Export(writable)
			require.NoError(t, err)
		}
		require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Host: make([]byte, 2<<20)}}))
		require.NoError(t, m.Free())
	}
	cycle()
	before := cost(t)
	for range 200 {
		cycle()
	}
	after := cost(t)
	require.Equal(t, before.descriptors, after.descriptors)
	require.Equal(t, before.mappings, after.mappings)
	require.Equal(t, before.goroutines, after.goroutines)
}

type costs struct {
	goroutines, descriptors, mappings int
	resident, virtual                 int64 // bytes
}

func cost(t *testing.T) (c costs) {
	runtime.GC()
	c.goroutines = runtime.NumGoroutine()
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	c.descriptors = len(fds)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	c.mappings = strings.Count(string(maps), "memfd:gaiafs")
	statm, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	_, err = fmt.Sscan(string(statm), &c.virtual, &c.resident)
	require.NoError(t, err)
	c.virtual *= int64(os.Getpagesize())
	c.resident *= int64(os.Getpagesize())
	return c
}

// TestExportsAreSealed tries what an importer could do to make the daemon's loads fail, and what it may do.
func TestExportsAreSealed(t *testing.T) {
	d := open(t, emulated.Options{Memory: 1 << 30})
	m := alloc(t, d, 2<<20)
	rw, err := m.Export(true)
	require.NoError(t, err)
	ro, err := m.Export(false)
	require.NoError(t, err)
	for _, size := range []int64{0, page.Size, 4 << 20} {
		require.ErrorIs(t, unix.Ftruncate(int(rw.Fd()), size), unix.EPERM, "truncate to %d", size)
	}
	require.ErrorIs(t, unix.Fallocate(int(rw.Fd()), 0, 0, 4<<20), unix.EPERM, "grow")
	require.ErrorIs(t, unix.Fchmod(int(rw.Fd()), 0o700), unix.EPERM, "it cannot be made executable (Linux 6.3 and later)")
	_, err = unix.FcntlInt(rw.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, unix.EPERM, "no further seals")

	fill := bytes.Repeat([]byte{1}, 2<<20)
	require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Host: fill}}))
	_, err = unix.Pwrite(int(ro.Fd()), []byte{2}, 0)
	require.ErrorIs(t, err, unix.EBADF)
	require.ErrorIs(t, unix.Fallocate(int(ro.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page.Size),
		unix.EBADF)
	_, err = unix.Mmap(int(ro.Fd()), 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.ErrorIs(t, err, unix.EACCES)

	// A hole is like a store of zeros.
	require.NoError(t, unix.Fallocate(int(rw.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page.Size))
	clear(fill[:page.Size])
	got := make([]byte, len(fill))
	require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Host: got}}))
	require.True(t, bytes.Equal(fill, got))
}

// TestAnotherUserCannotReopen has processes open a read-only export again through /proc.
func TestAnotherUserCannotReopen(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("starting a process as another user needs root")
	}
	d := open(t, emulated.Options{Memory: 1 << 30})
	ro, err := alloc(t, d, 2<<20).Export(false)
	require.NoError(t, err)
	reopen := func(uid uint32) error {
		c := exec.Command("/bin/sh", "-c", "exec 4<>/proc/self/fd/3")
		c.Dir = "/"
		c.ExtraFiles = []*os.File{ro}
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		return c.Run()
	}
	require.NoError(t, reopen(0), "the daemon's own user can: the limit that the package comment names")
	var refused *exec.ExitError
	require.ErrorAs(t, reopen(65534), &refused)
}

func TestPoison(t *testing.T) {
	d := open(t, emulated.Options{Memory: 1 << 30, Poison: true})
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	require.False(t, m.Zeroed())
	got := make([]byte, 2<<20)
	require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Host: got}}))
	require.Equal(t, bytes.Repeat([]byte{0xa5}, len(got)), got)

	rw, err := m.Export(true)
	require.NoError(t, err)
	view, err := unix.Mmap(int(rw.Fd()), 0, 2<<20, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, m.Free())
	require.Equal(t, bytes.Repeat([]byte{0xdb}, len(got)), append([]byte{}, view...),
		"an importer that is late sees it")
	require.NoError(t, unix.Munmap(view))

	for _, n := range []int{5000, 20 << 20} { // kept for the next caller, and not
		buf, giveBack, err := d.HostBuffer(n)
		require.NoError(t, err)
		copy(buf, "used")
		giveBack()
		require.True(t, bytes.Equal(bytes.Repeat([]byte{0xc3}, n), buf), "%d bytes", n)
	}
}

// TestHostOutOfDescriptors: if the host has no descriptor left, Alloc fails as if it had no memory.
func TestHostOutOfDescriptors(t *testing.T) {
	d := open(t, emulated.Options{Memory: 1 << 30})
	m := alloc(t, d, 2<<20)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}))
	_, allocErr := d.Alloc(2 << 20)
	_, exportErr := m.Export(false)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.ErrorIs(t, allocErr, gpubackend.ErrNoMemory)
	require.ErrorIs(t, exportErr, gpubackend.ErrNoMemory)
	require.Equal(t, int64(2<<20), d.Used(), "the budget is whole again")
	_, err := m.Export(false)
	require.NoError(t, err, "a failed export is tried again")
}
