package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/bench/parts"
	"github.com/gaiafs/gaiafs/bench/rows"
	"github.com/gaiafs/gaiafs/internal/page"
)

// mergeRows measure the time to merge a page.
func mergeRows(_ context.Context, s *session) ([]rows.Row, error) {
	n := 200_000
	if s.Quick {
		n = 50_000
	}
	var list []rows.Row
	for _, c := range []struct {
		name  string
		share float64
	}{{"4 KiB, 1 % of the bytes changed by each", 0.01}, {"4 KiB, 45 % of the bytes changed by each", 0.45}} {
		m := parts.NewMerge(c.share)
		list = append(list, rows.Row{
			Group: "merge", Name: c.name, Unit: rows.Microseconds,
			Sides: []rows.Side{
				{Name: "gaiafs", Measure: func(context.Context) (float64, error) { return us(m.Run(n)), nil }},
				{Name: "copy", Measure: func(context.Context) (float64, error) { return us(m.Copy(n)), nil }},
			},
			Targets: []rows.Target{{Limit: 0.7}},
		})
	}
	return list, nil
}

func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// modifiedRows measure the time to find the modified pages.
func modifiedRows(ctx context.Context, s *session) ([]rows.Row, error) {
	size := int64(1 << 30)
	if s.Quick {
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
	return []rows.Row{{
		Group: "modified", Name: fmt.Sprintf("%d MiB, 1 %% of the pages modified", size>>20), Unit: rows.Milliseconds,
		Sides: []rows.Side{
			{Name: "gaiafs", Prepare: prepare, Measure: func(ctx context.Context) (float64, error) {
				d, err := search.Device(ctx)
				return ms(d), err
			}},
			{Name: "memcmp", Prepare: prepare, Measure: func(context.Context) (float64, error) {
				d, err := search.Compare()
				return ms(d), err
			}},
		},
		Targets: []rows.Target{{Against: "memcmp", Limit: 1 / 1.5}},
	}}, nil
}

// stateDevices is the number of devices to which the targets for memory apply.
const stateDevices = 8

// stateRows measure the memory of versions and page states.
func stateRows(_ context.Context, s *session) ([]rows.Row, error) {
	agreeing, scrambled := page.Index(1<<30>>page.Shift), page.Index(16<<10)
	if s.Quick {
		scrambled = 2 << 10
	}
	ask := func(name string, n page.Index, limit float64, weigh func(page.Index, int) parts.Memory) rows.Row {
		var heap float64
		return rows.Row{
			Group: "state", Name: fmt.Sprintf("%d pages on %d devices, %s", n, stateDevices, name),
			Unit: rows.BytesPerPage, Rounds: 1,
			Sides: []rows.Side{
				{Name: "accounted", Measure: func(context.Context) (float64, error) {
					m := weigh(n, stateDevices)
					heap = m.Heap
					return m.Accounted, nil
				}},
				{Name: "heap", Measure: func(context.Context) (float64, error) { return max(heap, 0), nil }},
			},
			Targets: []rows.Target{{Limit: limit}},
		}
	}
	return []rows.Row{
		ask("all agree", agreeing, 1, parts.Agreeing),
		ask("no two agree", scrambled, 64, parts.Disagreeing),
	}, nil
}
