package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const (
	// updateTarget is the longest time in ms until an update of 1 % is seen.
	updateTarget = 20
	// tornAcquires and tornTime bound how long versions are watched.
	tornAcquires = 100_000
	tornTime     = 15 * time.Second
	// tornSize is the size of each of the two files of the test.
	tornSize = 64 << 10
)

// updater is a file that a trainer on a GPU changes, and a reader's view of it on the same GPU.
type updater struct {
	s     *session
	g     gpu
	n     int64
	f     *os.File
	m     *gaiafs.Mapping
	v     *gaiafs.View
	round int
}

// updateRows let a trainer publish new weights in a group, and a reader's view acquire them.
func updateRows(_ context.Context, s *session) ([]rows.Row, error) {
	status, err := s.mount.status()
	if err != nil {
		return nil, err
	}
	// The mapping and the view are on one GPU.
	u := &updater{s: s, g: s.gpus[0], n: min(s.size, status.Devices[0].Memory/20*9) &^ (pageSize - 1)}
	const name = "update"
	if err := s.paintedFile(name, u.n); err != nil {
		return nil, err
	}
	if u.f, err = s.opened(name); err != nil {
		return nil, err
	}
	if u.m, err = s.mapped(name, u.n, readWrite, u.g); err != nil {
		return nil, err
	}
	if u.v, err = gaiafs.MapView([]*os.File{u.f}, []gaiafs.Segment{{Length: u.n}}, u.g.device()); err != nil {
		return nil, err
	}
	s.later(func() { _ = u.v.Close() })
	var list []rows.Row
	for _, c := range []struct {
		name string
		step int64
	}{{"scattered", 100 * pageSize}, {"contiguous", pageSize}} {
		var releases []float64 // durations in ms
		list = append(list, rows.Row{
			Group: "update", Name: fmt.Sprintf("1 %% of %s, %s pages, seen by a view", sizeText(u.n), c.name),
			Unit: rows.Milliseconds, Targets: []rows.Target{{Limit: updateTarget}},
			Sides: []rows.Side{{
				Name: "gaiafs",
				Prepare: func(context.Context) error {
					err := u.m.Flush(0, u.n) // what was released before goes home
					if err == nil {
						_, err = u.v.Acquire(0, u.n)
					}
					return err
				},
				Measure: func(context.Context) (float64, error) {
					released, took, err := u.update(c.step)
					releases = append(releases, ms(released))
					return ms(took), err
				},
			}},
			Note: func() string {
				return fmt.Sprintf("of which the release took %.3g ms", rows.Summarise(releases).Median)
			},
		})
	}
	return append(list, tornRow(s)), nil
}

// update stores into one page in a hundred, each step bytes after the last. It returns how long the release took, and
// the time from the start of the release until the view had everything.
func (u *updater) update(step int64) (released, took time.Duration, err error) {
	changed := max(u.n/(100*pageSize), 1)
	group, err := gaiafs.Begin(u.m.Whole())
	if err != nil {
		return 0, 0, err
	}
	if err := u.g.touch(addressOf(u.m)+address(u.round%pageSize), step, changed, 1); err != nil {
		return 0, 0, errors.Join(err, group.Abort())
	}
	start := time.Now()
	version, err := group.Release()
	if err != nil {
		return 0, 0, err
	}
	released = time.Since(start)
	seen, err := gaiafs.AcquireAtLeast(version, time.Minute, u.v.Whole())
	took = time.Since(start)
	if err == nil && seen < version {
		err = fmt.Errorf("the view is at version %d, and %d was released", seen, version)
	}
	if err != nil {
		return 0, 0, err
	}
	off, size := window(u.round, u.n)
	u.round++
	return released, took, u.s.check.same(u.g, addressOf(u.v.Mapping)+address(off), u.f, off, size)
}

// torn is two files that a writer changes in groups, and a view of both on each GPU.
type torn struct {
	s                         *session
	files                     [2]*os.File
	maps                      [2]*gaiafs.Mapping
	views                     []*gaiafs.View
	acquires, versions, count atomic.Int64
}

// tornRow counts acquires after which a view shows bytes of several versions.
func tornRow(s *session) rows.Row {
	x := &torn{s: s}
	return rows.Row{
		Group: "update", Name: "torn versions seen by views beside a writer", Unit: rows.Count, Rounds: 1,
		Targets: []rows.Target{{Limit: 0}},
		Sides: []rows.Side{{
			Name:    "gaiafs",
			Prepare: func(context.Context) error { return x.open() },
			Measure: func(ctx context.Context) (float64, error) {
				err := x.run(ctx)
				return float64(x.count.Load()), err
			},
		}},
		Note: func() string {
			return fmt.Sprintf("%d acquires by %d readers, %d versions of two files", x.acquires.Load(), len(x.views),
				x.versions.Load())
		},
	}
}

func (x *torn) open() (err error) {
	for i := range x.files {
		name := fmt.Sprintf("torn-%d", i)
		if err := x.s.paintedFile(name, tornSize); err != nil {
			return err
		}
		if x.files[i], err = x.s.opened(name); err != nil {
			return err
		}
		if x.maps[i], err = x.s.mapped(name, tornSize, readWrite, x.s.gpus[0]); err != nil {
			return err
		}
	}
	for _, g := range x.s.gpus {
		v, err := gaiafs.MapView(x.files[:], []gaiafs.Segment{{Length: tornSize}, {File: 1, Length: tornSize}},
			g.device())
		if err != nil {
			return err
		}
		x.s.later(func() { _ = v.Close() })
		x.views = append(x.views, v)
	}
	return nil
}

// run makes the writer publish versions until the readers have seen enough, or the time is over.
func (x *torn) run(ctx context.Context) error {
	limit := tornTime
	if x.s.emulated {
		limit = time.Second / 2
	}
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	var readers sync.WaitGroup
	errs := make([]error, len(x.views))
	for i := range x.views {
		readers.Go(func() { errs[i] = x.look(ctx, i) })
	}
	ended := make(chan struct{})
	go func() {
		readers.Wait()
		close(ended)
	}()
	var err error
	for seed := byte(1); err == nil && ctx.Err() == nil && !isClosed(ended); seed++ {
		err = x.publish(seed)
	}
	stop()
	<-ended
	return errors.Join(append(errs, err)...)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// publish stores a version into both files.
func (x *torn) publish(seed byte) error {
	group, err := gaiafs.Begin(x.maps[0].Whole(), x.maps[1].Whole())
	if err != nil {
		return err
	}
	for _, m := range x.maps {
		if err := x.s.gpus[0].paint(addressOf(m), stripes{size: tornSize, width: tornSize, writers: 1, seed: seed},
			1); err != nil {
			return errors.Join(err, group.Abort())
		}
	}
	if _, err = group.Release(); err == nil {
		x.versions.Add(1)
	}
	return err
}

// look acquires the view of a GPU again and again, and counts the times that it shows several versions.
func (x *torn) look(ctx context.Context, i int) error {
	v, p := x.views[i], make([]byte, 2*tornSize)
	for ctx.Err() == nil && x.acquires.Add(1) <= tornAcquires {
		if _, err := v.Acquire(0, v.Len()); err != nil {
			return err
		}
		if err := x.s.gpus[i].copyOut(p, addressOf(v.Mapping)); err != nil {
			return err
		}
		seed := p[0] - painted(0, 0)
		if wrong(p[:tornSize], 0, seed)+wrong(p[tornSize:], 0, seed) > 0 {
			x.count.Add(1)
		}
	}
	return nil
}
