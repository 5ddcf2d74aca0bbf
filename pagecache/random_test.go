package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// TestRandomDevices: programs on three devices and on the CPU map, store, release, acquire and unmap at random. Byte i
// belongs to writer i mod 4, so the oracle knows what each must see: all its own device's stores, and of the others
// everything released. It may also see later stores of the others, because a collect may carry unreleased bytes. Peer
// copies are of any length, so that they meet everything else.
func TestRandomDevices(t *testing.T) {
	randomSeeds(t, 40, func(uint64) bool { return false })
}

// TestRandomDevicesAndDisk is the same test with pages that come and go in the host's page cache.
func TestRandomDevicesAndDisk(t *testing.T) {
	randomSeeds(t, 20, func(uint64) bool { return true })
}

// TestRandomDevicesServeReads is the same test with CPU reads from devices wherever possible, and read-ahead.
func TestRandomDevicesServeReads(t *testing.T) {
	reads := randomSeeds(t, 40, func(seed uint64) bool { return seed%2 == 0 }, readsFrom(DeviceReadsAlways))
	require.Positive(t, reads)
}

// randomSeeds runs randomDevices with so many seeds. Some of the runs must make peer copies. It returns how many reads
// devices served.
func randomSeeds(t *testing.T, seeds uint64, onDisk func(seed uint64) bool, options ...machineOption) (reads int64) {
	if n := testdevice.Count(manyDevices); n < manyDevices {
		t.Skipf("%d devices are needed, and there are %d GPUs", manyDevices, n)
	}
	copied := int64(0)
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m, pages := randomDevices(t, seed, onDisk(seed), options...)
			copied += pages
			reads += m.cache.counters.DeviceReads.Load()
		})
	}
	require.Positive(t, copied)
	return reads
}

// manyDevices is the number of devices of randomDevices.
const manyDevices = 3

func randomDevices(t *testing.T, seed uint64, onDisk bool, options ...machineOption) (m *machine, copied int64) {
	const devices, pages, cpu = manyDevices, 24, manyDevices
	const size = pages*page.Size - 5
	rnd := rand.New(rand.NewPCG(seed, 11))
	m = newMachine(t, devices, options...)
	m.cache.leastPeer, m.cache.leastFlight = 1, 1
	m.cache.homes.LeastParallel = 2 * page.Size
	for d := range devices { // some devices have no copy engines
		m.cache.devices[d].info.CopyEngines = (int(seed)+d)%2 == 0
	}
	src := m.noisyFile(size)
	if onDisk {
		src.disk = newDisk(src.home)
	}
	src.reader = &openHome{Home: src.home}
	// One mapping keeps the File alive, so that CPU writes go through it.
	m.run(src, 0, 0, page.Size, false)
	released := bytes.Clone(src.home.data)
	var stored [devices]map[int][]byte // since the last release, the newest value last
	var programs [devices][]*program
	for d := range stored {
		stored[d] = map[int][]byte{}
	}
	publish := func(d int, rg page.Range) {
		for at, all := range stored[d] {
			if rg.Contains(page.Index(at >> page.Shift)) {
				released[at] = all[len(all)-1]
				delete(stored[d], at)
			}
		}
	}
	// check checks the bytes from byte first on, as device viewer or the CPU sees them.
	check := func(viewer, first int, got []byte) {
		t.Helper()
		for i, b := range got {
			at := first + i
			if at >= size {
				require.Zero(t, b, "seed %d: past end of file", seed)
				continue
			}
			var all []byte
			if o := at % 4; o != cpu {
				all = stored[o][at]
			}
			switch mine := at%4 == viewer; {
			case mine && len(all) > 0 && b == all[len(all)-1], !mine && bytes.IndexByte(all, b) >= 0:
			case (!mine || len(all) == 0) && b == released[at]:
			default:
				t.Fatalf("seed %d: %d has %d at byte %d of page %d, want %d or of %v", seed, viewer, b, at%page.Size,
					at>>page.Shift, released[at], all)
			}
		}
	}
	for range 300 {
		if onDisk {
			at := page.Index(rnd.IntN(pages))
			src.disk.drop(page.Range{Start: at, End: at + page.Index(rnd.IntN(pages))})
		}
		d := rnd.IntN(devices)
		var p *program
		if n := len(programs[d]); n > 0 {
			p = programs[d][rnd.IntN(n)]
		}
		switch op := rnd.IntN(12); {
		case op < 2 || p == nil:
			from := rnd.IntN(pages)
			n := 1 + rnd.IntN(pages-from)
			q := m.run(src, d, int64(from)*page.Size, int64(n)*page.Size, rnd.IntN(2) == 0)
			programs[d] = append(programs[d], q)
			check(d, int(q.pages.Offset()), q.all())
		case op < 6 && p.writable:
			at := int(p.pages.Offset()) + rnd.IntN(p.end())
			if at = at - at%4 + d; at < size {
				b := byte(rnd.Uint32())
				p.store(at-int(p.pages.Offset()), b)
				stored[d][at] = append(stored[d][at], b)
			}
		case op < 8:
			p.release()
			if p.writable {
				publish(d, p.pages)
			}
		case op == 8:
			p.acquire()
			check(d, int(p.pages.Offset()), p.all())
		case op == 9:
			at := rnd.IntN(size/4)*4 + cpu
			b := byte(rnd.Uint32())
			src.write(t, at, []byte{b})
			released[at] = b
		case op == 10:
			from := rnd.IntN(pages) * page.Size
			n := min(size-from, page.Size*(1+rnd.IntN(4)))
			// Bytes that a read has seen are home's, even if home takes them later.
			if rnd.IntN(8) == 0 {
				src.home.fail(syscall.ENOSPC)
			}
			check(cpu, from, src.read(t, from, n))
			src.home.fail(nil)
		default:
			p.unmap()
			if p.writable {
				publish(d, p.pages)
			}
			for i, q := range programs[d] {
				if q == p {
					programs[d] = append(programs[d][:i], programs[d][i+1:]...)
					break
				}
			}
			m.cache.collectDue(context.Background()) // stops tracking pages that nobody maps for writing
		}
	}
	for d := range programs {
		for _, p := range programs[d] {
			p.unmap()
			if p.writable {
				publish(d, p.pages)
			}
		}
	}
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(released, src.home.bytes(0, size)), "seed %d: home", seed)
	check(cpu, 0, src.read(t, 0, size))
	return m, peerPages(src.attached)
}
