package fs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// flagged is the file of a program that changes the flags of its open. want is its expected content.
type flagged struct {
	f    *os.File
	m    []byte   // a mapping of the first page of f
	side *os.File // an open without flags, or nil
	want []byte
}

// flags sets and clears flags of the open.
func (p *flagged) flags(set, clear int) error {
	flags, err := unix.FcntlInt(p.f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(p.f.Fd(), unix.F_SETFL, flags&^clear|set)
	}
	return err
}

// pwrite writes b at off. The bytes must arrive at at.
func (p *flagged) pwrite(b []byte, off, at int) error {
	if n, err := unix.Pwrite(int(p.f.Fd()), b, int64(off)); n != len(b) || err != nil {
		return fmt.Errorf("pwrite of %d bytes at %d: %d, %w", len(b), off, n, err)
	}
	p.want = append(p.want, make([]byte, max(0, at+len(b)-len(p.want)))...)
	copy(p.want[at:], b)
	return p.check(fmt.Sprintf("%d bytes were written at %d", len(b), off))
}

// store stores b through the mapping.
func (p *flagged) store(b []byte, at int) error {
	copy(p.m[at:], b)
	copy(p.want[at:], b)
	return p.check("a store")
}

// check compares the file with want through the mapping and all opens.
func (p *flagged) check(after string) error {
	if !bytes.Equal(p.m, p.want[:page.Size]) {
		return fmt.Errorf("after %s, the mapping begins with %q, not %q", after, p.m[:20], p.want[:20])
	}
	for name, f := range map[string]*os.File{"the open": p.f, "the other open": p.side} {
		if f == nil {
			continue
		}
		got := aligned(4 * page.Size)
		n, err := unix.Pread(int(f.Fd()), got, 0)
		if err != nil {
			return fmt.Errorf("after %s, reading %s: %w", after, name, err)
		}
		if !bytes.Equal(got[:n], p.want) {
			return fmt.Errorf("after %s, %s has %d bytes that begin with %q, not %d that begin with %q",
				after, name, n, got[:20], len(p.want), p.want[:20])
		}
	}
	return nil
}

// aligned returns n bytes at a page-aligned address.
func aligned(n int) []byte {
	b := make([]byte, n+page.Size)
	skip := -uintptr(unsafe.Pointer(&b[0])) % page.Size
	return b[skip:][:n:n]
}

func init() {
	// "set flags" opens the file args[0] with a flag, or sets the flag later, and clears it again. args[1] says whether
	// another open exists all the time.
	programs["set flags"] = func(args []string) error {
		for i, flag := range []int{unix.O_APPEND, unix.O_DIRECT, unix.O_APPEND, unix.O_DIRECT} {
			with, then := flag, 0
			if i >= 2 {
				with, then = 0, flag
			}
			p := flagged{want: bytes.Repeat([]byte("."), 2*page.Size)}
			if err := os.WriteFile(args[0], p.want, 0600); err != nil {
				return err
			}
			var err error
			if args[1] == "beside" {
				if p.side, err = os.OpenFile(args[0], os.O_RDWR, 0); err != nil {
					return err
				}
			}
			if p.f, err = os.OpenFile(args[0], os.O_RDWR|with, 0); err != nil {
				return err
			}
			if p.m, err = unix.Mmap(int(p.f.Fd()), 0, page.Size, unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_SHARED); err != nil {
				return err
			}
			if err := p.flags(then, 0); err != nil {
				return err
			}
			block := aligned(page.Size)
			copy(block, bytes.Repeat([]byte("block"), page.Size))
			steps := []func() error{
				func() error { return p.pwrite(block, page.Size, len(p.want)) }, // appended
				func() error { return p.flags(0, flag) },
				func() error { return p.pwrite([]byte("AB"), 2, 2) },
				func() error { return p.store([]byte("stored"), 7) },
				func() error { return p.flags(flag, 0) },
				func() error { return p.store([]byte("again"), 3) },
				func() error { return p.pwrite(block, 0, len(p.want)) },
			}
			if flag == unix.O_DIRECT {
				steps[0] = func() error { return p.pwrite(block, page.Size, page.Size) }
				steps[6] = func() error { return p.pwrite(block, 0, 0) }
			}
			for i, step := range steps {
				if err := step(); err != nil {
					return fmt.Errorf("flags %#x and then %#x, step %d: %w", with, then, i, err)
				}
			}
			if err := unix.Munmap(p.m); err != nil {
				return err
			}
			for _, f := range []*os.File{p.side, p.f} {
				if f == nil {
					continue
				}
				if err := f.Close(); err != nil {
					return err
				}
			}
			if got, err := os.ReadFile(args[0]); err != nil || !bytes.Equal(got, p.want) {
				return fmt.Errorf("flags %#x and then %#x: the file has %d bytes, not the %d expected: %w", with, then,
					len(got), len(p.want), err)
			}
		}
		return nil
	}
}

