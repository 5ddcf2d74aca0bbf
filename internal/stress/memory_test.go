package stress

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestHostMemory has programs do what makes a daemon grow, and compares its memory with its setting. With
// -stress.memory the workloads are those of bench/results/2026-11-22-daemon-memory.md, which has the table that it
// prints; otherwise they are smaller, and so is the setting.
func TestHostMemory(t *testing.T) {
	const mib, extent = 1 << 20, 2 << 20
	setting, scale := int64(2*mib), 1
	if *hostile {
		setting, scale = 64*mib, 8
	}
	testdevice.Emulated(t, "programs store into the memory by its descriptor")
	var table strings.Builder
	for _, w := range []struct {
		name    string
		devices int
		memory  int64 // of each device; 0 stands for 128 MiB, or 1 GiB
		beside  int64 // what more may be taken
		run     func(*besieged)
	}{
		{name: "punch under a mapping", run: func(b *besieged) { b.punch(64 * scale) }},
		{name: "rewrite by mmap", run: func(b *besieged) { b.rewrite(96 * scale) }},
		{name: "rewrite by write, 4 KiB in random order", run: func(b *besieged) { b.writeRandom(64 * scale) }},
		{name: "copy_file_range over a mapping", run: func(b *besieged) { b.copyRange(64 * scale) }},
		{name: "two devices write every page", devices: 2, run: func(b *besieged) { b.collide(48 * scale) }},
		{name: "ftruncate of a lazy mapping of 1 TiB, up and down", memory: 2 << 40, beside: 1 << 40 / extent * 128,
			run: (*besieged).resize},
		{name: "every other page written and released", run: func(b *besieged) { b.alternate(64*scale, 4) }},
		{name: "SEEK_DATA over what was released", run: func(b *besieged) { b.seek(64 * scale) }},
		{name: "files of a page, mapped and unmapped", run: func(b *besieged) { b.manyFiles(2000 + 14000*(scale-1)) }},
		{name: "mappings of one file", run: func(b *besieged) { b.manyMappings(1500 * scale) }},
		{name: "clients that read no answers", run: func(b *besieged) { b.unread(25 * scale) }},
		{name: "O_DIRECT writes beside stores by mmap", run: func(b *besieged) { b.suspects(16*scale, 4) }},
	} {
		t.Run(w.name, func(t *testing.T) {
			memory := w.memory
			if memory == 0 {
				memory = 128 * int64(scale) * mib
			}
			m := testmount.Start(t, testmount.Options{Devices: w.devices, Memory: memory, HostMemory: setting,
				WriteBackInterval: 10 * time.Second})
			b := &besieged{T: t, m: m}
			idle := measure(t, m).residentBytes
			peak, began := b.peakOf(func() { w.run(b) }, "RssAnon")-idle, time.Since(b.began)
			fmt.Fprintf(&table, "| %-50s | %4d | %4d | %5.1f |\n", w.name, setting/mib, peak/mib, began.Seconds())
			require.Less(t, peak, setting+setting/2+hostMemoryBeside+w.beside)
			if b.check != nil {
				b.check()
			}
		})
	}
	t.Logf("MiB that the daemon took above what it takes when idle, beside the setting, and seconds:\n%s",
		table.String())
}

// hostMemoryBeside is what a daemon may take besides its setting and half of that: buffers of requests under way, and
// garbage of Go.
const hostMemoryBeside = 64 << 20

// besieged is a daemon whose memory is looked at.
type besieged struct {
	*testing.T
	m     *testmount.Mount
	began time.Time
	check func() // that no byte was lost
}

// peakOf returns the most memory of some kinds of the daemon that was seen while a workload ran. That of emulated
// devices is RssShmem.
func (b *besieged) peakOf(workload func(), kinds ...string) (peak int64) {
	stop := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		path := fmt.Sprintf("/proc/%d/status", b.m.Process.Pid)
		for {
			text, err := os.ReadFile(path)
			if err != nil {
				return
			}
			now := int64(0)
			for _, kind := range kinds {
				if _, rest, ok := strings.Cut(string(text), kind+":"); ok {
					kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
					now += kib << 10
				}
			}
			peak = max(peak, now)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	b.began = time.Now()
	workload()
	close(stop)
	looking.Wait()
	return peak
}

// file makes a file of so many MiB in SOURCE, of bytes that are not zeros, and returns them.
func (b *besieged) file(mib int) []byte {
	b.Helper()
	content := make([]byte, mib<<20)
	random := rand.NewChaCha8([32]byte{byte(mib)})
	_, _ = random.Read(content)
	require.NoError(b, os.WriteFile(filepath.Join(b.m.Source, "file"), content, 0o600))
	return content
}

func (b *besieged) open() *os.File {
	b.Helper()
	f, err := os.OpenFile(b.m.Path("file"), os.O_RDWR, 0)
	require.NoError(b, err)
	b.Cleanup(func() { f.Close() })
	return f
}

// stored has a program of a device store a byte into every stride-th page of a mapping without a release.
func (b *besieged) stored(m *gaiafs.Mapping, content []byte, stride int) {
	p := m.Bytes()
	for at := 7; at < len(content); at += stride << 12 {
		p[at]++
		content[at]++
	}
}

// same has what the device stored released and compares the file.
func (b *besieged) same(m *gaiafs.Mapping, content []byte) {
	b.check = func() {
		_, err := m.Acquire(0, m.Len())
		require.NoError(b, err)
		require.True(b, bytes.Equal(content, m.Bytes()), "on the device")
		_, err = m.Release(0, m.Len())
		require.NoError(b, err)
		got, err := os.ReadFile(b.m.Path("file"))
		require.NoError(b, err)
		requireBytes(b.T, content, got, "on the mount")
	}
}

func (b *besieged) punch(mib int) {
	content := b.file(mib)
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	before := bytes.Clone(content)
	b.stored(m, content, 3)
	f := b.open()
	require.NoError(b, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 100,
		int64(len(content))-300))
	for at := 100; at < len(content)-200; at++ {
		if content[at] == before[at] {
			content[at] = 0
		}
	}
	b.same(m, content)
}

