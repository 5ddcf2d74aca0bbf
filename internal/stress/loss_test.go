package stress

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
	"github.com/gaiafs/gaiafs/pagecache"
)

func init() { programs["obedient"] = obedient }

// obedient is a GPU program that does what it is told: path, device, pages. It answers each line of its standard input
// with "done", or with the number and the text of an error.
func obedient(args []string) error {
	device, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	pages, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	f, err := os.OpenFile(args[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var m *gaiafs.Mapping
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var err error
		switch deed, argument, _ := strings.Cut(in.Text(), " "); deed {
		case "map":
			m, err = gaiafs.Map(f, 0, int64(pages)*page.Size, gaiafs.ProtRead|gaiafs.ProtWrite,
				testdevice.Number(device))
		case "store": // into the first byte of a page, 1 or what follows its number
			p, value := int64(0), byte(1)
			if n, _ := fmt.Sscan(argument, &p, &value); n == 0 {
				return fmt.Errorf("%q is no page", argument)
			}
			_, err = m.WriteAt([]byte{value}, p*page.Size)
		case "acquire":
			_, err = m.Acquire(0, m.Len())
		case "release":
			_, err = m.Release(0, m.Len())
		case "sync":
			err = m.Sync(0, m.Len())
		case "unmap":
			err = m.Close()
		default:
			err = fmt.Errorf("%q is no deed", deed)
		}
		var errno syscall.Errno
		switch {
		case err == nil:
			fmt.Println("done")
		case errors.As(err, &errno):
			fmt.Println(int(errno), strings.ReplaceAll(err.Error(), "\n", "; "))
		default:
			return err
		}
	}
	return nil
}

// does has an obedient program do things that go well.
func (p *process) does(deeds ...string) {
	p.t.Helper()
	for _, d := range deeds {
		_, err := fmt.Fprintln(p.in, d)
		require.NoError(p.t, err)
		require.Equal(p.t, "done", p.line(), d)
	}
}

// fails has an obedient program do something that does not, and returns the error's text.
func (p *process) fails(deed string, errno syscall.Errno) string {
	p.t.Helper()
	_, err := fmt.Fprintln(p.in, deed)
	require.NoError(p.t, err)
	number, text, _ := strings.Cut(p.line(), " ")
	require.Equal(p.t, strconv.Itoa(int(errno)), number, "%s: %s", deed, text)
	return text
}

// fsync opens a file of the mount and syncs it.
func fsync(t testing.TB, path string) error {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	return f.Sync()
}

// TestDeviceLost loses one of two devices under programs that use both. Whoever is on the other device, or on the CPU,
// goes on; home has what was home, and what was lost is named: to the programs on the device, in the log, in the
// status, by fsync and at the end of the daemon.
func TestDeviceLost(t *testing.T) {
	const pages = 8
	if testdevice.Count(2) < 2 {
		t.Skip("two devices are needed, and there is one GPU")
	}
	for _, o := range []testmount.Options{{}, {WriteBack: true}} {
		t.Run(fmt.Sprintf("write-back=%v", o.WriteBack), func(t *testing.T) {
			o.Devices, o.Faulty, o.WriteBackInterval = 2, true, time.Hour
			m := testmount.Start(t, o)
			want := pattern(pages*page.Size, 1)
			for _, name := range []string{"shared", "left", "clean"} {
				require.NoError(t, os.WriteFile(m.Path(name), want, 0o600))
				require.NoError(t, fsync(t, m.Path(name)))
			}
			left := append([]byte(nil), want...)
			doomed, well := start(t, "obedient", m.Path("shared"), 0, pages),
				start(t, "obedient", m.Path("shared"), 1, pages)
			gone, clean := start(t, "obedient", m.Path("left"), 0, pages),
				start(t, "obedient", m.Path("clean"), 0, pages)
			for _, p := range []*process{doomed, well, gone, clean} {
				p.does("map")
			}
			// What was read or synced is home, and what was only released is on the device.
			doomed.does("store 0", "sync")
			want[0] = 1
			gone.does("store 2", "store 3", "store 6", "unmap") // which releases
			doomed.does("store 1", "store 4", "release", "store 5")
			well.does("store 7", "release")
			want[7*page.Size] = 1

			m.Lose(0)
			got, err := os.ReadFile(m.Path("shared"))
			require.NoError(t, err)
			requireBytes(t, want, got, "on the mount")
			for _, deed := range []string{"acquire", "release", "sync"} {
				require.Contains(t, doomed.fails(deed, syscall.ENODEV),
					"device 0 is lost, and with it all bytes that were not in the backing files")
			}
			require.Contains(t, clean.fails("acquire", syscall.ENODEV), "mount again to use the device")
			require.Contains(t, gone.fails("map", syscall.ENODEV), "device 0 is lost")

			// The others go on.
			f, err := os.OpenFile(m.Path("shared"), os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("CPU"), 5*page.Size+9)
			require.NoError(t, err)
			copy(want[5*page.Size+9:], "CPU")
			well.does("acquire", "store 6", "release")
			want[6*page.Size] = 1
			got, err = os.ReadFile(m.Path("shared"))
			require.NoError(t, err)
			requireBytes(t, want, got, "on the mount, after the others went on")

			// The loss is named, for every file once, also for those that nobody maps any more.
			losses := []*pagecache.Loss{
				{Device: 0, File: "left", Pages: 3, Runs: [][2]page.Index{{2, 4}, {6, 7}}},
				{Device: 0, File: "shared", Pages: 2, Runs: [][2]page.Index{{1, 2}, {4, 5}}},
			}
			var s pagecache.Status
			eventually(t, func() error {
				if s = status(t, m); len(s.Losses) < len(losses) {
					return fmt.Errorf("%d losses", len(s.Losses))
				}
				return nil
			})
			require.ElementsMatch(t, losses, s.Losses)
			require.True(t, s.Devices[0].Lost)
			require.False(t, s.Devices[1].Lost)
			require.EqualValues(t, 5, s.Counters["lost_pages"])
			for _, words := range []string{
				`msg="device lost; the mount goes on without it" device=0`,
				`msg="released bytes were lost with the device" device=0 file=shared pages=2 where="[1,2) [4,5)"`,
				`msg="released bytes were lost with the device" device=0 file=left pages=3 where="[2,4) [6,7)"`,
				`msg="stores since the last release were lost with the device" device=0 file=shared mappings=1`,
			} {
				require.Contains(t, m.Log(), words)
			}
			require.ErrorIs(t, f.Sync(), syscall.EIO)
			require.NoError(t, f.Sync(), "once")
			require.ErrorIs(t, fsync(t, m.Path("left")), syscall.EIO)
			require.NoError(t, fsync(t, m.Path("left")))
			require.NoError(t, fsync(t, m.Path("clean")), "nothing of it was lost")
			for name, bytes := range map[string][]byte{"shared": want, "left": left} {
				sameEverywhere(t, m, name, bytes)
			}

			// Unmapping says that it could not release. Programs end as they will.
			require.Contains(t, doomed.fails("unmap", syscall.ENODEV), "device 0 is lost")
			well.does("unmap")
			clean.kill()
			for _, p := range []*process{doomed, well, gone} {
				require.Empty(t, p.stop())
			}
			unmapped(t, m)
			require.Zero(t, status(t, m).Devices[0].UsedBytes)
			require.NoError(t, f.Close())
			require.NoError(t, m.Process.Signal(syscall.SIGTERM))
			err = m.Wait(patience)
			require.ErrorContains(t, err, "released bytes of shared were lost with device 0: pages [1,2) [4,5), 2 in all")
			require.ErrorContains(t, err, "released bytes of left were lost with device 0: pages [2,4) [6,7), 3 in all")
			require.NotContains(t, mountpointsIn(filepath.Dir(m.Dir)), m.Dir)
			for name, want := range map[string][]byte{"shared": want, "left": left} {
				got, err := os.ReadFile(filepath.Join(m.Source, name))
				require.NoError(t, err)
				requireBytes(t, want, got, "in SOURCE, at the end")
			}
		})
	}
}

// TestDeviceLostUnderLoad loses a device while programs store, release, sync and acquire on it and on another one, and
// CPU programs read, write and sync the same file. Nobody sees another error than those of the loss, and whoever is not
// on the device loses nothing.
func TestDeviceLostUnderLoad(t *testing.T) {
	const rounds, programs, own = 120, 4, 3 // pages of each
	if testdevice.Count(2) < 2 {
		t.Skip("two devices are needed, and there is one GPU")
	}
	m := testmount.Start(t, testmount.Options{Devices: 2, Faulty: true, WriteBackInterval: 20 * time.Millisecond})
	path := m.Path("shared")
	require.NoError(t, os.WriteFile(path, make([]byte, (programs+1)*own*page.Size), 0o600))
	halfway, lost := make(chan struct{}), make(chan struct{})
	reached := sync.OnceFunc(func() { close(halfway) })
	var work errgroup
	last := byte((rounds - 1) % 250)
	for k := range programs {
		p := start(t, "obedient", path, k%2, (programs+1)*own)
		p.does("map")
		work.Go(func() error {
			defer reached()
			for i := range rounds {
				if k == 0 && i == rounds/2 { // half of what this one does fails, however quick the others are
					reached()
					<-lost
				}
				for page := k * own; page < (k+1)*own; page++ {
					p.does(fmt.Sprintf("store %d %d", page, i%250))
				}
				for _, deed := range []string{"release", []string{"acquire", "sync", "acquire"}[i%3]} {
					if _, err := fmt.Fprintln(p.in, deed); err != nil {
						return err
					}
					// A sync may be the one that reports what the device took along.
					switch said := p.line(); {
					case said == "done", k%2 == 0 && strings.HasPrefix(said, "19 "), deed == "sync" &&
						strings.HasPrefix(said, "5 "):
					default:
						return fmt.Errorf("program %d, round %d: %s: %s", k, i, deed, said)
					}
				}
			}
			return nil
		})
	}
	work.Go(func() error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		for i := range rounds {
			for page := programs * own; page < (programs+1)*own; page++ {
				if _, err := f.WriteAt([]byte{byte(i % 250)}, int64(page)*4096); err != nil {
					return err
				}
			}
			if err := f.Sync(); err != nil && !errors.Is(err, syscall.EIO) {
				return err
			}
			if _, err := os.ReadFile(path); err != nil {
				return err
			}
		}
		return nil
	})
	<-halfway
	m.Lose(0)
	close(lost)
	require.NoError(t, work.Wait())
	_ = fsync(t, path) // it may be the first after the loss
	require.NoError(t, fsync(t, path))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	for p := range (programs + 1) * own {
		if k := p / own; k == programs || k%2 == 1 {
			require.Equal(t, last, got[p*page.Size], "page %d of program %d", p, k)
		}
	}
	require.True(t, status(t, m).Devices[0].Lost)
	require.NoError(t, m.Process.Signal(syscall.SIGTERM))
	_ = m.Wait(patience) // names what was lost, if anything was
	require.NotContains(t, m.Log(), "panic")
}

