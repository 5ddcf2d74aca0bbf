package fs

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

var staleOperations = flag.Int("stale-operations", 100_000, "operations of the test for stale readers")

// The test's file has slots, several to a page. A process locks a slot, reads it, fills it with the next number and
// reads it back. The expected numbers are in memory that the processes share outside of the mount. Behind each slot
// there is a gap that devices write to.
const (
	slotSize   = 1008
	slotStride = 1024
	slotCount  = 48
)

func init() {
	programs["read and write slots"] = func(args []string) error {
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		seed, err := strconv.ParseUint(args[3], 10, 64)
		if err != nil {
			return err
		}
		stale, err := readAndWriteSlots(args[0], args[1], n, rand.New(rand.NewPCG(seed, 0)))
		fmt.Println(stale)
		return err
	}
}

func readAndWriteSlots(path, expected string, operations int, rng *rand.Rand) (stale int, err error) {
	fd, err := unix.Open(path, unix.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	memory, err := os.OpenFile(expected, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	want, err := unix.Mmap(int(memory.Fd()), 0, slotCount*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	buf := make([]byte, slotSize)
	check := func(off int64, want uint64) error {
		if _, err := unix.Pread(fd, buf, off); err != nil {
			return err
		}
		for i := 0; i < slotSize; i += 8 {
			if binary.NativeEndian.Uint64(buf[i:]) != want {
				stale++
				break
			}
		}
		return nil
	}
	for range operations {
		slot := rng.IntN(slotCount)
		off := int64(slot * slotStride)
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: off, Len: slotSize}
		if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLKW, &lock); err != nil {
			return stale, err
		}
		value := binary.NativeEndian.Uint64(want[slot*8:])
		if err := check(off, value); err != nil {
			return stale, err
		}
		value++
		for i := 0; i < slotSize; i += 8 {
			binary.NativeEndian.PutUint64(buf[i:], value)
		}
		if _, err := unix.Pwrite(fd, buf, off); err != nil {
			return stale, err
		}
		binary.NativeEndian.PutUint64(want[slot*8:], value)
		if err := check(off, value); err != nil {
			return stale, err
		}
		lock.Type = unix.F_UNLCK
		if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lock); err != nil {
			return stale, err
		}
	}
	return stale, nil
}

// makeSlots makes the file with empty slots.
func makeSlots(t *testing.T, s *scene) (path string) {
	t.Helper()
	path = filepath.Join(s.mnt, "slots")
	require.NoError(t, os.WriteFile(path, make([]byte, slotStride*slotCount), 0600))
	return path
}

// kernelPages returns the kernel's pages of a file of SOURCE.
func (s *scene) kernelPages(t *testing.T, name string) kernelPages {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, name), &st))
	return kernelPages{s.fs, inodeKey{st.Dev, st.Ino}}
}

// staleReads drops the kernel's pages repeatedly while processes use the slots. It returns the number of stale reads.
func staleReads(t *testing.T, s *scene, operations int, seed uint64) int {
	t.Helper()
	path := makeSlots(t, s)
	pages := s.kernelPages(t, "slots")
	return staleReadsDuring(t, s, path, operations, seed, func() { assert.NoError(t, pages.Invalidate(0, -1)) })
}

// staleReadsDuring runs the programs and calls drops every millisecond. It returns the number of reads that got old
// bytes.
func staleReadsDuring(t *testing.T, s *scene, path string, operations int, seed uint64, drops ...func()) int {
	t.Helper()
	const processes = 4
	expected := filepath.Join(filepath.Dir(s.mnt), "expected")
	require.NoError(t, os.WriteFile(expected, make([]byte, slotCount*8), 0600))
	stop := make(chan struct{})
	var dropping sync.WaitGroup
	for _, drop := range drops {
		dropping.Go(func() {
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
					drop()
				}
			}
		})
	}
	defer dropping.Wait()
	defer close(stop)

	var mu sync.Mutex
	var running sync.WaitGroup
	total := 0
	for i := range processes {
		running.Go(func() {
			cmd := program("read and write slots", path, expected, strconv.Itoa(operations/processes),
				strconv.FormatUint(seed+uint64(i), 10))
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if !assert.NoError(t, err) {
				return
			}
			n, err := strconv.Atoi(strings.TrimSpace(string(out)))
			assert.NoError(t, err)
			mu.Lock()
			total += n
			mu.Unlock()
		})
	}
	running.Wait()
	return total
}

func TestNoStaleReads(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("again: go test ./fs -run %s -stale-operations %d (seed %d)", t.Name(), *staleOperations, seed)
	everyMode(t, func(t *testing.T, s *scene) {
		assert.Zero(t, staleReads(t, s, *staleOperations, seed), "reads that got old bytes")
		t.Logf("%d writes had pages dropped again, %d of them did not wait to the end", s.fs.corrections.Load(),
			s.fs.impatient.Load())
	})
}

// TestStaleReadsWithoutCure shows that TestNoStaleReads can fail.
func TestStaleReadsWithoutCure(t *testing.T) {
	s := mount(t, func(o *Options) { o.withoutCure = true })
	for round := range uint64(20) {
		if staleReads(t, s, 20_000, round*1000) > 0 {
			return
		}
	}
	t.Error("no stale read in 400,000 operations without the cure: the test does not test it")
}
