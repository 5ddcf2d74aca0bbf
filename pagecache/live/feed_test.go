package live

import (
	"context"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEventsPassFilters(t *testing.T) {
	var f Feed
	require.False(t, f.On())
	require.False(t, (*Feed)(nil).On())
	all, reads := f.Watch(Filter{}), f.Watch(Filter{Kinds: []string{"read"}, Path: "dir"})
	pattern, own := f.Watch(Filter{Path: "dir/*.bin"}), f.Watch(Filter{Process: uint32(os.Getpid())})
	require.True(t, f.On())
	asked := 0
	send := func(kind, name string, process uint32) {
		f.Send(Event{Kind: kind, Process: process}, func() []string { asked++; return []string{name} })
	}
	send("read", "dir/a.bin", 1)
	send("write", "dir/b", 1)
	send("read", "directory", uint32(os.Getpid()))
	f.Send(Event{Kind: "transfer"}, nil)
	names := func(w *Watch) (names []string) {
		for _, e := range w.Next(context.Background()) {
			names = append(names, e.Kind+" "+e.File)
		}
		return names
	}
	require.Equal(t, []string{"read dir/a.bin", "write dir/b", "read directory", "transfer "}, names(all))
	require.Equal(t, []string{"read dir/a.bin"}, names(reads))
	require.Equal(t, []string{"read dir/a.bin"}, names(pattern))
	require.Equal(t, []string{"read directory"}, names(own))
	require.Equal(t, 3, asked, "once for each event")
	f.Send(Event{Kind: "map-view"}, func() []string { return []string{"c", "dir/d.bin", "dir/e.bin"} })
	of := func(w *Watch) Event {
		events := w.Next(context.Background())
		require.Len(t, events, 1)
		return events[0]
	}
	require.Equal(t, Event{Kind: "map-view", File: "c", Files: 3}, of(all))
	require.Equal(t, Event{Kind: "map-view", File: "dir/d.bin", Files: 3}, of(pattern), "the first that it accepts")
	for _, w := range []*Watch{all, reads, pattern, own} {
		w.Stop()
	}
	require.False(t, f.On())
	require.Error(t, Filter{Path: "[x"}.Check())
}

// Senders do not wait for a watcher that takes nothing, and events that do not fit are counted.
func TestWatchesAreBounded(t *testing.T) {
	var f Feed
	w := f.Watch(Filter{})
	defer w.Stop()
	for i := range mostEvents + 5 {
		f.Send(Event{Kind: strconv.Itoa(i)}, nil)
	}
	require.Len(t, w.Next(context.Background()), mostEvents)
	f.Send(Event{Kind: "next"}, nil)
	next := w.Next(context.Background())
	require.Len(t, next, 1)
	require.EqualValues(t, 5, next[0].Lost)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	require.Empty(t, w.Next(over))
}

// BenchmarkNobodyWatches measures the cost of a sender while nobody watches.
func BenchmarkNobodyWatches(b *testing.B) {
	f := new(Feed)
	for b.Loop() {
		if f.On() {
			f.Send(Event{}, nil)
		}
	}
}
