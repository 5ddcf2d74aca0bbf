package control

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/live"
)

// The subject of a request is looked up when it comes. So a request that came before anybody watched is not shown.
func TestRequestsFromBeforeTheWatchAreNotShown(t *testing.T) {
	var feed live.Feed
	s := &session{server: &Server{opts: Options{Live: &feed}}}
	before := s.about(typeEnd, nil)
	w := feed.Watch(live.Filter{})
	defer w.Stop()
	s.show(typeEnd, before, time.Now())
	s.show(typeStatus, s.about(typeStatus, nil), time.Now())
	events := w.Next(context.Background())
	require.Len(t, events, 1)
	require.Equal(t, "status", events[0].Kind)
}
