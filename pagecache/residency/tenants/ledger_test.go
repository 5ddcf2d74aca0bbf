package tenants

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// jain is Jain's index of fairness: 1 if all get the same.
func jain(x []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, v := range x {
		sum, squares = sum+v, squares+v*v
	}
	return sum * sum / (float64(len(x)) * squares)
}

// device is memory of one-byte extents, whose owners give up one after the other.
type device struct {
	*Ledger
	free int64
	got  map[ID]int64
}

// take gives a tenant an extent, and reports whether the tenant got one. If the tenant itself is the victim and owns
// nothing, it gets none: its extent is made elsewhere.
func (d *device) take(id ID) bool {
	d.Add(id, 1)
	for d.free == 0 || d.Over(id) {
		victim := d.Victims(id)[0]
		if victim == id && d.got[id] == 0 {
			d.Add(id, -1)
			return false
		}
		d.Add(victim, -1)
		d.got[victim]--
		d.free++
	}
	d.free--
	d.got[id]++
	return true
}

// TestUnequalTenantsGetTheirShares: tenants with various weights and appetites all want more than there is. By Jain's
// index they end up with their weights' shares, whoever came first.
func TestUnequalTenantsGetTheirShares(t *testing.T) {
	for seed := range uint64(8) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		const total = 1000
		var list []Tenant
		n := 2 + rnd.IntN(7)
		for i := range n {
			list = append(list, Tenant{ID: ID(fmt.Sprint("t", i)), Weight: 1 + 4*rnd.Float64()})
		}
		l, err := New(total, list)
		require.NoError(t, err)
		d := &device{l, total, make(map[ID]int64)}
		for range total {
			d.take("t0") // comes first, and has it all
		}
		require.EqualValues(t, total, l.Owned("t0"))
		for range 15 * total {
			i := min(rnd.IntN(n), rnd.IntN(n)) // some ask more often
			d.take(list[i].ID)
		}
		var x []float64
		for _, of := range list {
			require.Equal(t, d.got[of.ID], l.Owned(of.ID))
			x = append(x, float64(l.Owned(of.ID))/of.Weight)
		}
		require.GreaterOrEqual(t, jain(x), 0.99, "seed %d: %v", seed, x)
	}
}

// TestVictims: the tenant furthest above its share gives way, with the request counted. Guaranteed memory stays. A
// tenant at its maximum gives up its own.
func TestVictims(t *testing.T) {
	l, err := New(100, []Tenant{{ID: "heavy", Weight: 3}, {ID: "safe", Weight: 1, Guaranteed: 40},
		{ID: "small", Weight: 1, Most: 10}})
	require.NoError(t, err)
	l.Add("heavy", 50)
	l.Add("other", 30)
	l.Add("safe", 40)
	require.EqualValues(t, 60, l.Share("heavy"))
	require.EqualValues(t, 20, l.Share("other"))
	require.EqualValues(t, 40, l.Share("safe"), "the guarantee, and not a fifth")
	require.Equal(t, []ID{"other", "heavy"}, l.Victims("heavy"))
	l.Add("heavy", 30)
	require.Equal(t, []ID{"heavy", "other"}, l.Victims("heavy"), "itself")
	l.Add("safe", 2)
	require.Contains(t, l.Victims("heavy"), ID("safe"), "it owns more than its guarantee")
	l.Add("small", 10)
	require.False(t, l.Over("small"))
	l.Add("small", 1)
	require.Equal(t, []ID{"small"}, l.Victims("small"))
	l.Add("small", -11)
	l.Add("safe", -42)
	require.Equal(t, []Account{{"heavy", 80, 75, 0}, {"other", 30, 25, 0}}, l.Accounts())

	// Without configuration all tenants are equal.
	l, err = New(90, nil)
	require.NoError(t, err)
	l.Add("a", 80)
	require.EqualValues(t, 90, l.Share("a"))
	require.EqualValues(t, 45, l.Share("b"))
	l.Add("b", 20)
	require.Equal(t, []ID{"a", "b"}, l.Victims("b"))
}

func TestWhatMakesNoSenseIsRefused(t *testing.T) {
	for says, list := range map[string][]Tenant{
		"a tenant needs a name":          {{Weight: 1}},
		"two tenants \"a\"":              {{ID: "a", Weight: 1}, {ID: "a", Weight: 1}},
		"the weight 0 is not positive":   {{ID: "a"}},
		"the weight NaN is not positive": {{ID: "a", Weight: math.NaN()}},
		"must not be negative":           {{ID: "a", Weight: 1, Most: -1}},
		"more is guaranteed to it than":  {{ID: "a", Weight: 1, Guaranteed: 5, Most: 4}},
		"more is guaranteed to tenants than": {{ID: "a", Weight: 1, Guaranteed: 60},
			{ID: "b", Weight: 1, Guaranteed: 60}},
	} {
		_, err := New(100, list)
		require.ErrorContains(t, err, says)
	}
}
