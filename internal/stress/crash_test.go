package stress

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

// crew is the writers of one shared file.
type crew struct {
	processes []*process
	ledgers   []*ledger
	kinds     []string
}

// crewKinds has two CPU programs, two GPU programs on one device and one on another. Their places are those of their
// slots.
var crewKinds = []struct {
	program string
	device  int
}{{"write", 0}, {"mmap", 0}, {"gpu", 0}, {"gpu", 0}, {"gpu", 1}}

// startCrew starts the writers on a file, which it makes. They pause between rounds.
func startCrew(t testing.TB, path string, seed uint64, pause time.Duration) *crew {
	t.Helper()
	require.NoError(t, os.WriteFile(path, make([]byte, sharedBytes), 0o600))
	dir := t.TempDir()
	c := &crew{}
	for i, k := range crewKinds {
		name := filepath.Join(dir, fmt.Sprint("ledger", i))
		l, err := openLedger(name)
		require.NoError(t, err)
		t.Cleanup(func() { _ = unix.Munmap(l.b) })
		c.ledgers = append(c.ledgers, l)
		c.kinds = append(c.kinds, k.program)
		c.processes = append(c.processes, start(t, k.program, path, name, i, k.device, seed, pause))
	}
	for _, p := range c.processes {
		p.expect("ready")
	}
	return c
}

// stop ends the writers, which are to end well and by their own will.
func (c *crew) stop() {
	for _, p := range c.processes {
		p.quit.Do(func() { p.in.Close() })
	}
	for _, p := range c.processes {
		rest := p.stop()
		require.Empty(p.t, rest, p.name)
	}
}

// verify checks a copy of the file against what the writers were promised. keeps says which of a writer's promises have
// to be kept; nil stands for all.
func (c *crew) verify(t testing.TB, content []byte, keeps func(kind string, durable bool,
	p promise) bool) (kept, open int) {
	t.Helper()
	require.Len(t, content, sharedBytes)
	for w, l := range c.ledgers {
		promises := l.promises()
		lastMark := -1
		for i, p := range promises {
			if p.slot == markSlot {
				lastMark = i
			}
		}
		var least [sharedPages]uint64
		var since [sharedPages]time.Time // of the promise
		for i, p := range promises {
			switch {
			case p.slot == markSlot:
			case keeps == nil || keeps(c.kinds[w], i < lastMark, p):
				least[p.slot], since[p.slot] = uint64(p.number), p.at
				kept++
			default:
				open++
			}
		}
		most := l.begun().Load()
		for page := range sharedPages {
			slot := content[writerOffset(w, page):][:writerSlot]
			for i := 0; i < len(slot); i += 8 {
				n := binary.NativeEndian.Uint64(slot[i:])
				if n < least[page] || n > most {
					t.Fatalf("writer %d (%s), page %d, byte %d: number %d, at least %d was promised at %v, %d is the last stored; all slots: %v",
						w, c.kinds[w], page, i, n, least[page], since[page].Format("05.000000"), most,
						firstNumbers(content[page*4096:][:4096]))
				}
			}
		}
	}
	return kept, open
}

// firstNumbers returns the number at the front of each slot of a page, for people.
func firstNumbers(page []byte) (numbers []uint64) {
	for w := range writers {
		numbers = append(numbers, binary.NativeEndian.Uint64(page[w*writerSlot:]))
	}
	return numbers
}

// TestCrash kills the daemon at random moments while programs of all kinds write one file. Whatever it had promised by
// then is in the backing file, the programs get errors and end, and a new mount works.
func TestCrash(t *testing.T) {
	const times = 12 // for each way of writing
	const interval = 400 * time.Millisecond
	// grace is what a promise of the clock's is given on a busy machine.
	const grace = 250 * time.Millisecond
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	allModes(t, func(t *testing.T, o testmount.Options) {
		o.Source = t.TempDir()
		o.Devices = 2
		o.WriteBackInterval = interval
		var kept, open int
		for i := range times {
			m := testmount.Start(t, o)
			name := fmt.Sprint("shared", i)
			c := startCrew(t, m.Path(name), seed+uint64(i), 0)
			<-time.After(time.Duration(rng.Int64N(int64(3 * interval)))) // any moment will do
			killed := time.Now()
			m.Crash()
			t.Logf("killed at %s", killed.Format("05.000000"))
			for _, p := range c.processes {
				rest, err := p.wait()
				require.NoError(t, err, p.name)
				require.NotEmpty(t, rest, "%s ended without an error", p.name)
				require.True(t, strings.HasPrefix(rest[0], "lost: "), "%s: %s", p.name, rest)
			}
			_, err := os.ReadFile(m.Path(name))
			require.ErrorIs(t, err, unix.ENOTCONN)
			require.NoError(t, unix.Unmount(m.Dir, unix.MNT_DETACH))

			content, err := os.ReadFile(filepath.Join(o.Source, name))
			require.NoError(t, err)
			k, n := c.verify(t, content, func(kind string, durable bool, p promise) bool {
				switch kind {
				case "write":
					return durable || !o.WriteBack
				case "gpu":
					return durable || p.at.Before(killed.Add(-interval-grace))
				}
				return durable
			})
			kept, open = kept+k, open+n

			again := testmount.Start(t, o)
			requireBytes(t, content, mustRead(t, again.Path(name)), "on a new mount")
			device := gpu(t, again.Path(name), sharedBytes, i%2)
			requireBytes(t, content, load(t, device), "on a device of a new mount")
			store(t, device, 0, []byte("after the crash")...)
			copy(content, "after the crash")
			_, err = device.Release(0, 4096)
			require.NoError(t, err)
			requireBytes(t, content, mustRead(t, again.Path(name)), "written by a device of a new mount")
			require.NoError(t, device.Close())
			again.Stop()
		}
		t.Logf("%d crashes: %d promises kept, %d not due", times, kept, open)
		require.Positive(t, kept)
	})
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}
