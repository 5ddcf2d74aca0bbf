package pagecache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// copyCallers is the number of calls of CopyOut that CPU reads have under way on a device at once. A small one takes as long
	// to make and to end as to carry out.
	copyCallers = 4
	// copyCall is the bytes of one call, a copy more or less. What comes while calls are under way goes together.
	copyCall = 2 << 20
)

// peerCopy is a copy from a device for the host. It pins the extents, so that nobody else gets their memory before it has
// ended, however long that takes, and whatever has become of the File.
type peerCopy struct {
	dev    *device
	pages  page.Range // of the file
	parts  []copyPart // all of them
	urgent bool       // somebody waits for it
	// thought is how long an urgent one was thought to take.
	thought time.Duration

	began time.Time
	ahead int64 // bytes that were under way

	// done is closed when buf has the bytes of pages, or err is set. Whoever waited calls finish then.
	done  chan struct{}
	buf   []byte
	err   error
	ended time.Time

	state copyState // protected by copyQueue.mu
	// hurried says that somebody waits for it who did not ask for it; protected by copyQueue.mu.
	hurried bool
	late    bool // protected by copyQueue.mu; somebody waits no longer for it: costs.givenUp was called, once, and answered will be
	call    *copyResult
}

// copyPart is the part of a peerCopy in one extent.
type copyPart struct {
	x     *extent
	pages page.Range
}

type copyState uint8

const (
	copyWaits copyState = iota
	copyRuns
	copyEnded
	copyGivenUp // while it ran
)

// copyResult is the buffer of one call, which several peerCopies share.
type copyResult struct {
	users   atomic.Int32
	release func()
}

func (r *copyResult) done() {
	if r.users.Add(-1) == 0 && r.release != nil {
		r.release()
	}
}

// copyQueue has the copies of one device that wait for a caller.
type copyQueue struct {
	mu      sync.Mutex
	urgent  []*peerCopy // protected by mu
	others  []*peerCopy // protected by mu
	running []*peerCopy // protected by mu; those that callers took, the oldest first
	callers int         // protected by mu
	closed  bool        // protected by mu
}

// newCopyLocked makes a peerCopy of pages that h holds and pins them.
func (h *holding) newCopyLocked(pages page.Range) *peerCopy {
	j := &peerCopy{dev: h.dev, pages: pages, done: make(chan struct{})}
	h.each(pages, func(x *extent, part page.Range) {
		x.Hold()
		j.parts = append(j.parts, copyPart{x, part})
	})
	return j
}

// unpin is called once, when no call uses the memory any more.
func (j *peerCopy) unpin() {
	for _, p := range j.parts {
		p.x.LetGo()
	}
}

// startCopy hands j to the device. Where that has no engines, what somebody waits for has ended when startCopy returns: the caller's
// processor copies as well as another one would. It reports false, and j is over, where the Cache is being closed.
func (c *Cache) startCopy(j *peerCopy) bool {
	q, n := &j.dev.copies, j.pages.Bytes()
	q.mu.Lock()
	if q.closed {
		c.endLocked(j)
		j.unpin()
		q.mu.Unlock()
		return false
	}
	j.began = time.Now()
	j.ahead = c.costs.begin(j.dev.cost, n)
	here := j.urgent && !j.dev.info.CopyEngines
	switch {
	case here:
		j.state = copyRuns
		q.running = append(q.running, j)
		c.peerCalls.Add(1)
	case j.urgent || j.hurried:
		q.urgent = append(q.urgent, j)
	default:
		q.others = append(q.others, j)
	}
	if !here && q.callers < copyCallers {
		q.callers++
		c.peerCalls.Add(1)
		go c.carryOutCopies(j.dev)
	}
	q.mu.Unlock()
	if here {
		c.carryOut(j.dev, []*peerCopy{j})
		c.peerCalls.Done()
	}
	return true
}

