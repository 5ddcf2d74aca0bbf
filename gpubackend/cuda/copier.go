package cuda

import (
	"context"
	"sync/atomic"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/mapped"
)

const (
	// chunkSize is the size of a staging chunk in bytes. Copies of that size reach the speed of the bus, and take
	// longer than waking the goroutines that fill the next chunk.
	chunkSize = 4 << 20
	// chunks is the number of chunks that are filled, under way, or emptied at the same time.
	chunks = 3
	// directSize is the most bytes of page-locked memory between two checks of the context.
	directSize = 32 << 20
	// batchMoves is the most pieces of one batch.
	batchMoves = 4096
	// leastBatch is the number of pieces from which one call for all of them pays.
	leastBatch = 4
)

// move is a piece of a copy: bytes that are contiguous on both sides, in one allocation of the device.
type move struct {
	mem    *memory
	dev    address
	host   []byte
	direct bool    // host is page-locked
	pinned address // the allocation that contains host, if it is page-locked
	// host has rows as in gpubackend.Copy, if row is not 0; then it is page-locked.
	row, stride int
}

// bytes returns how many bytes m moves.
func (m *move) bytes() int {
	c := gpubackend.Copy{Host: m.host, Row: int64(m.row), Stride: int64(m.stride)}
	return int(c.Bytes())
}

// While one copier waits for its copies and hands out their bytes, others keep the bus busy. Small reads of many
// programs gain most, because their time is spent at the beginning and the end of each copy.
const (
	inCopiers   = 4
	outCopiers  = 4
	peerCopiers = 2
)

// copiers has the idle copiers.
type copiers chan *copier

// newCopiers makes n copiers with chunks of so many bytes; 0 if they need none. With an error it also returns the
// copiers that were made, which the caller must free.
func newCopiers(n int, drv *driver, ctx contextHandle, toHost bool, chunk int) (copiers, error) {
	cs := make(copiers, n)
	for range n {
		l, err := startLane(drv, ctx)
		if err != nil {
			return cs, err
		}
		c := &copier{lane: l, toHost: toHost}
		cs <- c
		if err := l.do(context.Background(), func() error { return c.make(chunk) }); err != nil {
			return cs, err
		}
	}
	return cs, nil
}

// free frees all copiers. None may be in use.
func (cs copiers) free() {
	for range len(cs) {
		c := <-cs
		_ = c.lane.do(context.Background(), c.free)
		c.lane.stop()
	}
}

// copier copies in one direction, in jobs of its lane.
type copier struct {
	lane   *lane
	toHost bool
	ring   [chunks]chunk

	// The pieces of one submission.
	to, from []address
	sizes    []uintptr
	rows     []move // with rows
}

// chunk is page-locked memory and the copy that uses it.
type chunk struct {
	memory pinned
	event  eventHandle
	moves  []move // under way; their bytes follow each other in the memory
}

