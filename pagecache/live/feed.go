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

// mostEvents is how many events wait for a watcher at most.
const mostEvents = 8192

// FileID names a file, as pagecache.FileID.
type FileID struct{ Dev, Ino uint64 }

// Event is something that a mount did. Its JSON form is documented in docs/trace.md.
type Event struct {
	// At is when it began, Micros how long it took.
	At     time.Time `json:"at"`
	Micros float64   `json:"took_us"`
	// Kind is that of a request of the kernel ("read"), of a client ("map"), "transfer" or "move".
	Kind string `json:"kind"`
	// Process is the kernel's number of the thread that asked, 0 where nobody did.
	Process uint32 `json:"process,omitempty"`
	User    uint32 `json:"user"`
	// File is its path below the mountpoint, ID the file: zero where it is about none.
	File string `json:"file,omitempty"`
	ID   FileID `json:"-"`
	// Device is "gpu0", say.
	Device string `json:"device,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	// Detail says what for, of a transfer: "acquire in", say; of a move where to.
	Detail string `json:"detail,omitempty"`
	// Lost is how many events before this one are missing.
	Lost int64 `json:"lost,omitempty"`
}

// Filter says which events are watched. What is zero lets all pass.
type Filter struct {
	Kinds []string `json:"kinds,omitempty"`
	// Process is that of a thread or of the whole process.
	Process uint32 `json:"process,omitempty"`
	// Path is a file's, a directory's with all below, or a pattern as of path.Match, below the mountpoint.
	Path string `json:"path,omitempty"`
}

// Check says what is wrong with it.
func (f Filter) Check() error {
	if _, err := path.Match(f.Path, ""); err != nil {
		return fmt.Errorf("the pattern %q cannot be read", f.Path)
	}
	return nil
}

// passes reports whether an event is watched, but for its path.
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
	is, _ := path.Match(f.Path, name) // Check saw it
	return is
}

// Feed gives events to those who watch. Its methods may be called from any goroutine; those of nil do nothing.
type Feed struct {
	mu      sync.Mutex
	watches atomic.Pointer[[]*Watch] // nil while nobody watches; replaced under mu
}

// On reports whether somebody watches.
func (f *Feed) On() bool { return f != nil && f.watches.Load() != nil }

// Send gives an event to those who watch it. name returns the path of its file and is called, by this goroutine, only
// where somebody watches the rest of it; nil where it is about no file. It does not block but in name.
func (f *Feed) Send(e Event, name func() string) {
	watches := f.watches.Load()
	if watches == nil {
		return
	}
	named := name == nil
	for _, w := range *watches {
		if !w.filter.passes(&e) {
			continue
		}
		if !named {
			e.File, named = name(), true
		}
		if w.filter.passesPath(e.File) {
			w.add(e)
		}
	}
}

// Watch begins to watch what filter, which Check finds nothing wrong with, lets pass. It must end with Stop.
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

// Watch is somebody who watches.
type Watch struct {
	feed   *Feed         // immutable
	filter Filter        // immutable
	wake   chan struct{} // has an element where events may wait

	mu     sync.Mutex
	events []Event // protected by mu
	lost   int64   // since the last that was not; protected by mu
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

// Next waits for events and takes those there are. It returns none when ctx ends.
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
