package main

import (
	"context"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/bench/parts"
	"github.com/gaiafs/gaiafs/internal/page"
)

// mergeRows asks how long merging a page takes.
func mergeRows(_ context.Context, s *session) ([]row, error) {
	n := 200_000
	if s.quick {
		n = 50_000
	}
	var rows []row
	for _, c := range []struct {
		name  string
		share float64
	}{{"4 KiB, 1 % of the bytes changed by each", 0.01}, {"4 KiB, 45 % of the bytes changed by each", 0.45}} {
		m := parts.NewMerge(c.share)
		rows = append(rows, row{
			group: "merge", name: c.name, unit: microseconds,
			sides: []side{
				{name: "gaiafs", measure: func(context.Context) (float64, error) { return us(m.Run(n)), nil }},
				{name: "copy", measure: func(context.Context) (float64, error) { return us(m.Copy(n)), nil }},
			},
			targets: []target{{limit: 0.7}},
		})
	}
	return rows, nil
}

func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// modifiedRows asks how long finding the modified pages takes.
func modifiedRows(ctx context.Context, s *session) ([]row, error) {
	size := int64(1 << 30)
	if s.quick {
		size = 256 << 20
	}
	var search *parts.Search
	prepare := func(ctx context.Context) (err error) {
		if search == nil {
			search, err = parts.NewSearch(ctx, size)
		}
		return err
	}
	s.later(func() {
		if search != nil {
			_ = search.Close()
		}
	})
	return []row{{
		group: "modified", name: fmt.Sprintf("%d MiB, 1 %% of the pages modified", size>>20), unit: milliseconds,
		sides: []side{
			{name: "gaiafs", prepare: prepare, measure: func(ctx context.Context) (float64, error) {
				d, err := search.Device(ctx)
				return ms(d), err
			}},
			{name: "memcmp", prepare: prepare, measure: func(context.Context) (float64, error) {
				d, err := search.Compare()
				return ms(d), err
			}},
		},
		targets: []target{{against: "memcmp", limit: 1 / 1.5}},
	}}, nil
}

// stateDevices is the number of devices for which the limits of memory were set.
const stateDevices = 8

// stateRows asks how much memory versions and page states take.
func stateRows(_ context.Context, s *session) ([]row, error) {
	agreeing, scrambled := page.Index(1<<30>>page.Shift), page.Index(16<<10)
	if s.quick {
		scrambled = 2 << 10
	}
	ask := func(name string, n page.Index, limit float64, weigh func(page.Index, int) parts.Memory) row {
		var heap float64
		return row{
			group: "state", name: fmt.Sprintf("%d pages on %d devices, %s", n, stateDevices, name), unit: bytesPerPage, rounds: 1,
			sides: []side{
				{name: "accounted", measure: func(context.Context) (float64, error) {
					m := weigh(n, stateDevices)
					heap = m.Heap
					return m.Accounted, nil
				}},
				{name: "heap", measure: func(context.Context) (float64, error) { return max(heap, 0), nil }},
			},
			targets: []target{{limit: limit}},
		}
	}
	return []row{
		ask("all agree", agreeing, 1, parts.Agreeing),
		ask("no two agree", scrambled, 64, parts.Disagreeing),
	}, nil
}