// TestFlagsOfAnOpenChange makes a program set and clear O_APPEND and O_DIRECT of its open, and write, read and map.
func TestFlagsOfAnOpenChange(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		for _, how := range []string{"alone", "beside"} {
			t.Run(how, func(t *testing.T) {
				run(t, program("set flags", filepath.Join(s.mnt, how), how))
			})
		}
	})
}

// TestSynchronousOpensReachTheDisk: a write is durable if the open or the write asks for it, whether the daemon or the
// kernel carries it out.
func TestSynchronousOpensReachTheDisk(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		for i, flags := range []int{0, unix.O_SYNC, unix.O_DSYNC, unix.O_APPEND, unix.O_APPEND | unix.O_SYNC,
			unix.O_APPEND | unix.O_DSYNC,
			unix.O_DIRECT | unix.O_SYNC, unix.O_DIRECT | unix.O_DSYNC} {
			name := fmt.Sprint("f", i)
			f, err := os.OpenFile(filepath.Join(s.mnt, name), os.O_CREATE|os.O_RDWR|flags, 0600)
			require.NoError(t, err)
			defer f.Close()
			with := 0
			if flags&unix.O_DSYNC == 0 { // O_SYNC contains it
				with = unix.RWF_DSYNC
			}
			_, err = unix.Pwritev2(int(f.Fd()), [][]byte{aligned(page.Size)}, 0, with)
			require.NoError(t, err)
			home, err := os.Open(filepath.Join(s.source, name))
			require.NoError(t, err)
			defer home.Close()
			var pages unix.Cachestat_t
			require.NoError(t, unix.Cachestat(uint(home.Fd()), &unix.CachestatRange{}, &pages, 0))
			assert.Zero(t, pages.Dirty+pages.Writeback, "flags %#x", flags)
			st, err := home.Stat()
			require.NoError(t, err)
			assert.EqualValues(t, page.Size, st.Size())
		}
	})
}

// TestDirectOpenWhereThereIsNone: SOURCE's filesystem refuses O_DIRECT. The daemon can serve such an open, unless the
// file already passes through.
func TestDirectOpenWhereThereIsNone(t *testing.T) {
	requireRoot(t)
	s := mountThrough(t, func(o *Options) {
		require.NoError(t, unix.Mount("ramfs", o.Source, "ramfs", 0, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(o.Source, 0)) })
	})
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("content"), 0600))
	_, err := os.OpenFile(filepath.Join(s.source, "f"), os.O_RDWR|unix.O_DIRECT, 0)
	require.ErrorIs(t, err, unix.EINVAL)
	require.Eventually(t, func() bool { through, _ := opens(t, s, path); return through == 0 }, eventually, tick)

	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	require.NoError(t, err, "served by the daemon")
	through, others := opens(t, s, path)
	assert.Equal(t, []int{0, 1}, []int{through, others})
	got := make([]byte, 7)
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, "content", string(got))
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { _, others := opens(t, s, path); return others == 0 }, eventually, tick)

	f, err = os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	through, _ = opens(t, s, path)
	require.Equal(t, 1, through)
	_, err = os.OpenFile(path, os.O_RDWR|os.O_TRUNC|unix.O_DIRECT, 0)
	assert.ErrorIs(t, err, unix.EINVAL)
	got, err = os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "content", string(got), "an open that is refused truncates nothing")
	through, others = opens(t, s, path)
	assert.LessOrEqual(t, through, 2)
	assert.Zero(t, others)

	created, err := os.OpenFile(filepath.Join(s.mnt, "new"), os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0600)
	require.NoError(t, err)
	require.NoError(t, created.Close())
}
