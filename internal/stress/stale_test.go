package stress

import (
	"encoding/binary"
	"fmt"
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

// The file of the test for stale readers. Each page has slots that CPU programs write under a lock, and behind them a
// field for each of two devices. What a slot must hold is in a file outside of the mount that the programs share.
const (
	slotBytes    = 1024
	slotsPerPage = 3
	slotPages    = 12
	slotCount    = slotPages * slotsPerPage
	fieldBytes   = 512
)

func slotOffset(slot int) int64 {
	return int64(slot/slotsPerPage*4096 + slot%slotsPerPage*slotBytes)
}

func fieldOffset(page, device int) int { return page*4096 + slotsPerPage*slotBytes + device*fieldBytes }

func init() {
	programs["slots"] = slots
	programs["fields"] = fields
}

// fill stores a number all over p.
func fill(p []byte, n uint64) {
	for i := 0; i+8 <= len(p); i += 8 {
		binary.NativeEndian.PutUint64(p[i:], n)
	}
}

// filled reports whether p holds a number all over.
func filled(p []byte, n uint64) bool {
	for i := 0; i+8 <= len(p); i += 8 {
		if binary.NativeEndian.Uint64(p[i:]) != n {
			return false
		}
	}
	return true
}

// mapShared maps a file outside of the mount, which processes use to tell each other what they were promised.
func mapShared(path string, n int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(int64(n)); err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// slots is a CPU program: path, ledger, operations, seed. An operation locks a slot, reads it, writes the next number
// and reads that back. It prints how many of its reads got old bytes.
func slots(args []string) error {
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(args[3], 10, 64)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	ledger, err := mapShared(args[1], slotCount*8)
	if err != nil {
		return err
	}
	fd, err := unix.Open(args[0], unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	stale := 0
	buf := make([]byte, slotBytes)
	for range n {
		slot := rng.IntN(slotCount)
		off := slotOffset(slot)
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: off, Len: slotBytes}
		if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLKW, &lock); err != nil {
			return err
		}
		number := binary.NativeEndian.Uint64(ledger[slot*8:])
		for try := range 2 {
			if _, err := unix.Pread(fd, buf, off); err != nil {
				return err
			}
			if !filled(buf, number) {
				stale++
			}
			if try > 0 {
				break
			}
			number++
			fill(buf, number)
			if _, err := unix.Pwrite(fd, buf, off); err != nil {
				return err
			}
			binary.NativeEndian.PutUint64(ledger[slot*8:], number)
		}
		lock.Type = unix.F_UNLCK
		if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lock); err != nil {
			return err
		}
	}
	fmt.Println(stale)
	return nil
}

// fields is a GPU program: path, device. Until asked to end it stores the next number into its field of some pages,
// releases, and acquires. It prints how many releases it made, and the number in each of its fields.
func fields(args []string) error {
	device, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	f, err := os.OpenFile(args[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	const size = slotPages * 4096
	m, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(device))
	if err != nil {
		return err
	}
	field := make([]byte, fieldBytes)
	done := asked()
	fmt.Println("ready")
	numbers := make([]uint64, slotPages)
	rounds := 0
	for ; !isDone(done); rounds++ {
		for page := rounds % 2; page < slotPages; page += 2 {
			at := int64(fieldOffset(page, device))
			if _, err := m.ReadAt(field, at); err != nil {
				return err
			}
			if !filled(field, numbers[page]) {
				return fmt.Errorf("the field of page %d lost number %d", page, numbers[page])
			}
			numbers[page]++
			fill(field, numbers[page])
			if _, err := m.WriteAt(field, at); err != nil {
				return err
			}
		}
		if _, err := m.Release(0, size); err != nil {
			return err
		}
		if rounds%4 == 0 {
			if _, err := m.Acquire(0, size); err != nil {
				return err
			}
		}
	}
	fmt.Println(rounds)
	for _, n := range numbers {
		fmt.Println(n)
	}
	return m.Close()
}

// staleReads runs four CPU programs with so many operations in all while two devices release, and returns how many
// reads got old bytes. What is in the file afterwards is checked too.
func staleReads(t *testing.T, m *testmount.Mount, operations int, seed uint64) (stale int) {
	t.Helper()
	const programs = 4
	path := m.Path("slots")
	require.NoError(t, os.WriteFile(path, make([]byte, slotPages*4096), 0o600))
	ledgerPath := filepath.Join(t.TempDir(), "ledger")
	ledger, err := mapShared(ledgerPath, slotCount*8)
	require.NoError(t, err)
	defer unix.Munmap(ledger)

	var devices [2]*process
	for i := range devices {
		devices[i] = start(t, "fields", path, i)
		devices[i].expect("ready")
	}
	var running [programs]*process
	for i := range running {
		running[i] = start(t, "slots", path, ledgerPath, operations/programs, seed*programs+uint64(i))
	}
	for _, p := range running {
		l, ok := <-p.lines // may take long; go test has a timeout of its own
		require.True(t, ok)
		n, err := strconv.Atoi(l)
		require.NoError(t, err)
		stale += n
		p.stop()
	}
	want := make([]byte, slotPages*4096)
	for i := range slotCount {
		fill(want[slotOffset(i):][:slotBytes], binary.NativeEndian.Uint64(ledger[i*8:]))
	}
	releases := 0
	for d, p := range devices {
		rest := p.stop()
		require.Len(t, rest, slotPages+1)
		n, err := strconv.Atoi(rest[0])
		require.NoError(t, err)
		releases += n
		for page, text := range rest[1:] {
			n, err := strconv.ParseUint(text, 10, 64)
			require.NoError(t, err)
			fill(want[fieldOffset(page, d):][:fieldBytes], n)
		}
	}
	t.Logf("%d operations, %d releases, %d stale", operations, releases, stale)
	require.Positive(t, releases)
	if stale == 0 {
		sameEverywhere(t, m, "slots", want)
	}
	return stale
}

// TestNoStaleReads shows that nobody who waited for a write gets bytes from before it, though devices have the kernel
// drop its pages all the time.
func TestNoStaleReads(t *testing.T) {
	seed := uint64(time.Now().UnixNano()) >> 2
	t.Logf("again: go test ./internal/stress -run TestNoStaleReads -stress.ops %d (seed %d)", *operations, seed)
	allModes(t, func(t *testing.T, o testmount.Options) {
		o.Devices = 2
		n := *operations / 2
		assert.Zero(t, staleReads(t, testmount.Start(t, o), n, seed), "reads that got old bytes")
	})
}

// TestNoStaleReadsFromDevices is the same with reads that devices serve wherever they can.
func TestNoStaleReadsFromDevices(t *testing.T) {
	seed := uint64(time.Now().UnixNano()) >> 2
	t.Logf("again: go test ./internal/stress -run TestNoStaleReadsFromDevices -stress.ops %d (seed %d)", *operations,
		seed)
	allModes(t, func(t *testing.T, o testmount.Options) {
		o.Devices, o.DeviceReads = 2, "always"
		m := testmount.Start(t, o)
		assert.Zero(t, staleReads(t, m, *operations/4, seed), "reads that got old bytes")
		require.Positive(t, status(t, m).Counters["device_reads"])
	})
}

// TestStaleReadsWithoutCure shows that the test above would notice.
func TestStaleReadsWithoutCure(t *testing.T) {
	m := testmount.Start(t, testmount.Options{Devices: 2, WithoutCure: true})
	for round := range uint64(20) {
		if staleReads(t, m, 20_000, round) > 0 {
			return
		}
	}
	t.Error("no stale read in 400,000 operations without the cure: the test does not test it")
}
