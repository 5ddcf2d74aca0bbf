package mover

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestOffers: a Fill is offered as much as its device can take soon. What is read for it may be far more: it may want
// only a few bytes of each page.
func TestOffers(t *testing.T) {
	p := new(Fill)
	offer := func() bool {
		_, ok := p.Offer(func() []page.Range { return []page.Range{{End: PieceBytes >> page.Shift}} })
		return ok
	}
	const each = 512 << 10
	n := 0
	for range 100 { // readers of several Fills, each with a piece
		require.True(t, offer(), "nothing has come yet")
		n++
	}
	for ; n > 0; n-- {
		p.inbox.came(each)
	}
	for int64(n+100) < mostInbox/each {
		require.True(t, offer())
		n++
	}
	require.False(t, offer(), "what has come and what is on its way is enough")
	p.inbox.came(0)
	require.True(t, offer(), "one share does not come")
	p.inbox.took(each)
	require.True(t, offer(), "the device has one share")
	require.False(t, offer())
	_, ok := new(Fill).Offer(func() []page.Range { return nil })
	require.False(t, ok, "it wants none of the pages")
}