// errgroup is goroutines of which the errors are wanted.
type errgroup struct {
	wait sync.WaitGroup
	mu   sync.Mutex
	err  error // protected by mu
}

func (g *errgroup) Go(f func() error) {
	g.wait.Go(func() {
		err := f()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.err = errors.Join(g.err, err)
	})
}

func (g *errgroup) Wait() error {
	g.wait.Wait()
	return g.err
}

// TestDeviceMemoryTakenByOthers: the device has no memory left, although the budget is not used up. Whoever maps is
// told so, and can when there is some again.
func TestDeviceMemoryTakenByOthers(t *testing.T) {
	m := testmount.Start(t, testmount.Options{Faulty: true})
	require.NoError(t, os.WriteFile(m.Path("file"), pattern(4*page.Size, 2), 0o600))
	p := start(t, "obedient", m.Path("file"), 0, 4)
	m.Exhaust(0, 1)
	text := p.fails("map", syscall.ENOMEM)
	require.Contains(t, text,
		"needs 2.0 MiB of device 0, which has no memory left although only 0 B of its 256 MiB are used here: other "+
			"programs use the GPU's memory")
	p.does("map", "store 0", "sync", "unmap")
	got, err := os.ReadFile(m.Path("file"))
	require.NoError(t, err)
	require.EqualValues(t, 1, got[0])
	p.stop()
}
