package conformance

import (
	"bytes"
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// lockFile writes a file and maps it for reading, with its pages locked. unlock ends both.
func (f *fixture) lockFile(bytes []byte) (file *os.File, mem []byte, unlock func()) {
	f.Helper()
	file, err := os.Create(filepath.Join(f.TempDir(), "locked"))
	require.NoError(f, err)
	f.Cleanup(func() { file.Close() })
	_, err = file.Write(bytes)
	require.NoError(f, err)
	mem, err = unix.Mmap(int(file.Fd()), 0, len(bytes), unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(f, err)
	free, err := f.dev.LockHost(mem)
	require.NoError(f, err)
	return file, mem, func() {
		require.NoError(f, free())
		require.NoError(f, unix.Munmap(mem))
	}
}

// testLockHost copies from locked pages of a file: whole, in small pieces, in rows, and beside other memory. Then the
// file becomes shorter: nobody may be ended by that, and the copies either have the earlier bytes or fail.
func testLockHost(f *fixture) {
	const size = 8 << 20
	want := f.random(size)
	file, mem, unlock := f.lockFile(want)
	m := f.alloc(size)
	require.NoError(f, f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: m, Host: mem}}))
	require.True(f, bytes.Equal(want, f.read(m, 0, size)))

	changed := f.random(4096)
	_, err := file.WriteAt(changed, 12345)
	require.NoError(f, err)
	copy(want[12345:], changed)
	pieces := func() (list []gpubackend.Copy) {
		at := int64(0)
		for _, n := range []int64{1, 15, 4096, 100, 64 << 10, 1 << 20, 8192, 3, 2 << 20, 4096, 4096} {
			list = append(list, gpubackend.Copy{Mem: m, Off: at, Host: mem[at:][:n]})
			at += n
		}
		list = append(list, gpubackend.Copy{Mem: m, Off: at, Host: mem[at:][:999<<10+512], Row: 512, Stride: 1 << 10})
		return append(list, gpubackend.Copy{Mem: m, Off: size - 4096, Host: changed})
	}
	model := func() []byte {
		b := bytes.Clone(want)
		clear(b)
		for _, c := range pieces() {
			for off, row := range c.Rows() {
				copy(b[off:], row)
			}
		}
		return b
	}
	expected := model()
	require.NoError(f, f.dev.Zero(f.ctx, m, 0, size))
	require.NoError(f, f.dev.CopyIn(f.ctx, pieces()))
	require.True(f, bytes.Equal(expected, f.read(m, 0, size)))

	require.NoError(f, file.Truncate(4096))
	for range 3 {
		for _, list := range [][]gpubackend.Copy{pieces(), pieces()[:1], pieces()[2:3], pieces()[9:10],
			pieces()[4:5], {{Mem: m, Host: mem}}} {
			if err := f.dev.CopyIn(f.ctx, list); err != nil {
				require.ErrorIs(f, err, gpubackend.ErrHostGone)
			}
		}
	}
	unlock()

	_, err = f.dev.LockHost(nil)
	require.ErrorIs(f, err, gpubackend.ErrRange)
	_, mem, unlock = f.lockFile(want)
	require.ErrorIs(f, f.dev.Close(), gpubackend.ErrInUse, "memory is locked")
	require.True(f, bytes.Equal(want, mem))
	unlock()
}
