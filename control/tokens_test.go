package control

import (
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache"
)

// openSource is a source of which a token needs only whether it is open.
type openSource struct {
	pagecache.Source
	open bool
}

func (s *openSource) Open() bool { return s.open }

func TestTokenWorksOnce(t *testing.T) {
	table := newTokens(time.Minute)
	defer table.close()
	src := &openSource{open: true}
	token, err := table.give(src)
	require.NoError(t, err)
	other, err := table.give(src)
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
	token, err := table.give(src)
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
		first, err := table.give(src)
		require.NoError(t, err)
		time.Sleep(20 * time.Second)
		second, err := table.give(src)
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		_, ok := table.redeem(first)
		require.False(t, ok, "at 30 s")
		time.Sleep(9 * time.Second)
		_, ok = table.redeem(second)
		require.True(t, ok, "after 19 s")

		_, err = table.give(src)
		require.NoError(t, err)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Zero(t, table.count(), "forgotten without anybody asking")
		require.Nil(t, table.order)
	})
}

func TestTokensAreBounded(t *testing.T) {
	table := newTokens(time.Minute)
	src := &openSource{open: true}
	oldest, err := table.give(src)
	require.NoError(t, err)
	for range maxTokens {
		_, err := table.give(src)
		require.NoError(t, err)
	}
	require.Equal(t, maxTokens, table.count())
	require.Len(t, table.order, maxTokens)
	_, ok := table.redeem(oldest)
	require.False(t, ok)
	table.close()
	_, err = table.give(src)
	require.ErrorIs(t, err, syscall.ESHUTDOWN)
	_, ok = table.redeem(oldest)
	require.False(t, ok)
}
