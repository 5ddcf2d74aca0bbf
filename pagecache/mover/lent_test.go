package mover

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// thinTarget gets 1000 bytes of each 1024, which are adjacent in device memory: many copies that could be joined.
type thinTarget struct {
	*flat
}

func (r thinTarget) Placer() Placer { return r }

func (r thinTarget) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	for i := range int64(len(buf) / 1024) {
		list = append(list, gpubackend.Copy{Mem: r.mem, Off: (pages.Start.Offset()/1024 + i) * 1000,
			Host: buf[i*1024:][:1000]})
	}
	return list
}

// hostBytes returns what copies bring, one after the other.
func hostBytes(copies []gpubackend.Copy) (all []byte) {
	for _, c := range copies {
		for _, row := range c.Rows() {
			all = append(all, row...)
		}
	}
	return all
}

// thin returns the bytes that a thinTarget gets of buf.
func thin(buf []byte) (all []byte) {
	for ; len(buf) > 0; buf = buf[1024:] {
		all = append(all, buf[:1000]...)
	}
	return all
}

// TestSharesDoNotChangeTheBuffer: the Fill that read a piece, and those that get shares of it, join no copies in the
// buffer, also if there is no other one to gather them in. It is given back once, after all of them.
func TestSharesDoNotChangeTheBuffer(t *testing.T) {
	f := newFiller(t, 4<<20)
	own, other, few := f.fill(), f.fill(), f.fill()
	for _, p := range []*Fill{own, other, few} {
		p.Into = thinTarget{f.into}
	}
	f.dev.Lose() // it has no buffers
	const pages = 16
	want := f.home.data[:pages*page.Size]
	all := []page.Range{{End: pages}}
	buf, back := bytes.Clone(want), 0
	x := &Piece{buf: buf, giveBack: func() { back++ },
		shares: []Share{{other, all}, {few, []page.Range{{Start: 3, End: 4}}}}}
	x.setPages(all)
	for _, s := range x.shares {
		s.Fill.inbox.moved = make(chan struct{}, 1)
	}
	x.share()
	require.NoError(t, own.prepare(x))
	require.Len(t, other.ready, 1)
	require.Len(t, few.ready, 1)
	y, z := other.ready[0], few.ready[0]
	require.True(t, bytes.Equal(want, buf), "the buffer has changed")
	require.True(t, bytes.Equal(thin(want), hostBytes(x.copies)))
	require.True(t, bytes.Equal(thin(want), hostBytes(y.copies)))
	require.True(t, bytes.Equal(thin(want[3*page.Size:][:page.Size]), hostBytes(z.copies)))
	require.EqualValues(t, len(thin(want)), y.memory)
	require.EqualValues(t, len(buf)/3, z.memory, "it keeps all of the buffer")
	for _, p := range []*Piece{y, x, z} {
		require.Zero(t, back)
		p.giveBack()
	}
	require.Equal(t, 1, back)
}

// TestPace: a worker waits for a Fill that is behind, for no more than a part of its time. It does not wait for one
// that is stuck, and not if its own Fill ends.
func TestPace(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for name, c := range map[string]struct {
		ctx          context.Context
		err          error
		began, quiet time.Duration // ago
		next         int
		waits        bool
	}{
		"it is behind":        {ctx: t.Context(), began: time.Hour, waits: true},
		"the time is used up": {ctx: t.Context()},
		"it is stuck":         {ctx: t.Context(), began: time.Hour, quiet: stuckTime},
		"cancelled":           {ctx: ended, began: time.Hour},
		"failed":              {ctx: t.Context(), err: gpubackend.ErrDeviceLost, began: time.Hour},
		"nothing is left":     {ctx: t.Context(), began: time.Hour, next: 2},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			behind := new(Fill)
			behind.inbox.bytes, behind.inbox.sent = mostInbox, now.Add(time.Hour)
			if c.quiet > 0 {
				behind.inbox.sent = now.Add(-c.quiet)
			}
			p := &Fill{Pieces: make([]Piece, 2), next: max(c.next, 1), ctx: c.ctx, err: c.err, workers: 1, leastCall: 1,
				began: now.Add(-c.began)}
			done := make(chan struct{})
			go func() {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.paceLocked(behind)
				close(done)
			}()
			if c.waits {
				require.Eventually(t, func() bool { return p.paced.Load() > 0 }, time.Minute, time.Millisecond)
				select {
				case <-done:
					t.Error("it does not wait")
				case <-time.After(10 * time.Millisecond):
				}
				behind.inbox.took(mostInbox)
			}
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Fatal("it waits")
			}
		})
	}
}
