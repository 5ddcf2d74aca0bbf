package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLogOfManyLikeEvents: the log has a few lines and a count of each kind, and loses nothing of other kinds and
// users.
func TestLogOfManyLikeEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		q := newQuietLog(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
		log := slog.New(q)
		noisy := log.With("pid", 1, "uid", 7)
		for range 10_000 {
			noisy.Warn("client dropped", "error", "nonsense")
		}
		log.With("uid", 8).Warn("client dropped")
		log.Warn("client dropped", "uid", 9)
		log.Error("client dropped")
		for range 100 {
			log.Debug("request")
		}
		count := func(what string) int { return strings.Count(out.String(), what) }
		require.Equal(t, quietMost, count("uid=7"))
		require.Equal(t, 1, count("uid=8"))
		require.Equal(t, 1, count("uid=9"))
		require.Equal(t, 1, count("level=ERROR"))
		require.Equal(t, 100, count("request"))

		synctest.Wait()
		noisy.Warn("client dropped")
		require.NotContains(t, out.String(), "more_like_this", "the window has not ended")
		q.flush()
		require.Contains(t, out.String(), "level=WARN msg=\"client dropped\" more_like_this=9981 uid=7\n")
		require.Equal(t, 1, count("more_like_this"))

		out.Reset()
		for range quietMost + 3 {
			noisy.Warn("client dropped")
		}
		time.Sleep(quietWindow + 1) // of the bubble's clock
		synctest.Wait()
		require.Contains(t, out.String(), "more_like_this=3 uid=7\n")
		noisy.Warn("client dropped")
		require.Equal(t, quietMost+2, count("uid=7"), "a new window")

		out.Reset()
		for i := range 2 * mostKinds {
			log.Info(strings.Repeat("x", i))
		}
		q.flush()
		require.Less(t, count("\n"), mostKinds+quietMost+2)
	})
}
