package main

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Users and programs can cause events without end: malformed messages on a connection, a file that changes again and
// again. The log has a few lines for each kind of event, and then one line with the number of further events.
const (
	quietMost   = 20
	quietWindow = 10 * time.Second
)

// quietLog is a handler that passes on at most quietMost records of a kind per quietWindow. A kind is a level, a
// message and a user, so noise from one user hides nothing of another. It passes on all debug records.
type quietLog struct {
	slog.Handler
	user  string
	kinds *logKinds
}

// logKinds is shared by all handlers that are derived from one.
type logKinds struct {
	root slog.Handler

	mu sync.Mutex
	// seen has the kinds of the current windows, at most about mostKinds. Protected by mu.
	seen map[logKind]*logCount
}

// mostKinds bounds the memory for kinds. Kinds beyond it share one count.
const mostKinds = 1000

type logKind struct {
	level   slog.Level
	message string
	user    string
}

type logCount struct {
	n     int
	timer *time.Timer
}

func newQuietLog(h slog.Handler) *quietLog {
	return &quietLog{Handler: h, kinds: &logKinds{root: h, seen: make(map[logKind]*logCount)}}
}

// Handle implements slog.Handler.
func (q *quietLog) Handle(ctx context.Context, r slog.Record) error {
	user := q.user
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "uid" {
			user = a.Value.String()
		}
		return true
	})
	if r.Level >= slog.LevelInfo && !q.kinds.admit(logKind{r.Level, r.Message, user}) {
		return nil
	}
	return q.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (q *quietLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := quietLog{q.Handler.WithAttrs(attrs), q.user, q.kinds}
	for _, a := range attrs {
		if a.Key == "uid" {
			with.user = a.Value.String()
		}
	}
	return &with
}

// WithGroup implements slog.Handler.
func (q *quietLog) WithGroup(name string) slog.Handler {
	return &quietLog{q.Handler.WithGroup(name), q.user, q.kinds}
}

// admit counts a record and reports whether to pass it on.
func (k *logKinds) admit(kind logKind) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.seen[kind]
	if c == nil {
		if len(k.seen) >= mostKinds {
			kind = logKind{level: kind.level, message: "events of many kinds"}
			c = k.seen[kind]
		}
		if c == nil {
			c = &logCount{}
			c.timer = time.AfterFunc(quietWindow, func() { k.end(kind, c) })
			k.seen[kind] = c
		}
	}
	c.n++
	return c.n <= quietMost
}

// end ends the window of a kind and logs how many records were left out.
func (k *logKinds) end(kind logKind, c *logCount) {
	k.mu.Lock()
	if k.seen[kind] == c {
		delete(k.seen, kind)
	}
	k.mu.Unlock()
	if c.n <= quietMost {
		return
	}
	r := slog.NewRecord(time.Now(), kind.level, kind.message, 0)
	r.AddAttrs(slog.Int("more_like_this", c.n-quietMost))
	if kind.user != "" {
		r.AddAttrs(slog.String("uid", kind.user))
	}
	_ = k.root.Handle(context.Background(), r)
}

// flush ends all windows.
func (q *quietLog) flush() {
	q.kinds.mu.Lock()
	seen := q.kinds.seen
	q.kinds.seen = make(map[logKind]*logCount)
	q.kinds.mu.Unlock()
	for kind, c := range seen {
		if c.timer.Stop() {
			q.kinds.end(kind, c)
		}
	}
}
