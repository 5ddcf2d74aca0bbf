package stress

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

func init() { programs["churn"] = churnProgram }

// churnProgram makes, maps, changes, moves and deletes files of its own, with CPU and device, and checks that each
// reads as it must: directory, seed. It ends when asked to and leaves the files that there are.
func churnProgram(args []string) error {
	seed, err := strconv.ParseUint(args[1], 10, 64)
	if err != nil {
		return err
	}
	c := &churn{dir: args[0], rng: rand.New(rand.NewPCG(seed, 1)), files: make(map[string][]byte)}
	done := asked()
	fmt.Println("ready")
	for step := 0; !isDone(done); step++ {
		if err := c.step(); err != nil {
			return fmt.Errorf("step %d of seed %d: %w", step, seed, err)
		}
	}
	fmt.Println(c.steps)
	return nil
}

type churn struct {
	dir   string
	rng   *rand.Rand
	files map[string][]byte // what each file must read
	steps int
}

const (
	churnFiles = 12
	churnBytes = 3 << 20
)

func (c *churn) step() error {
	c.steps++
	name := filepath.Join(c.dir, fmt.Sprint("f", c.rng.IntN(churnFiles)))
	want := c.files[name]
	if want == nil {
		want = make([]byte, 1+c.rng.IntN(churnBytes))
		c.fill(want)
		c.files[name] = want
		return os.WriteFile(name, want, 0o600)
	}
	switch c.rng.IntN(8) {
	case 0:
		delete(c.files, name)
		return os.Remove(name)
	case 1:
		other := filepath.Join(c.dir, fmt.Sprint("f", c.rng.IntN(churnFiles)))
		if other == name {
			return nil
		}
		delete(c.files, name)
		c.files[other] = want
		return os.Rename(name, other)
	case 2:
		size := 1 + c.rng.IntN(churnBytes)
		if size <= len(want) {
			c.files[name] = want[:size:size]
		} else {
			c.files[name] = append(want[:len(want):len(want)], make([]byte, size-len(want))...)
		}
		return os.Truncate(name, int64(size))
	case 3:
		return c.check(name)
	}
	return c.share(name)
}

func (c *churn) fill(p []byte) {
	for i := range p {
		p[i] = byte(c.rng.Uint32())
	}
}

func (c *churn) check(name string) error {
	got, err := os.ReadFile(name)
	if err == nil && !bytes.Equal(got, c.files[name]) {
		err = fmt.Errorf("%s does not read as it was written", name)
	}
	return err
}

