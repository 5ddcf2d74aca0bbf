package fs

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// eventWork is what BenchmarkEvents measures. Each entry is a block of operations on a directory that holds the files
// f0, f1 and so on. f0 is open as fd.
var eventWork = map[string]func(dir string, fd, n int) error{
	"write-4k": func(_ string, fd, n int) error {
		buf := make([]byte, 4096)
		for i := range n {
			if _, err := unix.Pwrite(fd, buf, int64(i%256)*4096); err != nil {
				return err
			}
		}
		return nil
	},
	"open-close": func(dir string, _, n int) error {
		for i := range n {
			fd, err := unix.Open(filepath.Join(dir, "f"+strconv.Itoa(i%100)), unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		return nil
	},
	"open-close-watched": func(dir string, _, n int) error {
		for range n {
			fd, err := unix.Open(filepath.Join(dir, "f0"), unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		return nil
	},
}

func init() {
	// "events bench" takes the work, the number of blocks, the operations of a block, and two directories that take
	// turns.
	programs["events bench"] = func(args []string) error {
		blocks, _ := strconv.Atoi(args[1])
		n, _ := strconv.Atoi(args[2])
		dirs := args[3:]
		var fds []int
		for _, dir := range dirs {
			fd, err := unix.Open(filepath.Join(dir, "f0"), unix.O_RDWR, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		fmt.Println("open")
		if _, err := fmt.Scanln(new(string)); err != nil { // wait until the files are watched
			return err
		}
		took := make([][]float64, len(dirs))
		for b := range 2 * blocks {
			i := (b + b/2) % 2 // 0 1 1 0: drift costs both the same
			start := time.Now()
			if err := eventWork[args[0]](dirs[i], fds[i], n); err != nil {
				return err
			}
			took[i] = append(took[i], float64(time.Since(start).Nanoseconds())/float64(n))
		}
		return json.NewEncoder(os.Stdout).Encode(took)
	}
}

// BenchmarkEvents compares a mount with fanotify and a mount without events. A program works on the two mounts in
// turns, in blocks. The benchmark reports the median and the middle half of the ratios of the pairs of blocks, and the
// fastest blocks.
func BenchmarkEvents(b *testing.B) {
	for _, work := range []string{"write-4k", "open-close", "open-close-watched"} {
		b.Run(work, func(b *testing.B) {
			var dirs []string
			var on *scene
			for _, kind := range []string{EventsOff, EventsFanotify} {
				s := mount(b, withEvents(kind))
				if s.Events() != kind {
					b.Skip("there is no fanotify")
				}
				for i := range 100 {
					require.NoError(b, os.WriteFile(filepath.Join(s.source, fmt.Sprint("f", i)), make([]byte, 1<<20),
						0o600))
				}
				dirs, on = append(dirs, s.mnt), s
			}
			var ratios []float64
			fastest := []float64{1e18, 1e18}
			for b.Loop() {
				var took [][]float64
				p := program("events bench", work, "100", "300", dirs[0], dirs[1])
				in, err := p.StdinPipe()
				require.NoError(b, err)
				out, err := p.StdoutPipe()
				require.NoError(b, err)
				require.NoError(b, p.Start())
				_, err = fmt.Fscanln(out, new(string))
				require.NoError(b, err)
				_, of := on.waitWatched(b, "f0")
				of.mu.RUnlock()
				_, err = fmt.Fprintln(in, "go")
				require.NoError(b, err)
				require.NoError(b, json.NewDecoder(out).Decode(&took))
				require.NoError(b, p.Wait())
				for i := range took[0] {
					ratios = append(ratios, took[1][i]/took[0][i])
				}
				for i, list := range took {
					fastest[i] = min(fastest[i], slices.Min(list))
				}
			}
			slices.Sort(ratios)
			at := func(part int) float64 { return ratios[len(ratios)*part/4] }
			b.ReportMetric(at(1), "ratio-25%")
			b.ReportMetric(at(2), "ratio-50%")
			b.ReportMetric(at(3), "ratio-75%")
			b.ReportMetric(fastest[0], "ns/fastest-off")
			b.ReportMetric(fastest[1], "ns/fastest-on")
		})
	}
}
