package residency

import (
	"context"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// turns has clients of one tenant take turns on a device with four granules.
type turns struct {
	*testing.T
	d *Device
}

func newTurns(t *testing.T, pinned int64) turns {
	d, _ := newPinnedDevice(t, 4, pinned)
	d.SetQuantum(testQuantum)
	return turns{t, d}
}

// ask asks for all four granules of a file.
func (v turns) ask(k *key, c Client, patience time.Duration) (*Grant, error) {
	return v.d.Grant(context.Background(), []Want{k.want(0, 4)}, Asking{Client: c, Patience: patience})
}

// uses has a client bring all four granules of a file in brackets of one, so that it becomes hungry, and gets a quantum
// if it may. It returns the last bracket.
func (v turns) uses(k *key, c Client) (last *Grant) {
	v.Helper()
	for i := range page.Index(4) {
		if last != nil {
			last.Free()
		}
		g, err := v.d.Grant(context.Background(), []Want{k.want(i, i+1)}, Asking{Client: c, Patience: patient})
		require.NoError(v, err)
		time.Sleep(2 * time.Millisecond)
		g.Ready()
		last = g
	}
	return last
}

// holds returns two files. Client 1 has a quantum, a bracket of the first file, and all the memory; 2 had the other.
func (v turns) holds() (a, b *key, g *Grant) {
	a, b = newKey(v.T, v.d), newKey(v.T, v.d)
	v.uses(b, 2).Free()
	g = v.uses(a, 1)
	require.True(v, v.d.hasQuantum(&Asking{Client: 1}))
	return a, b, g
}

// timed returns how long f takes.
func timed(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

// TestWaitForAQuantumIsBounded: a client waits for another one's quantum, and no longer.
func TestWaitForAQuantumIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 8)
		a, b, g := v.holds()
		took := timed(func() {
			got, err := v.ask(b, 2, patient)
			require.NoError(t, err)
			require.Contains(t, b.tiers(), TierHost, "the open bracket keeps its memory")
			got.Free()
		})
		require.Greater(t, took, 10*time.Millisecond)
		require.LessOrEqual(t, took, 3*testQuantum/2)
		require.Len(t, a.tiers(), 1, "the rest has left, once the quantum was over")
		require.NotZero(t, v.d.Status().Quanta.Waits)
		g.Free()
	})
}

// TestIdleClientGivesItsQuantumUp: a client that ends its bracket, as one does that is killed, holds nobody up.
func TestIdleClientGivesItsQuantumUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 8)
		_, b, g := v.holds()
		g.Free()
		require.LessOrEqual(t, timed(func() {
			got, err := v.ask(b, 2, patient)
			require.NoError(t, err)
			require.Equal(t, []Tier{TierVRAM, TierVRAM, TierVRAM, TierVRAM}, b.tiers())
			got.Free()
		}), 3*time.Millisecond)
	})
}

// TestWaitForAQuantumAndPatience: nobody fails because others have a quantum. Half of the patience is for quanta. A
// bracket within another one does not wait for them, and a cancelled one ends at once.
func TestWaitForAQuantumAndPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 8)
		_, b, g := v.holds()
		require.LessOrEqual(t, timed(func() {
			got, err := v.ask(b, 2, 4*time.Millisecond)
			require.NoError(t, err)
			got.Free()
		}), 4*time.Millisecond)
		require.Zero(t, timed(func() {
			got, err := v.d.Grant(context.Background(), []Want{b.want(0, 4)}, Asking{Client: 2, Nested: true})
			require.NoError(t, err)
			got.Free()
		}))
		g.Free()
	})
}

// TestCancelledWaitForAQuantum: who gives up leaves the line, and others are served.
func TestCancelledWaitForAQuantum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 0)
		_, b, g := v.holds()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Millisecond)
		defer cancel()
		_, err := v.d.Grant(ctx, []Want{b.want(0, 4)}, Asking{Client: 2, Patience: patient})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, v.d.Status().Waiting)
		_, err = v.ask(b, 2, 20*time.Millisecond)
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		g.Free()
		got, err := v.ask(b, 2, patient)
		require.NoError(t, err)
		got.Free()
	})
}

// TestNoQuantaAmongTenants: a tenant that is below its share does not wait for another tenant's client.
func TestNoQuantaAmongTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 8)
		_, b, g := v.holds()
		require.Zero(t, timed(func() {
			got, err := v.d.Grant(context.Background(), []Want{b.want(0, 2)},
				Asking{By: Tenant{User: 7}, Client: 3, Patience: patient})
			require.NoError(t, err)
			require.Equal(t, []Tier{TierVRAM, TierVRAM}, b.tiers())
			got.Free()
		}))
		g.Free()
	})
}

// TestWhatFitsTakesNoTurns: programs that fit together never wait, and may keep brackets.
func TestWhatFitsTakesNoTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newTurns(t, 0)
		a, b := newKey(t, v.d), newKey(t, v.d)
		for range 10 {
			for c, k := range []*key{a, b} {
				g, err := v.d.Grant(context.Background(), []Want{k.want(0, 2)},
					Asking{Client: Client(c + 1), Patience: patient})
				require.NoError(t, err)
				require.True(t, g.MayKeep())
				g.Ready()
				g.Free()
			}
		}
		require.Zero(t, v.d.Status().Quanta)
	})
}
