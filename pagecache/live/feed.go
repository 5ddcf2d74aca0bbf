package live

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// mostEvents is the most events that wait for a watcher.
const mostEvents = 8192

// FileID identifies a file, like pagecache.FileID.
type FileID struct{ Dev, Ino uint64 }

// Event is something that a mount did. docs/trace.md documents its JSON form.
type Event struct {
	// At is when it began, Micros how long it took.
	At     time.Time `json:"at"`
	Micros float64   `json:"took_us"`
	// Kind is the kind of a kernel request ("read"), of a client request ("map"), "transfer" or "move".
	Kind string `json:"kind"`
	// Process is the kernel's number of the thread that asked, 0 if there was none.
	Process uint32 `json:"process,omitempty"`
	User    uint32 `json:"user"`
	// File is the path below the mountpoint, ID the file. Both are zero if the event is about no file. If it is about
	// several files, File is the first that the filter accepts, and Files their number.
	File  string `json:"file,omitempty"`
	ID    FileID `json:"-"`
	Files int    `json:"files,omitempty"`
	// Device is a name like "gpu0".
	Device string `json:"device,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	// Detail says what a transfer is for, like "acquire in", or where a move goes.
	Detail string `json:"detail,omitempty"`
	// Lost is the number of events that are missing before this one.
	Lost int64 `json:"lost,omitempty"`
}

// Filter selects events. Zero fields accept all events.
type Filter struct {
	Kinds []string `json:"kinds,omitempty"`
	// Process is the number of a thread, or of a process with all its threads.
	Process uint32 `json:"process,omitempty"`
	// Path is the path below the mountpoint of a file, or of a directory with everything below it, or a pattern of
	// path.Match.
	Path string `json:"path,omitempty"`
}

// Check returns an error if the filter is invalid.
func (f Filter) Check() error {
	if _, err := path.Match(f.Path, ""); err != nil {
		return fmt.Errorf("the pattern %q is invalid", f.Path)
	}
	return nil
}

// passes reports whether the filter accepts an event, apart from its path.
func (f *Filter) passes(e *Event) bool {
	if len(f.Kinds) > 0 && !slices.Contains(f.Kinds, e.Kind) {
		return false
	}
	if f.Process == 0 || f.Process == e.Process {
		return true
	}
	if e.Process == 0 {
		return false
	}
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", f.Process, e.Process))
	return err == nil
}

func (f *Filter) passesPath(name string) bool {
	if f.Path == "" || f.Path == "." || name == f.Path || strings.HasPrefix(name, f.Path+"/") {
		return true
	}
	is, _ := path.Match(f.Path, name) // Check reported bad patterns
	return is
}

// Feed gives events to watchers. Its methods may be called from any goroutine. On may be called on nil.
type Feed struct {
	mu      sync.Mutex
	watches atomic.Pointer[[]*Watch] // nil while nobody watches; replaced under mu
}

// On reports whether anybody watches.
func (f *Feed) On() bool { return f != nil && f.watches.Load() != nil }

// Send gives an event to its watchers. names returns the paths of the event's files. It is called in this goroutine,
// and only if a watcher accepts the rest of the event; nil if the event is about no file. Send does not block, except
// in names.
func (f *Feed) Send(e Event, names func() []string) {
	watches := f.watches.Load()
	if watches == nil {
		return
	}
	files := []string{""}
	for _, w := range *watches {
		if !w.filter.passes(&e) {
			continue
		}
		if names != nil {
			files, names = names(), nil
			if len(files) > 1 {
				e.Files = len(files)
			}
		}
		if i := slices.IndexFunc(files, w.filter.passesPath); i >= 0 {
			e.File = files[i]
			w.add(e)
		}
	}
}

// Watch begins to watch the events that filter accepts; Check must accept filter. The caller ends the watch with Stop.
func (f *Feed) Watch(filter Filter) *Watch {
	w := &Watch{feed: f, filter: filter, wake: make(chan struct{}, 1)}
	f.change(func(list []*Watch) []*Watch { return append(list, w) })
	return w
}

// change replaces the list of watches.
func (f *Feed) change(to func([]*Watch) []*Watch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*Watch
	if was := f.watches.Load(); was != nil {
		list = slices.Clone(*was)
	}
	if list = to(list); len(list) == 0 {
		f.watches.Store(nil)
	} else {
		f.watches.Store(&list)
	}
}

// Watch is one watcher's queue of events.
type Watch struct {
	feed   *Feed         // immutable
	filter Filter        // immutable
	wake   chan struct{} // has an element when events may wait

	mu     sync.Mutex
	events []Event // protected by mu
	lost   int64   // events lost since the last one that fitted; protected by mu
}

func (w *Watch) add(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.events) >= mostEvents {
		w.lost++
		return
	}
	e.Lost, w.lost = w.lost, 0
	w.events = append(w.events, e)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Next waits for events and returns all that wait. It returns none when ctx ends.
func (w *Watch) Next(ctx context.Context) []Event {
	for {
		w.mu.Lock()
		events := w.events
		w.events = nil
		w.mu.Unlock()
		if len(events) > 0 {
			return events
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// Stop ends the watch.
func (w *Watch) Stop() {
	w.feed.change(func(list []*Watch) []*Watch {
		return slices.DeleteFunc(list, func(other *Watch) bool { return other == w })
	})
}
