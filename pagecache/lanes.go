package pagecache

import (
	"slices"
	"sync"
)

const (
	// laneWorkers is the number of files of one backing filesystem that the background works on at once.
	laneWorkers = 4
	// laneMost bounds the running tasks of a lane if files are stuck. Each stuck file costs a thread and the bytes that
	// it was about to write.
	laneMost = 64
)

// chore is a kind of background work on a file.
type chore uint8

const (
	choreDue     chore = iota // collectDue
	choreCollect              // collectAll
	choreRefresh
	choreLetGo
	choreForget
	choreFree
	choreFlush
	choreClose
	choreViews // dropEmptyBeside
	choreLand
	choreUnlock
	choreLock // lockDue
)

// differs reports whether every task of this kind is needed, because it has its own work or a caller waits for its end.
func (c chore) differs() bool { return c == choreFlush || c == choreFree }

// lanes run the background's work on files. The files of one backing filesystem share a lane. Each file has at most one
// goroutine, and each lane laneWorkers of them. A stuck file does not count: another one takes its place in the lane.
// So a hanging file, or a hanging filesystem, delays no other.
type lanes struct {
	mu    sync.Mutex
	lanes map[uint64]*lane // by FileID.Dev; protected by mu
	work  sync.WaitGroup   // the goroutines
}

type lane struct {
	waiting []task
	running map[*File]struct{}
}

type task struct {
	f    *File
	what chore
	do   func()
}

// do queues a task for f, unless the same task is waiting already. It does not block.
func (l *lanes) do(f *File, what chore, do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.lanes[f.id.Dev]
	if n == nil {
		if l.lanes == nil {
			l.lanes = make(map[uint64]*lane)
		}
		n = &lane{running: make(map[*File]struct{})}
		l.lanes[f.id.Dev] = n
	}
	if !what.differs() && slices.ContainsFunc(n.waiting, func(t task) bool { return t.f == f && t.what == what }) {
		return
	}
	n.waiting = append(n.waiting, task{f, what, do})
	l.fillLocked(n)
}

// look starts new work in place of files that got stuck.
func (l *lanes) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lanes {
		l.fillLocked(n)
	}
}

// withdrawFlushes removes the flushes of files that have not begun.
func (l *lanes) withdrawFlushes(files []*File) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range files {
		if n := l.lanes[f.id.Dev]; n != nil {
			n.waiting = slices.DeleteFunc(n.waiting, func(t task) bool { return t.f == f && t.what == choreFlush })
		}
	}
}

// blocked reports whether f is stuck, or waits in a lane that is full of stuck files.
func (l *lanes) blocked(f *File) bool {
	if f.stuck() {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.lanes[f.id.Dev]
	if n == nil || len(n.running) < laneMost {
		return false
	}
	for other := range n.running {
		if !other.stuck() {
			return false
		}
	}
	return true
}

// fillLocked starts tasks while the lane has room.
func (l *lanes) fillLocked(n *lane) {
	busy := 0
	for f := range n.running {
		if !f.stuck() {
			busy++
		}
	}
	for i := 0; i < len(n.waiting) && busy < laneWorkers && len(n.running) < laneMost; {
		t := n.waiting[i]
		if _, is := n.running[t.f]; is {
			i++
			continue
		}
		n.waiting = slices.Delete(n.waiting, i, i+1)
		n.running[t.f] = struct{}{}
		busy++
		l.work.Add(1)
		go func() {
			defer l.work.Done()
			t.do()
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(n.running, t.f)
			if l.fillLocked(n); len(n.running)+len(n.waiting) == 0 {
				delete(l.lanes, t.f.id.Dev)
			}
		}()
	}
}
