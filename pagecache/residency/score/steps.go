package score

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/prefetch/replay"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// mostSteps bounds the memory of a play: 3 GB. mostPlayed bounds the steps of all plays: some minutes.
const (
	mostSteps  = 1 << 26
	mostPlayed = 1 << 31
)

// step is an access to one extent.
type step struct {
	id    policy.ID
	bytes int64
	next  int32 // the device's next step that accesses the extent, or never
	write bool
	cpu   bool
}

const never = 1<<31 - 1

// Steps is a trace, cut into accesses to extents.
type Steps struct {
	extent  int64
	devices [][]step
	// distinct is how many extents a device accesses: the largest number of all devices.
	distinct int
}

// New cuts the accesses of a trace into extents of so many bytes: a power of two from 64 KiB to 1 TiB. It fails if the
// trace has no accesses of devices, or more accesses to extents than can be played so many times in some minutes.
func New(t *trace.Trace, extent int64, plays int) (*Steps, error) {
	if extent < 64<<10 || extent&(extent-1) != 0 || extent > 1<<40 {
		return nil, fmt.Errorf("extents have a power of two of bytes, from 64 KiB to 1 TiB, not %d", extent)
	}
	if err := replay.Check(t); err != nil {
		return nil, err
	}
	type place struct {
		file  uint32
		index int64
	}
	ids := make(map[place]policy.ID)
	numbers := make(map[int]int) // of the devices
	for _, s := range t.Sources {
		if s.Device != trace.CPU {
			numbers[s.Device] = 0
		}
	}
	for i, d := range sortedKeys(numbers) {
		numbers[d] = i
	}
	s := &Steps{extent: extent, devices: make([][]step, len(numbers))}
	total, most := 0, min(mostSteps, mostPlayed/max(plays, 1))
	for i := range t.Events {
		x := &t.Events[i]
		if x.Resize {
			continue
		}
		for off, end := x.Off, x.Off+x.Len; off < end; {
			at := place{x.File, off / extent}
			id, known := ids[at]
			if !known {
				id = policy.ID(len(ids) + 1)
				ids[at] = id
			}
			next := min((at.index+1)*extent, end)
			st := step{id: id, bytes: next - off, write: x.Write, next: never}
			device := t.Sources[x.Source].Device
			for d, k := range numbers {
				if st.cpu = device == trace.CPU; st.cpu || device == d {
					s.devices[k] = append(s.devices[k], st)
					total++
				}
			}
			if off = next; total > most {
				return nil, fmt.Errorf("it has more than %d accesses to extents, which are too many to play %d times: choose "+
					"larger extents or play it less often", most, plays)
			}
		}
	}
	for _, steps := range s.devices {
		s.distinct = max(s.distinct, link(steps))
	}
	if s.distinct == 0 {
		return nil, errors.New("no program on a device acquired or changed anything during the recording: record while one does")
	}
	return s, nil
}

// link fills in when each extent is accessed next, and returns how many extents the device accesses.
func link(steps []step) int {
	seen := make(map[policy.ID]int32)
	for i := len(steps) - 1; i >= 0; i-- {
		x := &steps[i]
		if next, ok := seen[x.id]; ok {
			x.next = next
		}
		if !x.cpu {
			seen[x.id] = int32(i)
		}
	}
	return len(seen)
}

// Distinct returns the bytes of the extents that a device accesses: the largest number of all devices.
func (s *Steps) Distinct() int64 { return int64(s.distinct) * s.extent }

func sortedKeys(m map[int]int) (keys []int) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
