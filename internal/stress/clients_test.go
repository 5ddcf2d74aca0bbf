package stress

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// recordBytes is what each client that is going to be killed stores. Eight of them share a page.
const recordBytes = 512

func init() { programs["victim"] = victim }

// victim is a GPU program that does not end by itself: path, device, record, pages, deed. It stores its record, says so
// and then does one thing over and over, a line each time.
func victim(args []string) error {
	var numbers [3]int
	for i := range numbers {
		n, err := strconv.Atoi(args[i+1])
		if err != nil {
			return err
		}
		numbers[i] = n
	}
	device, record, pages := numbers[0], numbers[1], numbers[2]
	f, err := os.OpenFile(args[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	size := int64(pages) * 4096
	m, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(device))
	if err != nil {
		return err
	}
	content := make([]byte, recordBytes)
	fill(content, uint64(record+1))
	if _, err := m.WriteAt(content, int64(record*recordBytes)); err != nil {
		return err
	}
	for {
		fmt.Println("stored")
		switch args[4] {
		case "acquire":
			_, err = m.Acquire(0, size)
		case "release":
			_, err = m.Release(0, size)
		case "sync":
			err = m.Sync(0, size)
		case "map":
			var again *gaiafs.Mapping
			if again, err = gaiafs.Map(f, 0, size, gaiafs.ProtRead, testdevice.Number(device),
				gaiafs.Lazy()); err == nil {
				err = again.Close()
			}
		case "store":
			_, err = m.WriteAt(content, int64(record*recordBytes))
		}
		if err != nil {
			return err
		}
	}
}

// TestKilledClients kills GPU programs that map files, at whatever they do. What they stored is in the file, and the
// daemon has what it had before.
func TestKilledClients(t *testing.T) {
	const clients, together, pages = 200, 20, 128
	// The FUSE server has a goroutine for each request that it waits for, and starts and ends some with the load.
	readers := min(max(runtime.NumCPU(), 2), 16)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	m := testmount.Start(t, testmount.Options{Devices: 2})
	deeds := []string{"acquire", "release", "sync", "map", "store"}
	names := []string{"one", "two"}
	want := make([]byte, pages*4096)
	for _, name := range names {
		require.NoError(t, os.WriteFile(m.Path(name), want, 0o600))
	}
	batch := func(first int, deed func(i int) string) {
		var running []*process
		for i := first; i < first+together; i++ {
			fill(want[i*recordBytes:][:recordBytes], uint64(i+1))
			running = append(running, start(t, "victim", m.Path(names[i/2%2]), i%2, i, pages, deed(i)))
		}
		for _, p := range running {
			for range 1 + rng.IntN(20) {
				p.expect("stored")
			}
			p.kill()
		}
	}
	settled := func() (u usage) {
		unmapped(t, m)
		u = measure(t, m)
		return u
	}
	// A first batch, on both files and devices, makes whatever stays: cached extents, and goroutines of the runtime.
	batch(0, func(i int) string { return deeds[i/4] })
	before := settled()
	for first := together; first < together+clients; first += together {
		batch(first, func(int) string { return deeds[rng.IntN(len(deeds))] })
	}
	eventually(t, func() error {
		after := settled()
		switch {
		case after.descriptors > before.descriptors:
			return fmt.Errorf("%d descriptors, %d before: %v, %v before", after.descriptors, before.descriptors,
				after.open, before.open)
		case after.deviceBytes != before.deviceBytes || after.mappedBytes != 0:
			return fmt.Errorf("%d bytes of devices used and %d mapped, %d before", after.deviceBytes, after.mappedBytes,
				before.deviceBytes)
		case after.goroutines > before.goroutines+readers:
			return fmt.Errorf("%d goroutines, %d before", after.goroutines, before.goroutines)
		}
		return nil
	})
	for n, name := range names {
		content := make([]byte, pages*4096)
		for i := range together + clients {
			if i/2%2 == n {
				copy(content[i*recordBytes:][:recordBytes], want[i*recordBytes:])
			}
		}
		sameEverywhere(t, m, name, content)
	}
}
