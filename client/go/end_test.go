package gaiafs

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
)

// ending starts a daemon that answers END by calling answer.
func ending(t *testing.T, answer func(ctx context.Context, r control.EndRequest) error) *daemon {
	return startDaemon(t, &controltest.Cache{}, func(o *control.Options) { o.End = answer })
}

func TestEnd(t *testing.T) {
	long := strings.Repeat("x", 3*maxFrame)
	d := ending(t, func(_ context.Context, r control.EndRequest) error {
		if !r.Force {
			return r.Say([]byte("refused\n"), true)
		}
		return errors.Join(r.Say([]byte(long+"\n"), false), r.Say([]byte("last\n"), true))
	})
	last, err := End(t.Context(), d.dir, true, func(first []byte) (bool, error) {
		require.Equal(t, long, string(first))
		return true, nil
	})
	require.NoError(t, err)
	require.Equal(t, "last", string(last))

	for _, want := range []error{nil, syscall.EBUSY} {
		asked := 0
		last, err = End(t.Context(), d.dir, false, func(first []byte) (bool, error) {
			asked++
			require.Equal(t, "refused", string(first))
			return false, want
		})
		require.Equal(t, want, err)
		require.Nil(t, last)
		require.Equal(t, 1, asked)
	}
}

// A daemon that ends without its last document has not said that all is well.
func TestEndWithoutALastWord(t *testing.T) {
	d := ending(t, func(ctx context.Context, r control.EndRequest) error {
		if err := r.Say([]byte("ready\n"), false); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	})
	_, err := End(t.Context(), d.dir, false, func([]byte) (bool, error) {
		go d.server.Close()
		return true, nil
	})
	require.ErrorIs(t, err, syscall.ENOTCONN)

	_, err = End(t.Context(), d.dir, false, func([]byte) (bool, error) { panic("nobody answered") })
	require.Error(t, err)
}

func TestEndIsCutShort(t *testing.T) {
	went := make(chan struct{})
	d := ending(t, func(ctx context.Context, r control.EndRequest) error {
		defer close(went)
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := End(ctx, d.dir, false, func([]byte) (bool, error) { panic("nobody answered") })
	require.ErrorIs(t, err, syscall.ECANCELED)
	select {
	case <-went:
	default:
	}
}