// share lets the CPU and a device write the same pages of a file, in turns and at once.
func (c *churn) share(name string) (err error) {
	want := c.files[name]
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := gaiafs.Map(f, 0, int64(len(want)), gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(c.rng.IntN(2)))
	if errors.Is(err, unix.ENOMEM) {
		return nil // both churners and the crew fill the devices at times
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if got, err := loaded(m); err != nil || !bytes.Equal(got, want) {
		return errors.Join(err, fmt.Errorf("%s does not read as it was written, on the device", name))
	}
	for range 1 + c.rng.IntN(6) {
		at := c.rng.IntN(len(want))
		n := min(1+c.rng.IntN(20_000), len(want)-at)
		for i := at; i < at+n; i++ {
			if i%2 == 0 {
				want[i] = byte(c.rng.Uint32())
			}
		}
		if err := storeEven(m, want[at:at+n], at); err != nil {
			return err
		}
		for range 3 {
			if i := (at + c.rng.IntN(n)) | 1; i < len(want) {
				want[i] = byte(c.rng.Uint32())
				if _, err := f.WriteAt(want[i:i+1], int64(i)); err != nil {
					return err
				}
			}
		}
		if _, err := m.Release(0, int64(len(want))); err != nil {
			return err
		}
		if c.rng.IntN(4) == 0 {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		if _, err := m.Acquire(0, int64(len(want))); err != nil {
			return err
		}
		if got, err := loaded(m); err != nil || !bytes.Equal(got, want) {
			return errors.Join(err, fmt.Errorf("%s lost bytes on the device", name))
		}
	}
	return c.check(name)
}

// storeEven stores those bytes of p, which belongs at off, that have even offsets. Nobody else stores into the mapping,
// so the odd ones can be stored as they are there.
func storeEven(m *gaiafs.Mapping, p []byte, off int) error {
	there := make([]byte, len(p))
	if _, err := m.ReadAt(there, int64(off)); err != nil {
		return err
	}
	for i := range p {
		if (off+i)%2 == 0 {
			there[i] = p[i]
		}
	}
	_, err := m.WriteAt(there, int64(off))
	return err
}

// TestSoak keeps a mount under mixed load and looks whether what the daemon takes grows. In the end every file reads
// the same in SOURCE and on a fresh mount.
func TestSoak(t *testing.T) {
	o := testmount.Options{
		Source:            t.TempDir(),
		Devices:           2,
		Memory:            24 << 20, // too little for all files at once
		Poison:            true,
		WriteBackInterval: 300 * time.Millisecond,
	}
	m := testmount.Start(t, o)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var churners []*process
	for i := range 2 {
		dir := m.Path(fmt.Sprint("churn", i))
		require.NoError(t, os.Mkdir(dir, 0o700))
		churners = append(churners, start(t, "churn", dir, seed+uint64(i)))
		churners[i].expect("ready")
	}
	var samples []usage
	begin := time.Now()
	phase := min(*soakFor/4, 15*time.Second)
	for round := 0; time.Since(begin) < *soakFor; round++ {
		path := m.Path(fmt.Sprint("shared", round%4))
		c := startCrew(t, path, seed+uint64(round), 0)
		<-time.After(phase)
		c.stop()
		c.verify(t, mustRead(t, path), nil)
		u := quietest(t, m)
		samples = append(samples, u)
		if round%4 == 0 {
			t.Logf("%8v: %d KiB in use of %d KiB, %d descriptors, %d goroutines, %d KiB on devices",
				time.Since(begin).Round(time.Second),
				u.heapBytes>>10, u.residentBytes>>10, u.descriptors, u.goroutines, u.deviceBytes>>10)
		}
	}
	for _, c := range churners {
		t.Logf("steps: %v", c.stop())
	}
	flat(t, samples)
	m.Stop()
	sameCold(t, o)
}

// quietest measures some times and returns the usage with the least memory: what requests take that are under way says
// nothing about leaks, and is most of a small daemon's memory.
func quietest(t testing.TB, m *testmount.Mount) usage {
	t.Helper()
	least := measure(t, m)
	for range 15 {
		<-time.After(30 * time.Millisecond)
		if u := measure(t, m); u.heapBytes < least.heapBytes {
			least = u
		}
	}
	return least
}

// flat compares the second half of the samples with the quarter before it; what came first was warming up. Fewer
// samples than that show nothing.
func flat(t testing.TB, samples []usage) {
	t.Helper()
	if len(samples) < 40 {
		return
	}
	mean := func(part []usage, of func(usage) int64) float64 {
		sum := 0.0
		for _, u := range part {
			sum += float64(of(u))
		}
		return sum / float64(len(part))
	}
	n := len(samples)
	for name, of := range map[string]func(usage) int64{
		"memory":      func(u usage) int64 { return u.heapBytes },
		"descriptors": func(u usage) int64 { return int64(u.descriptors) },
		"goroutines":  func(u usage) int64 { return int64(u.goroutines) },
	} {
		before, after := mean(samples[n/4:n/2], of), mean(samples[n/2:], of)
		t.Logf("%s: mean %.1f in the second quarter, %.1f in the second half", name, before, after)
		assert.LessOrEqual(t, after, before*1.05, "%s grows", name)
	}
}

// sameCold compares every file of SOURCE with what a fresh mount shows.
func sameCold(t testing.TB, o testmount.Options) {
	t.Helper()
	m := testmount.Start(t, o)
	files := 0
	require.NoError(t, filepath.WalkDir(o.Source, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		name, err := filepath.Rel(o.Source, path)
		require.NoError(t, err)
		requireBytes(t, mustRead(t, path), mustRead(t, m.Path(name)), name)
		return nil
	}))
	require.NotZero(t, files)
	m.Stop()
}
