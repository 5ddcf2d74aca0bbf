package stress

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestSurpassedInSource makes a file longer through the mount right after somebody did in SOURCE, and before anybody
// looked. The kernel has the page of the former end, stored into and not.
func TestSurpassedInSource(t *testing.T) {
	const first = "the beginning"
	added := strings.Repeat("x", 5000)
	end := int64(len(first) + len(added))
	put := func(want []byte, off int64, p string) []byte {
		want = append(want, make([]byte, max(0, int(off)+len(p)-len(want)))...)
		copy(want[off:], p)
		return want
	}
	bothModes(t, func(t *testing.T, o testmount.Options) {
		if o.WriteBack {
			t.Skip("the kernel keeps its own size, see docs/write-back.md")
		}
		m := testmount.Start(t, o)
		for name, grow := range map[string]func(b beside, f *os.File, want []byte) ([]byte, error){
			"write": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				_, err := f.WriteAt([]byte("more"), end+100)
				return put(want, end+100, "more"), err
			},
			"write inside": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				_, err := f.WriteAt([]byte("more"), 4100)
				return put(want, 4100, "more"), err
			},
			"write to the page": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				_, err := f.WriteAt([]byte("more"), 1000)
				return put(want, 1000, "more"), err
			},
			"direct": func(b beside, _ *os.File, want []byte) ([]byte, error) {
				f, err := os.OpenFile(b.path(), os.O_RDWR|unix.O_DIRECT, 0)
				require.NoError(t, err)
				defer f.Close()
				_, err = f.WriteAt([]byte("more"), end+100)
				return put(want, end+100, "more"), err
			},
			"append": func(b beside, _ *os.File, want []byte) ([]byte, error) {
				f, err := os.OpenFile(b.path(), os.O_WRONLY|os.O_APPEND, 0)
				require.NoError(t, err)
				b.appendInSource("y")
				defer f.Close()
				_, err = f.WriteString("more")
				return put(want, end, "ymore"), err
			},
			"truncate": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				return put(want, end+3000, ""), f.Truncate(end + 3000)
			},
			"truncate inside": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				return want[:4000], f.Truncate(4000)
			},
			"allocate": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				return put(want, end+3000, ""), unix.Fallocate(int(f.Fd()), 0, 0, end+3000)
			},
			"copy": func(_ beside, f *os.File, want []byte) ([]byte, error) {
				from, to := int64(0), end+200
				_, err := unix.CopyFileRange(int(f.Fd()), &from, int(f.Fd()), &to, 3, 0)
				return put(want, end+200, string(want[:3])), err
			},
		} {
			for _, dirty := range []bool{false, true} {
				b := newBeside(t, m, fmt.Sprint(name, dirty), []byte(first))
				f := b.open()
				p, err := unix.Mmap(int(f.Fd()), 0, 4*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				require.NoError(t, err)
				require.Equal(t, first, string(p[:len(first)]))
				want := []byte(first)
				if dirty {
					p[0], want[0] = 'T', 'T'
				}
				b.appendInSource(added)
				want, err = grow(b, f, append(want, added...))
				require.NoError(t, err, name)
				what := fmt.Sprintf("%s, dirty %v: ", name, dirty)
				got := make([]byte, len(want))
				n, _ := f.ReadAt(got, 0)
				requireBytes(t, want[:n], got[:n], what+"read")
				eventually(t, func() error {
					if st, err := f.Stat(); err != nil || st.Size() != int64(len(want)) {
						return fmt.Errorf("the size is %d: %w", st.Size(), err)
					}
					return nil
				})
				requireBytes(t, want, bytes.Clone(p[:len(want)]), what+"mapped")
				p[1], want[1] = 'H', 'H'
				require.NoError(t, unix.Msync(p, unix.MS_SYNC))
				requireBytes(t, want, mustRead(t, b.source()), what+"in SOURCE, after a store")
				requireBytes(t, want, mustRead(t, b.path()), what+"for who opens it")
				require.NoError(t, unix.Munmap(p))
			}
		}
	})
}

// appendInSource appends in SOURCE.
func (b beside) appendInSource(p string) {
	b.t.Helper()
	f, err := os.OpenFile(b.source(), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(b.t, err)
	_, err = f.WriteString(p)
	require.NoError(b.t, err)
	require.NoError(b.t, f.Close())
}
