package mover

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestOffers: a Fill is offered as much as its device can be given soon. What is read for it may be far more: pages of
// which it wants a few bytes.
func TestOffers(t *testing.T) {
	p := new(Fill)
	offer := func() bool {
		_, ok := p.Offer(func() []page.Range { return []page.Range{{End: PieceBytes >> page.Shift}} })
		return ok
	}
	const each = 512 << 10
	n := 0
	for range 100 { // readers of several Fills, each with a piece
		require.True(t, offer(), "nothing is there yet")
		n++
	}
	for ; n > 0; n-- {
		p.inbox.came(each)
	}
	for int64(n+100) < mostInbox/each {
		require.True(t, offer())
		n++
	}
	require.False(t, offer(), "with what is on its way it is enough")
	p.inbox.came(0)
	require.True(t, offer(), "one does not come")
	p.inbox.took(each)
	require.True(t, offer(), "the device has one")
	require.False(t, offer())
	_, ok := new(Fill).Offer(func() []page.Range { return nil })
	require.False(t, ok, "it wants none of them")
}