// carryOutCopies makes calls until nothing waits for one.
func (c *Cache) carryOutCopies(d *device) {
	defer c.peerCalls.Done()
	q := &d.copies
	for {
		q.mu.Lock()
		call := q.takeLocked()
		if len(call) == 0 {
			q.callers--
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		c.carryOut(d, call)
	}
}

// takeLocked takes what one call is to copy.
func (q *copyQueue) takeLocked() (call []*peerCopy) {
	size := int64(0)
	for _, list := range []*[]*peerCopy{&q.urgent, &q.others} {
		n := 0
		for n < len(*list) && (size == 0 || size+(*list)[n].pages.Bytes() <= copyCall) {
			size += (*list)[n].pages.Bytes()
			(*list)[n].state = copyRuns
			n++
		}
		call = append(call, (*list)[:n]...) // a copy: what is left of the list moves up
		q.running = append(q.running, call...)
		*list = slices.Delete(*list, 0, n)
		if n > 0 {
			break // nobody waits for what can wait
		}
	}
	return call
}

// carryOut makes one call.
func (c *Cache) carryOut(d *device, call []*peerCopy) {
	total := int64(0)
	var pieces []gpubackend.Copy
	for _, j := range call {
		total += j.pages.Bytes()
	}
	buf, release, err := d.HostBuffer(int(total))
	if err == nil {
		rest := buf
		for _, j := range call {
			j.buf, rest = rest[:j.pages.Bytes()], rest[j.pages.Bytes():]
			for _, p := range j.parts {
				at := (p.pages.Start - j.pages.Start).Offset()
				pieces = append(pieces, gpubackend.Copy{
					Mem: p.x.Memory(), Off: p.x.off(p.pages.Start), Host: j.buf[at : at+p.pages.Bytes()],
				})
			}
		}
		err = d.CopyOut(c.peerCtx, pieces)
	}
	c.lose(d, err)
	now := time.Now()
	result := &copyResult{release: release}
	result.users.Store(int32(len(call)))
	for _, j := range call {
		j.unpin()
		q := &d.copies
		q.mu.Lock()
		j.err, j.call, j.ended = err, result, now
		givenUp := j.state == copyGivenUp
		if !j.urgent || givenUp {
			c.costs.end(d.cost, j.pages.Bytes(), j.ahead, j.began, now, err)
		}
		q.running = slices.DeleteFunc(q.running, func(other *peerCopy) bool { return other == j })
		c.endLocked(j)
		close(j.done)
		q.mu.Unlock()
		if givenUp {
			result.done()
		}
	}
}

// wait waits for j, an urgent copy, but not for long; if it returns false, somebody else cleans up after j. Otherwise the caller
// calls finish. What a caller who slept took to be woken is part of what the copy took; what he did before he waited is not.
func (c *Cache) wait(j *peerCopy) (done bool) {
	select {
	case <-j.done:
		c.costs.end(j.dev.cost, j.pages.Bytes(), j.ahead, j.began, j.ended, j.err)
		return true
	default:
	}
	defer func() {
		if done {
			c.costs.end(j.dev.cost, j.pages.Bytes(), j.ahead, j.began, time.Now(), j.err)
		}
	}()
	timer := time.NewTimer(c.patience(j.thought))
	defer timer.Stop()
	select {
	case <-j.done:
		return true
	case <-timer.C:
	}
	q := &j.dev.copies
	q.mu.Lock()
	was := j.state
	switch was {
	case copyWaits:
		q.urgent = slices.DeleteFunc(q.urgent, func(other *peerCopy) bool { return other == j })
		c.endLocked(j)
		if len(q.running) > 0 {
			c.isLateLocked(q.running[0]) // j waited for it, if nobody else does
		}
	case copyRuns:
		c.isLateLocked(j)
		j.state = copyGivenUp
	}
	q.mu.Unlock()
	if was == copyWaits {
		c.costs.cancel(j.dev.cost, j.pages.Bytes())
		j.unpin()
	}
	return was == copyEnded
}

// hurry has j, for which somebody waits now, carried out before those for which nobody does.
func (c *Cache) hurry(j *peerCopy) {
	q := &j.dev.copies
	q.mu.Lock()
	defer q.mu.Unlock()
	j.hurried = true // it may not be in the queue yet
	if i := slices.Index(q.others, j); i >= 0 {
		q.others = slices.Delete(q.others, i, i+1)
		q.urgent = append(q.urgent, j)
	}
}

// isLate notes that somebody who did not ask for j himself waits no longer for it. Until it ends, nobody asks its device.
func (c *Cache) isLate(j *peerCopy) {
	q := &j.dev.copies
	q.mu.Lock()
	defer q.mu.Unlock()
	c.isLateLocked(j)
}

// isLateLocked is isLate for whoever waits, with copyQueue.mu held.
func (c *Cache) isLateLocked(j *peerCopy) {
	if j.state != copyEnded && !j.late {
		j.late = true
		c.costs.givenUp(j.dev.cost)
	}
}

// endLocked says that j has ended, or will never begin, with copyQueue.mu held.
func (c *Cache) endLocked(j *peerCopy) {
	j.state = copyEnded
	if j.late {
		c.costs.answered(j.dev.cost)
	}
}

// finish gives the buffer back.
func (j *peerCopy) finish() { j.call.done() }

// preparePeerReads makes what CPU reads from devices need. Chunks take up to limit bytes.
func (c *Cache) preparePeerReads(when PeerReads, limit int64) (err error) {
	c.peerReads, c.leastPatience, c.cleanAge = when, leastPatience, cleanAge
	if len(c.devices) == 0 {
		c.peerReads = PeerReadsOff
	}
	c.fetchesMore = slices.ContainsFunc(c.devices, c.fetchesMoreFrom)
	c.costs.disk = cost.NewSource(diskLatency, diskBandwidth)
	c.peerCtx, c.peerStop = context.WithCancel(context.Background())
	c.cleanLimit = max(limit, chunkSize)
	if c.peerReads != PeerReadsOff {
		c.clean, err = newCleanStore(c.cleanLimit)
	}
	return err
}

// closePatience is how long Close waits for devices that do not answer.
const closePatience = 5 * time.Second

// endCopies lets no more copies begin and waits for those under way.
func (c *Cache) endCopies() {
	c.peerStop()
	defer c.chunks.free()
	defer c.clean.close()
	for _, d := range c.devices {
		d.copies.mu.Lock()
		d.copies.closed = true
		d.copies.mu.Unlock()
	}
	ended := make(chan struct{})
	go func() {
		c.peerCalls.Wait()
		close(ended)
	}()
	timer := time.NewTimer(closePatience)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		c.log.Error("a device does not answer; the mount ends without it")
	}
}

