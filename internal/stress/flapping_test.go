package stress

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/hungfs"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

var flapFor = flag.Duration("stress.flap", 2*time.Second, "how long SOURCE fails and works in turn")

// flapPages is the size of the file, and flapUsers the number of users who have bytes of each page.
const flapPages, flapUsers = 2, 6

// The ways in which a byte is stored and looked at.
const (
	byDevice0 = iota
	byDevice1
	byWrite
	byDirectWrite
	byMmap
)

var flapWays = []string{"device 0", "device 1", "write", "direct write", "mmap"}

// TestFlappingSource: SOURCE refuses writes and takes them, in turn. Several users store bytes of their own into the
// same pages, each byte in turn by a device and by the CPU, and look at it in every way. What was stored or released
// without an error is there, whatever SOURCE did. There are no stores by mmap beside write: if a write fails, the
// kernel reads the page again, and loses such stores without a device, too.
func TestFlappingSource(t *testing.T) {
	for _, ways := range [][]int{
		{byDevice0, byDevice1, byWrite, byDirectWrite},
		{byDevice0, byDevice1, byDirectWrite, byMmap},
	} {
		t.Run(flapWays[ways[2]]+" and "+flapWays[ways[3]], func(t *testing.T) {
			bothModes(t, func(t *testing.T, o testmount.Options) { flap(t, o, ways) })
		})
	}
}

func flap(t *testing.T, o testmount.Options, ways []int) {
	if testdevice.Count(2) < 2 {
		t.Skip("two devices are needed, and there is one GPU")
	}
	o.Source, o.Devices, o.WriteBackInterval = t.TempDir(), 2, 5*time.Millisecond
	h := hungfs.Mount(t, t.TempDir(), o.Source)
	m := testmount.Start(t, o)
	require.NoError(t, os.WriteFile(m.Path("file"), make([]byte, flapPages*page.Size), 0o600))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var all sync.WaitGroup
	var over atomic.Bool
	for i := range flapUsers {
		u := newFlapUser(t, m.Path("file"), i, rand.New(rand.NewPCG(seed, uint64(i))))
		u.ways = ways
		all.Go(func() {
			defer u.close()
			for !over.Load() && !t.Failed() && u.step() {
			}
		})
	}
	rnd := rand.New(rand.NewPCG(seed, flapUsers))
	for end := time.Now().Add(*flapFor); time.Now().Before(end) && !t.Failed(); {
		h.Fail([]syscall.Errno{syscall.EIO, syscall.ENOSPC}[rnd.IntN(2)])
		time.Sleep(time.Duration(rnd.IntN(8000)) * time.Microsecond)
		h.Answer()
		time.Sleep(time.Duration(rnd.IntN(8000)) * time.Microsecond)
	}
	over.Store(true)
	all.Wait()
}

// flapUser is a user of TestFlappingSource. It is used by one goroutine.
type flapUser struct {
	t       *testing.T
	rnd     *rand.Rand
	ways    []int
	first   int // it has the bytes first, first+flapUsers, …
	steps   int
	history []string // its last steps
	plain   *os.File
	direct  *os.File
	mapped  []byte
	devices []*gaiafs.Mapping
}

func newFlapUser(t *testing.T, path string, first int, rnd *rand.Rand) *flapUser {
	t.Helper()
	u := &flapUser{t: t, rnd: rnd, first: first}
	var err error
	u.plain, err = os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	u.direct, err = os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	require.NoError(t, err)
	const size = flapPages * page.Size
	u.mapped, err = unix.Mmap(int(u.plain.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	for d := range 2 {
		m, err := gaiafs.Map(u.plain, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(d))
		require.NoError(t, err)
		u.devices = append(u.devices, m)
	}
	return u
}

func (u *flapUser) close() {
	for _, m := range u.devices {
		_ = m.Close()
	}
	_ = unix.Munmap(u.mapped)
	u.plain.Close()
	u.direct.Close()
}

// refused reports whether err is SOURCE's.
func refused(err error) bool { return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENOSPC) }

// insists does something until SOURCE lets it happen.
func (u *flapUser) insists(what string, do func() error) bool {
	for {
		err := do()
		if err == nil {
			return true
		}
		if !refused(err) {
			return assert.NoError(u.t, err, what)
		}
	}
}

// step stores a byte and looks at it. It reports whether the test goes on.
func (u *flapUser) step() bool {
	// Few bytes of each page, so that each is used often.
	at := u.rnd.IntN(flapPages)*page.Size + u.rnd.IntN(20)*flapUsers + u.first
	u.steps++
	way, value := u.ways[u.rnd.IntN(len(u.ways))], byte(u.steps%255+1)
	u.history = append(u.history, fmt.Sprintf("%d=%d by %s", at, value, flapWays[way]))
	if !u.store(at, value, way) {
		return false
	}
	for range 1 + u.rnd.IntN(3) {
		way := u.rnd.IntN(len(flapWays))
		got, ok := u.look(at, way)
		if !ok {
			return false
		}
		u.history = append(u.history, fmt.Sprintf("%d is %d by %s", at, got, flapWays[way]))
		u.history = u.history[max(0, len(u.history)-12):]
		if !assert.Equal(u.t, value, got, "byte %d of user %d: %q", at, u.first, u.history) {
			return false
		}
	}
	return true
}

func (u *flapUser) store(at int, value byte, way int) bool {
	switch way {
	case byDevice0, byDevice1:
		d := u.devices[way]
		return u.insists("acquire", func() error { _, err := d.Acquire(int64(at), 1); return err }) &&
			u.insists("store", func() error { _, err := d.WriteAt([]byte{value}, int64(at)); return err }) &&
			u.insists("release", func() error { _, err := d.Release(int64(at), 1); return err })
	case byWrite:
		return u.insists("write", func() error {
			if _, err := u.plain.WriteAt([]byte{value}, int64(at)); err != nil {
				return err
			}
			return u.plain.Sync()
		})
	case byDirectWrite:
		return u.insists("direct write", func() error {
			_, err := u.direct.WriteAt([]byte{value}, int64(at))
			return err
		})
	}
	return u.insists("mmap", func() error {
		u.mapped[at] = value
		return unix.Msync(u.mapped, unix.MS_SYNC)
	})
}

func (u *flapUser) look(at, way int) (byte, bool) {
	b := make([]byte, 1)
	ok := true
	switch way {
	case byDevice0, byDevice1:
		d := u.devices[way]
		ok = u.insists("acquire", func() error { _, err := d.Acquire(int64(at), 1); return err }) &&
			u.insists("load", func() error { _, err := d.ReadAt(b, int64(at)); return err })
	case byWrite:
		ok = u.insists("read", func() error { _, err := u.plain.ReadAt(b, int64(at)); return err })
	case byDirectWrite:
		ok = u.insists("direct read", func() error { _, err := u.direct.ReadAt(b, int64(at)); return err })
	case byMmap:
		b[0] = u.mapped[at]
	}
	return b[0], ok
}
