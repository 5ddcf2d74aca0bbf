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
	// recordingMost is the most bytes of a recording that wait to be taken. Further events are lost, and counted.
	recordingMost = 4 << 20
	// recordingNames is the most files, and the most programs, that a recording tells apart.
	recordingNames = 1 << 16
	// recordingFlush is the interval at which even a small batch is given out.
	recordingFlush = 500 * time.Millisecond
	// recordingBatch is the size at which a batch is given out at once.
	recordingBatch = 60 << 10
)

// Recording records the accesses of a mount for one client, in the format of package trace. Its methods may be called
// from any goroutine.
type Recording struct {
	c     *Cache
	begun time.Time // immutable
	// full has an element when a batch is ready or the recording has ended.
	full chan struct{}

	mu      sync.Mutex
	enc     *trace.Encoder          // protected by mu
	files   map[FileID]recordedFile // protected by mu
	sources map[trace.Source]uint32 // protected by mu
	lost    uint64                  // protected by mu; events lost since the last one that was recorded
	ended   bool                    // protected by mu
}

type recordedFile struct {
	number uint32
	size   int64
}

// OnCPU is the Device of an Access by a program on the CPU.
const OnCPU = trace.CPU

// Access is one recorded access to a file.
type Access struct {
	File FileID
	// Describe returns the file's name and size. It is called at the file's first access, without any lock of this
	// package.
	Describe func() (name string, size int64)
	// Device is the number of the device that gets the bytes, or OnCPU. Thread is the kernel's number of the thread
	// that asked.
	Device int
	Thread uint32
	Off    int64
	Len    int64
	// Size is the file's size, negative if unknown. The part of an access past it is left out.
	Size    int64
	Began   time.Time
	Pattern prefetch.Pattern
	// Write says that the access changed the bytes.
	Write bool
}

// Record begins a recording, which the caller ends with Stop. EBUSY if another one is going on.
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

// Recording returns the current recording, or nil.
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

// Resize records a new size of a file that was accessed before.
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

// event records the event that about returns for a file, or counts it as lost.
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

// Next waits for a batch or for recordingFlush, and returns the new bytes of the trace; none if nothing happened. ok is
// false when the recording has ended and these are its last bytes, or when ctx has ended.
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

// Stop ends the recording. Next returns the rest of it. Stop is idempotent.
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

// record records an acquire of n bytes at off of the file by the mapping's device.
func (m *Mapping) record(off, n int64, began time.Time) {
	m.recordAll(Access{Off: off, Len: n, Began: began, Pattern: m.pattern()})
}

// recordAll records accesses of the mapping's device. The caller fills in what varies between them.
func (m *Mapping) recordAll(list ...Access) {
	r := m.f.c.Recording()
	if r == nil {
		return
	}
	f := m.f
	size := int64(-1)
	if f.mu.TryLock() { // waiting for a transfer would distort the recording
		size = f.home.Size()
		f.mu.Unlock()
	}
	for _, a := range list {
		a.File, a.Describe = f.id, func() (string, int64) { return f.Name(), max(size, 0) }
		a.Device, a.Thread, a.Size = m.dev.info.Ordinal, m.process, size
		r.Access(a)
	}
}
