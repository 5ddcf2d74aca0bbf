package pagecache

import (
	"slices"
	"sync"
)

const (
	// laneWorkers is how many files of one backing filesystem the background works on at once.
	laneWorkers = 4
	// laneMost bounds them where some are stuck. Each stuck one costs a thread and the bytes that it was about to
	// write.
	laneMost = 64
)

// chore is a kind of background work on a file.
type chore uint8

const (
	choreDue     chore = iota // collectDue: what is due, if anything is
	choreCollect              // collectAll
	choreRefresh
	choreLetGo
	choreForget
	choreFree
	choreFlush
	choreClose
	choreViews // dropEmptyViews
	choreLand
)

// differs reports whether each task of the kind has something of its own to do, or somebody who waits for its end.
func (c chore) differs() bool { return c == choreFlush || c == choreFree }

// lanes do the background's work on files. One goroutine at a time works on a file, and laneWorkers on the files of one
// backing filesystem, its lane. A stuck file does not count: another one takes its place in the lane. So a file that
// hangs delays no other, whether it alone hangs or its whole filesystem.
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

// do has what done for f, unless a task that does the same is waiting already. It does not block.
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

// look starts work in the places of files that got stuck meanwhile.
func (l *lanes) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lanes {
		l.fillLocked(n)
	}
}

// withdrawFlushes takes back the flushes of files that did not begin.
func (l *lanes) withdrawFlushes(files []*File) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range files {
		if n := l.lanes[f.id.Dev]; n != nil {
			n.waiting = slices.DeleteFunc(n.waiting, func(t task) bool { return t.f == f && t.what == choreFlush })
		}
	}
}

// blocked reports whether f is stuck, or waits in a lane in which so many others are that nothing begins any more.
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

// fillLocked starts what may start.
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