func (c *copier) make(chunk int) error {
	drv := c.lane.drv
	for i := range c.ring {
		k := &c.ring[i]
		err := drv.check("cuEventCreate", drv.eventCreate(&k.event, eventBlocking|eventNoTiming))
		if err == nil && chunk > 0 {
			k.memory, err = drv.pin(chunk)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) free() error {
	for i := range c.ring {
		k := &c.ring[i]
		if k.event != 0 {
			_ = c.lane.drv.eventDestroy(k.event)
		}
		if k.memory.base != nil {
			_ = c.lane.drv.memFreeHost(k.memory.base)
		}
	}
	return nil
}

// mostPitch is the largest distance between rows that every GPU takes (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
const mostPitch = 1<<31 - 1

// cutRows appends a piece with rows to moves. If it is page-locked, the driver copies many rows in one call. Otherwise
// they become moves of their own, which are staged side by side. Of a file, the driver gets only what it does not take
// for a small copy without rows (leastOfFile).
func cutRows(moves []move, look *lookup, c *gpubackend.Copy) []move {
	m, host, n := c.Mem.(*memory), c.Host, int64(len(c.Host))
	pinned, direct := look.holds(host)
	var rest *gpubackend.Copy
	switch last := (n-1)%c.Stride + 1; {
	case !direct || c.Stride > mostPitch || c.Row > directSize:
		return cutEach(moves, look, c)
	case !look.last.file:
	case c.Row == c.Stride:
		return cut(moves, look, move{mem: m, dev: m.base + address(c.Off), host: host})
	case last < c.Row || c.Bytes() > directSize:
		full := min((n-last)/c.Stride, directSize/c.Row) // rows
		if full < 2 {
			return cutEach(moves, look, c)
		}
		rest = &gpubackend.Copy{Mem: m, Off: c.Off + full*c.Row, Host: host[full*c.Stride:], Row: c.Row,
			Stride: c.Stride}
		host = host[:(full-1)*c.Stride+c.Row]
	}
	dev, row, stride := m.base+address(c.Off), int(c.Row), int(c.Stride)
	for rows := directSize / row; len(host) > rows*stride; {
		moves = append(moves, move{mem: m, dev: dev, host: host[:(rows-1)*stride+row], direct: true, pinned: pinned,
			row: row, stride: stride})
		dev, host = dev+address(rows*row), host[rows*stride:]
	}
	if len(host) > 0 {
		moves = append(moves, move{mem: m, dev: dev, host: host, direct: true, pinned: pinned,
			row: row, stride: stride})
	}
	if rest != nil {
		moves = cutEach(moves, look, rest)
	}
	return moves
}

// cutEach appends each row of a piece to moves.
func cutEach(moves []move, look *lookup, c *gpubackend.Copy) []move {
	for off, row := range c.Rows() {
		m := c.Mem.(*memory)
		moves = cut(moves, look, move{mem: m, dev: m.base + address(off), host: row})
	}
	return moves
}

// cut appends a piece without rows to moves, in parts that fit a chunk and that several goroutines can copy.
func cut(moves []move, look *lookup, m move) []move {
	for len(m.host) > 0 {
		part := m
		most := shareSize
		if part.pinned, part.direct = look.holds(m.host); part.direct {
			most = directSize
		}
		part.host = m.host[:min(len(m.host), most)]
		moves = append(moves, part)
		m.host, m.dev = m.host[len(part.host):], m.dev+address(len(part.host))
	}
	return moves
}

// next returns how many of the moves fit into one chunk.
func next(moves []move) int {
	staged, direct := 0, 0
	for i, m := range moves {
		if m.direct {
			direct += m.bytes()
		} else {
			staged += len(m.host)
		}
		if i > 0 && (staged > chunkSize || direct > directSize || i >= batchMoves) {
			return i
		}
	}
	return len(moves)
}

// run copies. It runs in the lane. Even with an error, it returns only when no copy is under way.
func (c *copier) run(ctx context.Context, moves []move) error {
	var err error
	for turn := 0; len(moves) > 0 && err == nil; turn++ {
		k := &c.ring[turn%chunks]
		if err = c.finish(k); err == nil {
			err = ctx.Err()
		}
		if err == nil {
			n := next(moves)
			err = c.submit(k, moves[:n])
			moves = moves[n:]
		}
	}
	for i := range c.ring {
		if e := c.finish(&c.ring[i]); err == nil {
			err = e
		}
	}
	if err != nil {
		// If a submission failed half-way, no event may cover what was queued before.
		_ = c.lane.drv.streamSynchronize(c.lane.stream)
	}
	return err
}

// submit begins the moves through k, and returns while they are under way.
func (c *copier) submit(k *chunk, moves []move) error {
	if !c.toHost && !stage(k.memory.bytes(), moves, false) {
		return gpubackend.ErrHostGone
	}
	k.moves = moves
	c.to, c.from, c.sizes, c.rows = c.to[:0], c.from[:0], c.sizes[:0], c.rows[:0]
	used := 0
	for i, m := range moves {
		if m.row > 0 {
			c.rows = append(c.rows, m)
			continue
		}
		host := address(uintptr(unsafe.Pointer(unsafe.SliceData(m.host))))
		if !m.direct {
			host = k.memory.at(used)
			used += len(m.host)
		}
		to, from := m.dev, host
		if c.toHost {
			to, from = host, m.dev
		}
		// Moves that are contiguous on both sides become one piece for the driver. A piece must not span two
		// allocations on either side.
		if n := len(c.sizes) - 1; n >= 0 && moves[i-1].row == 0 && moves[i-1].mem == m.mem &&
			moves[i-1].direct == m.direct &&
			moves[i-1].pinned == m.pinned &&
			c.to[n]+address(c.sizes[n]) == to && c.from[n]+address(c.sizes[n]) == from {
			c.sizes[n] += uintptr(len(m.host))
			continue
		}
		c.to, c.from, c.sizes = append(c.to, to), append(c.from, from), append(c.sizes, uintptr(len(m.host)))
	}
	err := c.enqueue()
	for i := 0; err == nil && i < len(c.rows); i++ {
		err = c.enqueueRows(&c.rows[i])
	}
	clear(c.rows)
	if err != nil {
		return err
	}
	return c.lane.drv.check("cuEventRecord", c.lane.drv.eventRecord(k.event, c.lane.stream))
}

// enqueue gives the pieces to the driver: addresses of page-locked and of device memory, both valid until the lane has
// waited for the copies. The driver reads the arrays themselves before the call returns.
func (c *copier) enqueue() error {
	drv, s := c.lane.drv, c.lane.stream
	if drv.memcpyBatchAsync != nil && len(c.sizes) >= leastBatch {
		attributes := copyAttributes{order: memcpyInStreamOrder, flags: memcpyBesideKernels}
		var first, failed uintptr
		return drv.check("cuMemcpyBatchAsync", drv.memcpyBatchAsync(&c.to[0], &c.from[0], &c.sizes[0],
			uintptr(len(c.sizes)),
			&attributes, &first, 1, &failed, s))
	}
	for i, n := range c.sizes {
		var err error
		if c.toHost {
			err = drv.check("cuMemcpyDtoHAsync", drv.memcpyDtoHAsync(c.to[i], c.from[i], n, s))
		} else {
			err = drv.check("cuMemcpyHtoDAsync", drv.memcpyHtoDAsync(c.to[i], c.from[i], n, s))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// enqueueRows gives a move with rows to the driver: one call for the rows of full length, and one for a shorter last
// row. The driver reads the description before the call returns. Both sides are valid until the lane has waited for the
// copies.
func (c *copier) enqueueRows(m *move) error {
	drv, s := c.lane.drv, c.lane.stream
	rows, last := (len(m.host)-1)/m.stride, (len(m.host)-1)%m.stride+1
	if last == m.row {
		rows, last = rows+1, 0
	}
	host := address(uintptr(unsafe.Pointer(unsafe.SliceData(m.host))))
	if rows > 0 {
		onHost := copySide{kind: memoryHost, host: host, pitch: uintptr(m.stride)}
		onDevice := copySide{kind: memoryDevice, device: m.dev, pitch: uintptr(m.row)}
		x := copyRows{from: onHost, to: onDevice, width: uintptr(m.row), height: uintptr(rows)}
		if c.toHost {
			x.from, x.to = onDevice, onHost
		}
		if err := drv.check("cuMemcpy2DAsync", drv.memcpy2DAsync(&x, s)); err != nil || last == 0 {
			return err
		}
	}
	dev := m.dev + address(rows*m.row)
	if host += address(rows * m.stride); c.toHost {
		return drv.check("cuMemcpyDtoHAsync", drv.memcpyDtoHAsync(host, dev, uintptr(last), s))
	}
	return drv.check("cuMemcpyHtoDAsync", drv.memcpyHtoDAsync(dev, host, uintptr(last), s))
}

// finish waits for the copies submitted through k. If they go to the host, it hands out their bytes. Afterwards the
// caller owns the chunk and the host's memory again.
func (c *copier) finish(k *chunk) error {
	if len(k.moves) == 0 {
		return nil
	}
	moves := k.moves
	k.moves = nil
	if err := c.lane.drv.wait(k.event); err != nil {
		return err
	}
	if c.toHost {
		stage(k.memory.bytes(), moves, true)
	}
	return nil
}

// stage copies between a chunk and the moves' memory that is not page-locked. It uses several cores for large copies.
// It reports whether all that memory was there.
func stage(chunk []byte, moves []move, out bool) (all bool) {
	parts := make([][]byte, len(moves))
	total := 0
	for i, m := range moves {
		if !m.direct {
			parts[i] = chunk[total:][:len(m.host)]
			total += len(m.host)
		}
	}
	var gone atomic.Bool
	inParallel(len(moves), total, func(i int) {
		switch {
		case moves[i].direct:
		case out:
			copy(moves[i].host, parts[i])
		case !mapped.Try(func() { copy(parts[i], moves[i].host) }):
			gone.Store(true)
		}
	})
	return !gone.Load()
}
