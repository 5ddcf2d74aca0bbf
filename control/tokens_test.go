package control

import (
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache"
)

// openSource is a Source with only Open, which is all that a token needs.
type openSource struct {
	pagecache.Source
	open bool
}

func (s *openSource) Open() bool { return s.open }

func TestTokenWorksOnce(t *testing.T) {
	table := newTokens(time.Minute)
	defer table.close()
	src := &openSource{open: true}
	token, err := table.give(src, 1)
	require.NoError(t, err)
	other, err := table.give(src, 1)
	require.NoError(t, err)
	require.NotEqual(t, token, other)

	forged := token
	forged[15] ^= 1
	_, ok := table.redeem(forged)
	require.False(t, ok)
	got, ok := table.redeem(token)
	require.True(t, ok)
	require.Same(t, src, got)
	_, ok = table.redeem(token)
	require.False(t, ok, "a replay")
	require.Equal(t, 1, table.count())
}

func TestTokenEndsWithItsDescriptor(t *testing.T) {
	table := newTokens(time.Minute)
	defer table.close()
	src := &openSource{open: true}
	token, err := table.give(src, 1)
	require.NoError(t, err)
	src.open = false
	_, ok := table.redeem(token)
	require.False(t, ok)
}

func TestTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTokens(30 * time.Second)
		defer table.close()
		src := &openSource{open: true}
		first, err := table.give(src, 1)
		require.NoError(t, err)
		time.Sleep(20 * time.Second)
		second, err := table.give(src, 1)
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		_, ok := table.redeem(first)
		require.False(t, ok, "at 30 s")
		time.Sleep(9 * time.Second)
		_, ok = table.redeem(second)
		require.True(t, ok, "after 19 s")

		_, err = table.give(src, 1)
		require.NoError(t, err)
		time.Sleep(61 * time.Second)
		synctest.Wait()
		require.Zero(t, table.count(), "forgotten without another call")
		require.Empty(t, table.orders)
		require.Zero(t, table.ordinary)
	})
}

// TestTokensAreBounded: a user who asks without end loses her own oldest tokens. When many do, those who have most
// lose.
func TestTokensAreBounded(t *testing.T) {
	table := newTokens(time.Minute)
	src := &openSource{open: true}
	root, err := table.give(src, privilegedUser)
	require.NoError(t, err)
	bob, err := table.give(src, 2)
	require.NoError(t, err)
	oldest, err := table.give(src, 1)
	require.NoError(t, err)
	ask := func(user int64) {
		for range userTokens {
			_, err := table.give(src, user)
			require.NoError(t, err)
		}
	}
	ask(1)
	require.Equal(t, userTokens+2, table.count())
	_, ok := table.redeem(oldest)
	require.False(t, ok)
	for user := range int64(maxTokens/userTokens + 2) {
		ask(10 + user)
	}
	require.Equal(t, maxTokens, table.ordinary)
	require.Equal(t, maxTokens+1, table.count())
	for _, token := range [][tokenSize]byte{root, bob} {
		_, ok = table.redeem(token)
		require.True(t, ok)
	}
	last, err := table.give(src, 1)
	require.NoError(t, err)
	table.close()
	_, err = table.give(src, 1)
	require.ErrorIs(t, err, syscall.ESHUTDOWN)
	_, ok = table.redeem(last)
	require.False(t, ok)
}

// TestTokenExpiresBeforeItIsSwept: a token is too old when its time is over, even if nobody has swept it yet.
func TestTokenExpiresBeforeItIsSwept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTokens(30 * time.Second)
		defer table.close()
		token, err := table.give(&openSource{open: true}, 1)
		require.NoError(t, err)
		require.True(t, table.timer.Stop())
		time.Sleep(30 * time.Second)
		_, ok := table.redeem(token)
		require.False(t, ok)
	})
}
