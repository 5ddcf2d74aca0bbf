package mover

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// disk is a disk whose reads take turns and last as long as their way says.
type disk struct {
	way           ColdWay
	past, through float64 // bytes per second
	at            time.Time
	took          [2]int // reads past the page cache, and through it
}

// read reads so many pieces of 2 MiB, 16 at a time.
func (d *disk) read(pieces int, err error) {
	var under []*round
	for pieces > 0 || len(under) > 0 {
		for ; pieces > 0 && len(under) < DirectReads; pieces-- {
			under = append(under, d.way.begin(PieceBytes, d.at))
		}
		r := under[0]
		under = under[1:]
		speed := d.past
		if r.through {
			d.took[1]++
			speed = d.through
		} else {
			d.took[0]++
		}
		d.at = d.at.Add(time.Duration(PieceBytes / speed * float64(time.Second)))
		d.way.end(r, d.at, err)
	}
}

// TestColdWayIsTheFasterOne: after a round of each, ColdWay uses the faster way, and tries the other one now and then.
func TestColdWayIsTheFasterOne(t *testing.T) {
	const perRound, first = roundBytes / PieceBytes, firstBytes / PieceBytes
	for _, x := range []struct {
		past, through float64
		want          int
	}{{1e9, 2e9, 1}, {2e9, 1e9, 0}, {1e9, 1.05e9, 0}, {1e9, 1.2e9, 1}} {
		d := disk{past: x.past, through: x.through, at: time.Unix(1, 0)}
		d.read(first, nil)
		require.Equal(t, [2]int{first, 0}, d.took)
		d.read(first, nil)
		require.Equal(t, [2]int{first, first}, d.took)
		d.took = [2]int{}
		for range 62 { // in parts, with pauses that are not the disk's time
			d.at = d.at.Add(time.Hour)
			d.read(perRound/2, nil)
			d.at = d.at.Add(time.Hour)
			d.read(perRound-perRound/2, nil)
		}
		require.Equal(t, 60*perRound, d.took[x.want], "%+v", x)
		d.past, d.through = x.through, x.past
		d.took = [2]int{}
		d.read(1000*perRound, nil)
		switch {
		case x.past > worthThrough*x.through: // now past the page cache is slower by far
			require.Greater(t, d.took[1], 900*perRound, "%+v", x)
		case x.through > worthThrough*x.past:
			require.Greater(t, d.took[0], 900*perRound, "%+v", x)
		}
	}
}

// TestFailedReadsSayNothing: failed reads say nothing about a disk's speed.
func TestFailedReadsSayNothing(t *testing.T) {
	d := disk{past: 1e9, through: 1e9, at: time.Unix(1, 0)}
	d.read(10*roundBytes/PieceBytes, errors.New("planned"))
	d.way.mu.Lock()
	defer d.way.mu.Unlock()
	require.Zero(t, d.way.speeds)
}
