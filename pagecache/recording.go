package pagecache

import (
	"context"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/prefetch"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

const (
	// recordingMost is the most bytes of a recording that wait to be taken. What comes when they are there is counted,
	// and lost.
	recordingMost = 4 << 20
	// recordingNames is the most files, and the most programs, that one recording tells apart.
	recordingNames = 1 << 16
	// recordingFlush is how often what has been recorded is given out, however little it is.
	recordingFlush = 500 * time.Millisecond
	// recordingBatch is how much is given out at once where there is more.
	recordingBatch = 60 << 10
)

// Recording writes down the accesses of a mount, in the format of package trace, for one client that asked for it. Its
// methods may be called from any goroutine.
type Recording struct {
	c     *Cache
	begun time.Time // immutable
	// full has an element once there is a batch, or the recording has ended.
	full chan struct{}

	mu      sync.Mutex
	enc     *trace.Encoder          // protected by mu
	files   map[FileID]recordedFile // protected by mu
	sources map[trace.Source]uint32 // protected by mu
	lost    uint64                  // protected by mu; events since the last that was not lost
	ended   bool                    // protected by mu
}

type recordedFile struct {
	number uint32
	size   int64
}

// OnCPU is the Device of an Access by a program on the CPU.
const OnCPU = trace.CPU

// Access is one access to a file, as it is recorded.
type Access struct {
	File FileID
	// Describe returns the file's name and size. It is called at the file's first access, without any lock of this
	// package.
	Describe func() (name string, size int64)
	// Device is the number of the device that the bytes are for, or OnCPU; Thread is the kernel's number of who asked.
	Device int
	Thread uint32
	Off    int64
	Len    int64
	// Size is the file's, negative where it is not known: what an access has past its end is left out.
	Size    int64
	Began   time.Time
	Pattern prefetch.Pattern
	// Write says that the bytes were changed.
	Write bool
}

// Record begins a recording, which the caller ends with Stop. EBUSY while there is another one.
func (c *Cache) Record() (*Recording, error) {
	r := &Recording{
		c:       c,
		begun:   time.Now(),
		full:    make(chan struct{}, 1),
		files:   make(map[FileID]recordedFile),
		sources: make(map[trace.Source]uint32),
	}
	r.enc = trace.NewEncoder(r.begun)
	r.wake() // the header tells the client that it has begun
	if !c.recording.CompareAndSwap(nil, r) {
		return nil, fail(syscall.EBUSY, "accesses of this mount are being recorded already: end that recording first")
	}
	return r, nil
}

// Recording returns the recording that is going on, or nil.
func (c *Cache) Recording() *Recording {
	if c == nil {
		return nil
	}
	return c.recording.Load()
}

// Access records an access that has just ended.
func (r *Recording) Access(a Access) {
	took := time.Since(a.Began)
	if a.Size >= 0 {
		a.Len = min(a.Len, a.Size-a.Off)
	}
	if a.Len <= 0 {
		return
	}
	r.event(a.File, a.Describe, func(f *recordedFile) (trace.Event, bool) {
		source, ok := r.sourceLocked(trace.Source{Device: a.Device, Thread: a.Thread})
		at := max(a.Began.Sub(r.begun), 0)
		if end := a.Off + a.Len; end > f.size {
			f.size = end // it has grown since
			r.enc.Event(trace.Event{Time: at, File: f.number, Len: end, Resize: true})
		}
		return trace.Event{Time: at, Took: took, File: f.number, Source: source, Off: a.Off, Len: a.Len,
			Pattern: a.Pattern, Write: a.Write}, ok
	})
}

// Resize records that a file has another size now, if it was accessed before.
func (r *Recording) Resize(id FileID, size int64) {
	r.mu.Lock()
	_, known := r.files[id]
	r.mu.Unlock()
	if !known {
		return
	}
	at := time.Since(r.begun)
	r.event(id, nil, func(f *recordedFile) (trace.Event, bool) {
		f.size = size
		return trace.Event{Time: at, File: f.number, Len: size, Resize: true}, true
	})
}

// event records what about says of a file, or counts it as lost.
func (r *Recording) event(id FileID, describe func() (string, int64), about func(f *recordedFile) (trace.Event, bool)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, known := r.files[id]
	if !known && describe != nil && len(r.files) < recordingNames {
		r.mu.Unlock()
		name, size := describe()
		r.mu.Lock()
		if f, known = r.files[id]; !known {
			f = recordedFile{r.enc.File(trace.File{Name: name, Size: size}), size}
			r.files[id], known = f, true
		}
	}
	if r.ended {
		return
	}
	if !known || r.enc.Pending() >= recordingMost {
		r.lost++
		return
	}
	if r.lost > 0 {
		r.enc.Lost(r.lost)
		r.lost = 0
	}
	x, ok := about(&f)
	if !ok {
		r.lost++
		return
	}
	r.files[id] = f
	r.enc.Event(x)
	if r.enc.Pending() >= recordingBatch {
		r.wake()
	}
}

// sourceLocked returns the number of a source.
func (r *Recording) sourceLocked(s trace.Source) (uint32, bool) {
	number, known := r.sources[s]
	if !known {
		if len(r.sources) >= recordingNames {
			return 0, false
		}
		number = r.enc.Source(s)
		r.sources[s] = number
	}
	return number, true
}

func (r *Recording) wake() {
	select {
	case r.full <- struct{}{}:
	default:
	}
}

// Next waits for a batch, or a moment, and returns bytes of the trace that were not returned before; none where nothing
// happened. ok is false when the recording has ended and these are its last bytes, or when ctx has ended.
func (r *Recording) Next(ctx context.Context) (b []byte, ok bool) {
	moment := time.NewTimer(recordingFlush)
	defer moment.Stop()
	select {
	case <-r.full:
	case <-moment.C:
	case <-ctx.Done():
		return nil, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ended {
		r.enc.Flush()
	}
	return r.enc.Take(), !r.ended
}

// Stop ends the recording. What is left of it is to be had from Next. It is idempotent.
func (r *Recording) Stop() {
	r.c.recording.CompareAndSwap(r, nil)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.ended = true
	if r.lost > 0 {
		r.enc.Lost(r.lost)
	}
	r.enc.End()
	r.wake()
}

// record notes an acquire of n bytes at off of the file, for the mapping's device.
func (m *Mapping) record(off, n int64, began time.Time) {
	m.recordAll(Access{Off: off, Len: n, Began: began, Pattern: m.pattern()})
}

// recordAll notes accesses of the mapping's device to the bytes that they say.
func (m *Mapping) recordAll(list ...Access) {
	r := m.f.c.Recording()
	if r == nil {
		return
	}
	f := m.f
	size := int64(-1)
	if f.mu.TryLock() { // waiting for somebody's transfer would change what is recorded
		size = f.size
		f.mu.Unlock()
	}
	for _, a := range list {
		a.File, a.Describe = f.id, func() (string, int64) { return f.Name(), max(size, 0) }
		a.Device, a.Thread, a.Size = m.dev.info.Ordinal, m.process, size
		r.Access(a)
	}
}
