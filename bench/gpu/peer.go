package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// peerRows bring pages to a GPU that another GPU has.
func peerRows(_ context.Context, s *session) ([]rows.Row, error) {
	if len(s.gpus) < 2 {
		return []rows.Row{{Group: "peer", Name: "pages from the other GPU", Skip: "there is one"}}, nil
	}
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	has, wants := s.gpus[0], s.gpus[1]
	whole := min(d.size, s.call)
	if whole > pieceSize {
		whole &^= pieceSize - 1
	}
	const fromHost = "gaiafs, from the host"
	var list []rows.Row
	for _, n := range []int64{whole, 2 << 20, pageSize} {
		var counters map[string]int64
		// from measures how long the second GPU takes to get n bytes, with the first one having all of them or none.
		from := func(name string, peer bool) rows.Side {
			var held, m *gaiafs.Mapping
			return rows.Side{
				Name: name,
				Prepare: func(context.Context) error {
					err := errors.Join(warmUp(s.mount.home(d.name), whole),
						s.mount.forget(d.name, 0, d.size, wants.device()),
						s.mount.forget(d.name, 0, d.size, has.device()))
					if err == nil && peer {
						held, err = s.mount.mapFile(d.name, 0, whole, gaiafs.ProtRead, has.device())
					}
					if err == nil {
						m, err = s.mount.mapFile(d.name, 0, whole, gaiafs.ProtRead, wants.device(), gaiafs.Lazy())
					}
					if err == nil {
						err = m.Advise(0, whole, gaiafs.AdviceRandom) // so that nothing is read ahead
					}
					return err
				},
				Measure: func(context.Context) (float64, error) {
					var took time.Duration
					count, err := s.mount.counted(func() error {
						start := time.Now()
						_, err := m.Acquire(0, n)
						took = time.Since(start)
						return err
					})
					if peer {
						counters = count
					}
					if err == nil && n == whole {
						err = s.check.data(wants, addressOf(m), n, d)
					} else if err == nil {
						f, openErr := s.mount.open(d.name)
						if openErr != nil {
							return 0, openErr
						}
						err = errors.Join(s.check.same(wants, addressOf(m), f, 0, n), f.Close())
					}
					err = errors.Join(err, m.Close())
					if held != nil {
						err = errors.Join(err, held.Close())
						held = nil
					}
					if n < whole {
						return ms(took) * 1e3, err
					}
					return gigabytes(n, took), err
				},
			}
		}
		unit := rows.GBPerSecond
		if n < whole {
			unit = rows.Microseconds
		}
		list = append(list, rows.Row{
			Group: "peer", Name: sizeText(n) + " that the other GPU has", Unit: unit,
			Targets: []rows.Target{{Against: fromHost, Limit: 1}},
			Sides:   []rows.Side{from("gaiafs, from the other GPU", true), from(fromHost, false)},
			Note: func() string {
				var text []string
				for _, name := range slices.Sorted(maps.Keys(counters)) {
					text = append(text, fmt.Sprintf("%s %d", name, counters[name]))
				}
				return "counted in the last round: " + strings.Join(text, ", ")
			},
		})
	}
	return list, nil
}
