package fs

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

func init() {
	// "store into pages": for each line of input, it stores into every n-th page of a mapped file, writes that home,
	// and prints how long the latter took, in nanoseconds.
	programs["store into pages"] = func(args []string) error {
		stride, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		memory, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			for at := 0; at < len(memory); at += stride * page.Size {
				memory[at]++
			}
			start := time.Now()
			if err := unix.Msync(memory, unix.MS_SYNC); err != nil {
				return err
			}
			fmt.Println(time.Since(start).Nanoseconds())
		}
		return unix.Munmap(memory)
	}
}

// BenchmarkMappedWriteBack makes a program store into 8,192 mapped pages and write them home by msync, while no device
// holds the file, and while one has it mapped for writing. The pages are consecutive, which the kernel sends in large
// requests, or every other page, each of which is a request. The device acquires in between, so that every page's base
// is kept again. The benchmark reports the time of msync for each page.
func BenchmarkMappedWriteBack(b *testing.B) {
	const pages = 8192
	for _, mapped := range []bool{false, true} {
		for stride := 1; stride <= 2; stride++ {
			size := int64(pages * stride * page.Size)
			b.Run(fmt.Sprintf("device=%v/every=%d", mapped, stride), func(b *testing.B) {
				d, err := emulated.New(emulated.Options{Memory: 2 * size})
				require.NoError(b, err)
				cache, err := pagecache.New(pagecache.Options{Devices: []gpubackend.Device{d}})
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, cache.Close(context.Background())) })
				n := &notary{socket: "/s"}
				s := mount(b, func(o *Options) { o.Cache, o.Granter = cache, n })
				writeNoise(b, filepath.Join(s.source, "f"), size)
				path := filepath.Join(s.mnt, "f")
				f, err := os.Open(path)
				require.NoError(b, err)
				if mapped {
					f.Close()
					f, err = os.OpenFile(path, os.O_RDWR, 0)
					require.NoError(b, err)
					require.NoError(b, askGrant(f, make([]byte, GrantSize)))
				}
				acquire := func() {}
				if mapped {
					m, err := cache.Map(context.Background(), n.last(), pagecache.MapRequest{Len: size, Writable: true})
					require.NoError(b, err)
					b.Cleanup(func() { require.NoError(b, m.Unmap(context.Background())) })
					acquire = func() {
						_, err := m.Acquire(context.Background(), 0, size, false)
						require.NoError(b, err)
					}
				}
				require.NoError(b, f.Close())
				cmd := program("store into pages", path, strconv.Itoa(stride))
				cmd.Stderr = os.Stderr
				in, err := cmd.StdinPipe()
				require.NoError(b, err)
				out, err := cmd.StdoutPipe()
				require.NoError(b, err)
				require.NoError(b, cmd.Start())
				answers := bufio.NewScanner(out)
				took := int64(0)
				turn := func() int64 {
					_, err := io.WriteString(in, "\n")
					require.NoError(b, err)
					require.True(b, answers.Scan())
					ns, err := strconv.ParseInt(answers.Text(), 10, 64)
					require.NoError(b, err)
					return ns
				}
				turn() // faults the pages in
				for b.Loop() {
					acquire()
					took += turn()
				}
				b.ReportMetric(float64(took)/float64(b.N)/pages, "ns/page")
				require.NoError(b, in.Close())
				require.NoError(b, cmd.Wait())
			})
		}
	}
}