// costs are what is known of the disk and, by a lock that is held for a few instructions, of the devices.
type costs struct {
	mu   sync.Mutex
	disk *cost.Source // protected by mu, as is device.cost
}

func (c *costs) begin(s *cost.Source, n int64) (ahead int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.Begin(n)
}

// end notes the end of n bytes of which begin returned ahead.
func (c *costs) end(s *cost.Source, n, ahead int64, began, now time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		s.Cancel(n)
		return
	}
	s.End(n, ahead, now.Sub(began), now)
}

func (c *costs) cancel(s *cost.Source, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Cancel(n)
}

func (c *costs) givenUp(s *cost.Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Abandon()
}

func (c *costs) answered(s *cost.Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Answer()
}

// due reports whether the caller is to measure s.
func (c *costs) due(s *cost.Source) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.Due(time.Now())
}

func (c *costs) measured(s *cost.Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Measured(time.Now())
}

func (c *costs) estimate(s *cost.Source) cost.Estimate {
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.Estimate()
}

// homeRead is ReadAt of home, of pages that the host's page cache lacks, measured.
func (c *Cache) homeRead(home HomeReader, p []byte, off int64) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n := int64(len(p))
	ahead := c.costs.begin(c.costs.disk, n)
	began := time.Now()
	got, err := home.ReadAt(p, off)
	c.costs.end(c.costs.disk, n, ahead, began, time.Now(), err)
	return got, err
}