func (b *besieged) rewrite(mib int) {
	content := b.file(mib)
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	b.stored(m, content, 5)
	f := b.open()
	mapped, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(b, err)
	defer func() { require.NoError(b, unix.Munmap(mapped)) }()
	for at := range content {
		if at%(5<<12) != 7 {
			mapped[at] ^= 0x55
			content[at] ^= 0x55
		}
	}
	require.NoError(b, unix.Msync(mapped, unix.MS_SYNC))
	b.same(m, content)
}

func (b *besieged) writeRandom(mib int) {
	content := b.file(mib)
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	b.stored(m, content, 5)
	f := b.open()
	for _, p := range rand.Perm(len(content) >> 12) {
		at := p<<12 + 8
		for i := range 4080 {
			content[at+i] ^= 0x55
		}
		_, err := f.WriteAt(content[at:at+4080], int64(at))
		require.NoError(b, err)
	}
	b.same(m, content)
}

func (b *besieged) copyRange(mib int) {
	content := b.file(mib)
	other := bytes.Clone(content)
	for i := range other {
		other[i] ^= 0x55
	}
	require.NoError(b, os.WriteFile(filepath.Join(b.m.Source, "other"), other, 0o600))
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	before := bytes.Clone(content)
	b.stored(m, content, 3)
	for at, c := range content {
		if c != before[at] {
			other[at] = c
		}
	}
	from, err := os.Open(b.m.Path("other"))
	require.NoError(b, err)
	defer from.Close()
	f := b.open()
	for at := int64(0); at < int64(len(content)); {
		in, out := at, at
		n, err := unix.CopyFileRange(int(from.Fd()), &in, int(f.Fd()), &out, len(content)-int(at), 0)
		require.NoError(b, err)
		at += int64(n)
	}
	b.same(m, other)
}

func (b *besieged) collide(mib int) {
	content := b.file(mib)
	m, n := gpu(b, b.m.Path("file"), int64(len(content)), 0), gpu(b, b.m.Path("file"), int64(len(content)), 1)
	b.stored(m, content, 1)
	p := n.Bytes()
	for at := 99; at < len(content); at += 1 << 12 {
		p[at]++
		content[at]++
	}
	for _, x := range []*gaiafs.Mapping{m, n} {
		_, err := x.Release(0, x.Len())
		require.NoError(b, err)
	}
	require.NoError(b, b.open().Sync())
	b.same(m, content)
}

func (b *besieged) resize() {
	const most = 1 << 40
	b.file(1)
	f := b.open()
	require.NoError(b, f.Truncate(most))
	m, err := gaiafs.Map(f, 0, most, gaiafs.ProtRead|gaiafs.ProtWrite, 0, gaiafs.Lazy())
	require.NoError(b, err)
	b.Cleanup(func() { m.Close() })
	for at := int64(0); at < most; at += most / 64 {
		_, err := m.Acquire(at, 1<<20)
		require.NoError(b, err)
	}
	all := b.peakOf(func() {
		for _, size := range []int64{1 << 20, most, 12345, most / 2, most, 1 << 20} {
			require.NoError(b, f.Truncate(size))
		}
	}, "RssAnon", "RssShmem")
	require.Less(b, all, int64(512<<20), "64 MiB are held on the device")
}

func (b *besieged) alternate(mib, rounds int) {
	content := b.file(mib)
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	for round := range rounds {
		b.stored(m, content, 2+round)
		_, err := m.Release(0, m.Len())
		require.NoError(b, err)
	}
	b.same(m, content)
}

func (b *besieged) seek(mib int) {
	content := b.file(mib)
	m := gpu(b, b.m.Path("file"), int64(len(content)), 0)
	b.stored(m, content, 2)
	_, err := m.Release(0, m.Len())
	require.NoError(b, err)
	_, err = b.open().Seek(0, unix.SEEK_DATA)
	require.NoError(b, err)
	b.same(m, content)
}
