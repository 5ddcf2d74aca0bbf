package stress

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// Workloads of TestHostMemory that are many small things, or a client that does not do its part.

// manyFiles has files of a page opened, mapped, stored into and unmapped one after another.
func (b *besieged) manyFiles(n int) {
	dir := filepath.Join(b.m.Source, "many")
	require.NoError(b, os.Mkdir(dir, 0o755))
	for i := range n {
		require.NoError(b, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), make([]byte, 4096), 0o600))
	}
	path := func(i int) string { return b.m.Path(filepath.Join("many", fmt.Sprint(i))) }
	var workers sync.WaitGroup
	const at = 8 // at once
	for w := range at {
		workers.Go(func() {
			for i := w; i < n; i += at {
				m, err := mapFile(path(i), 4096)
				if err != nil {
					b.Errorf("file %d: %v", i, err)
					return
				}
				m.Bytes()[i%4096] = 'x'
				if err := m.Close(); err != nil {
					b.Errorf("file %d: %v", i, err)
				}
			}
		})
	}
	workers.Wait()
	b.check = func() {
		for i := 0; i < n; i += max(n/1000, 1) {
			got, err := os.ReadFile(path(i))
			require.NoError(b, err)
			require.Equal(b, byte('x'), got[i%4096], i)
		}
	}
}

func mapFile(path string, n int64) (*gaiafs.Mapping, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return gaiafs.Map(f, 0, n, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
}

// manyMappings has one program map the same file many times.
func (b *besieged) manyMappings(n int) {
	b.file(1)
	all := make([]*gaiafs.Mapping, n)
	for i := range all {
		m, err := mapFile(b.m.Path("file"), 4096)
		require.NoError(b, err)
		all[i] = m
	}
	b.check = func() {
		for _, m := range all {
			require.NoError(b, m.Close())
		}
	}
}

// unread has clients ask for the status, and read nothing of the answers, until the daemon reads no more of their
// requests.
func (b *besieged) unread(clients int) {
	for i := range 40 { // so that the status is long
		m, err := mapFile(b.small(i), 4096)
		require.NoError(b, err)
		b.Cleanup(func() { m.Close() })
	}
	dir, err := os.Open(b.m.Dir)
	require.NoError(b, err)
	defer dir.Close()
	_, socket := token(b, dir)
	hello := frame(wireHello, 0, append([]byte("GAIA"), 1, 0, 1, 0))
	var all sync.WaitGroup
	for range clients {
		c := dial(b, socket)
		_, err := c.Write(hello)
		require.NoError(b, err)
		all.Go(func() {
			for id := uint64(1); ; id++ {
				if _, err := c.Write(frame(wireStatus, 2*id, make([]byte, 16))); err != nil {
					return // it was dropped, since it does not read
				}
				if _, err := c.Write(frame(wirePing, 2*id+1, nil)); err != nil {
					return
				}
			}
		})
	}
	all.Wait()
}

// small makes a file of a page in SOURCE and returns its path on the mount.
func (b *besieged) small(i int) string {
	name := fmt.Sprintf("a file with a rather long name, so that its name takes some room where it is listed %d", i)
	require.NoError(b, os.WriteFile(filepath.Join(b.m.Source, name), make([]byte, 4096), 0o600))
	return b.m.Path(name)
}

// suspects has programs write past the kernel's cache, in large pieces at once, into a file that others store into by
// mmap and that a device has: the daemon keeps what home had of pages that the kernel may fill too early.
func (b *besieged) suspects(mib, rounds int) {
	content := b.file(mib)
	gpu(b, b.m.Path("file"), int64(len(content)), 0)
	f := b.open()
	mapped, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(b, err)
	defer func() { require.NoError(b, unix.Munmap(mapped)) }()
	direct, err := os.OpenFile(b.m.Path("file"), os.O_RDWR|unix.O_DIRECT, 0)
	require.NoError(b, err)
	defer direct.Close()
	const piece = 1 << 20
	var programs sync.WaitGroup
	for w := range 16 {
		programs.Go(func() {
			buffer := make([]byte, piece+4096)
			aligned := buffer[4096-int(uintptr(unsafe.Pointer(&buffer[0]))&4095):][:piece]
			random := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds * mib / 16 {
				at := random.Int64N(int64(mib)) << 20
				if _, err := direct.WriteAt(aligned, at); err != nil {
					b.Errorf("at %d: %v", at, err)
					return
				}
			}
		})
		programs.Go(func() {
			for at := w << 12; at < len(mapped); at += 16 << 12 {
				mapped[at]++ // each page belongs to one of them
			}
		})
	}
	programs.Wait()
}
