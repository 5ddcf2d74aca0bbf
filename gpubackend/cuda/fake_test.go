package cuda

import (
	"bytes"
	"encoding/binary"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/mapped"
	"github.com/gaiafs/gaiafs/internal/page"
)

// fake is a driver with GPUs in host memory. It is as strict as the real driver: queued work is done only when a caller
// waits for it, asynchronous copies and kernels may touch only mapped device memory and page-locked memory, and calls
// need a current context in their thread.
type fake struct {
	mu         sync.Mutex
	current    map[int]contextHandle // by thread
	retained   int
	next       uint64
	streams    map[streamHandle]*fakeStream
	events     map[eventHandle]fakeEvent
	device     map[address][]byte // cuMemAlloc and mapped memory
	host       map[address][]byte // page-locked
	files      map[address][]byte // the part of host that is files
	reserved   map[address]uintptr
	access     map[address]map[int32]bool // by mapping: the GPUs that may use it
	handles    map[memoryHandle]*fakeHandle
	attributes map[int32]int32
	// fail makes calls of a name fail with a result. If after is not 0, calls fail from the after-th on.
	fail  map[string]result
	after map[string]int
	// calls counts the calls of each name. uploaded counts the bytes of copies to the device outside of batches. busy
	// is the time that each kernel waits for other kernels.
	calls    map[string]int
	uploaded int
	busy     time.Duration
	// count is the number of GPUs. linked says whether they can reach each other's memory.
	count  int32
	linked bool
	// version is the driver's version, total the memory of its GPU.
	version int32
	total   uint64
}

type fakeStream struct {
	device deviceHandle
	queue  []func() result
}

type fakeEvent struct {
	stream streamHandle
	ahead  int // what is in the stream before the event
	seen   bool
}

type fakeHandle struct {
	fd   int
	size uintptr
	maps int
	kept bool // not released
}

const fakeInvalidContext result = 201

func newFake() *fake {
	return &fake{
		current: map[int]contextHandle{}, access: map[address]map[int32]bool{}, count: 1, next: 1 << 40,
		streams: map[streamHandle]*fakeStream{}, events: map[eventHandle]fakeEvent{},
		device: map[address][]byte{}, host: map[address][]byte{}, files: map[address][]byte{},
		reserved: map[address]uintptr{},
		handles:  map[memoryHandle]*fakeHandle{},
		attributes: map[int32]int32{
			attrMultiprocessors: 4, attrUnifiedAddressing: 1, attrCapabilityMajor: 9, attrVMM: 1, attrPOSIXHandles: 1,
		},
		fail: map[string]result{}, after: map[string]int{}, calls: map[string]int{}, version: 13000, total: 1 << 30,
	}
}

// left counts leaked resources.
func (g *fake) left() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.retained + len(g.streams) + len(g.events) + len(g.device) + len(g.host) + len(g.reserved) + len(g.handles)
}

// queued counts work in streams that no call has waited for.
func (g *fake) queued() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.streams {
		n += len(s.queue)
	}
	return n
}

func (g *fake) setFail(call string, r result) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail[call] = r
}

// id returns an unused number. With room, it is an address with that many free bytes after it.
func (g *fake) id(room uintptr) uint64 {
	g.next += 1<<21 + uint64(room)&^(1<<21-1)
	return g.next - uint64(room)&^(1<<21-1)
}

// call runs f as a driver call, unless it is to fail: one call at a time, in a thread with a context.
func (g *fake) call(name string, needsContext bool, f func() result) result {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls[name]++
	if r := g.fail[name]; r != success {
		if g.after[name] == 0 {
			return r
		}
		g.after[name]--
	}
	if needsContext && g.current[unix.Gettid()] == 0 {
		return fakeInvalidContext
	}
	return f()
}

// find returns n bytes at a in memory of one of the kinds.
func find(a address, n uintptr, kinds ...map[address][]byte) []byte {
	for _, kind := range kinds {
		for base, p := range kind {
			if a >= base && a-base <= address(len(p)) && address(n) <= address(len(p))-(a-base) {
				return p[a-base:][:n]
			}
		}
	}
	return nil
}

// reaches reports whether a GPU may use the n bytes at a.
func (g *fake) reaches(d deviceHandle, a address, n uintptr) bool {
	for base, may := range g.access {
		if p := g.device[base]; a >= base && a-base <= address(len(p)) && address(n) <= address(len(p))-(a-base) {
			return may[int32(d)]
		}
	}
	return false
}

// reads reports whether the driver would read with the CPU what may have left the file.
func (g *fake) reads(from address, n uintptr) bool {
	return n < 32<<10 && find(from, n, g.files) != nil
}

// queue appends work to a stream. It is done when a call waits for it.
func (g *fake) queue(s streamHandle, f func() result) result {
	stream := g.streams[s]
	if stream == nil {
		return invalidValue
	}
	stream.queue = append(stream.queue, f)
	return success
}

func (g *fake) move(to, from address, n uintptr) result {
	dst, src := find(to, n, g.device, g.host), find(from, n, g.device, g.host)
	if dst == nil || src == nil {
		return illegalAddress
	}
	mapped.Try(func() { copy(dst, src) }) // a GPU keeps locked pages when their file becomes shorter
	return success
}

// moveRows does a copy of rows. Each side must be one allocation of its kind, as for the real driver.
func (g *fake) moveRows(x *copyRows) result {
	span := func(side *copySide) []byte {
		n := side.pitch*(x.height-1) + x.width
		if side.kind == memoryHost {
			return find(side.host, n, g.host)
		}
		return find(side.device, n, g.device)
	}
	to, from := span(&x.to), span(&x.from)
	if to == nil || from == nil || x.to.kind == x.from.kind {
		return illegalAddress
	}
	mapped.Try(func() {
		for i := range x.height {
			copy(to[i*x.to.pitch:][:x.width], from[i*x.from.pitch:][:x.width])
		}
	})
	return success
}

// drain does the first n pieces of work of a stream.
func (g *fake) drain(s streamHandle, n int) result {
	stream := g.streams[s]
	for ; n > 0 && len(stream.queue) > 0; n-- {
		f := stream.queue[0]
		stream.queue = stream.queue[1:]
		for e, x := range g.events {
			if x.stream == s && x.ahead > 0 {
				x.ahead--
				g.events[e] = x
			}
		}
		if r := f(); r != success {
			return r
		}
	}
	return success
}

// kernel does what a page kernel does.
func (g *fake) kernel(f functionHandle, blocks uint32, w []uint64) result {
	time.Sleep(g.busy)
	words := func(a, n uint64) []byte { return find(address(a), uintptr(8*n), g.device) }
	if f == 3 {
		for b := range uint64(blocks) {
			patch := words(w[0]+patchSize*b, patchSize/8)
			if patch == nil {
				return illegalAddress
			}
			word := func(i int) uint64 { return binary.LittleEndian.Uint64(patch[8*i:]) }
			mem := find(address(word(0)), pageSize, g.device)
			if mem == nil {
				return illegalAddress
			}
			changed := gpubackend.Granules{word(1), word(2), word(3), word(4)}
			size := uint64(changed.Count() * gpubackend.GranuleSize)
			versions := find(address(w[1]+2*gpubackend.GranuleSize*word(5)), uintptr(2*size), g.device)
			if versions == nil {
				return illegalAddress
			}
			was, next := versions[:size], versions[size:]
			changed.Each(func(begin, end int) {
				for off := begin; off < end; off++ {
					if from, to := was[off-begin], next[off-begin]; from != to && mem[off] == from {
						mem[off] = to
					}
				}
				was, next = was[end-begin:], next[end-begin:]
			})
		}
		return success
	}
	if f == 4 || f == 5 {
		for b := range uint64(blocks) {
			at := words(w[0]+8*b, 1)
			here := find(address(w[1]+b*pageSize), pageSize, g.device)
			if at == nil || here == nil {
				return illegalAddress
			}
			there := find(address(binary.LittleEndian.Uint64(at)), pageSize, g.device)
			switch {
			case there == nil:
				return illegalAddress
			case f == 4:
				copy(there, here)
			default:
				copy(here, there)
			}
		}
		return success
	}
	if f == 6 {
		return g.refresh(w)
	}
	runs, pages := words(w[0], 2*w[1]), w[2]
	key, err := gpubackend.DecodeDigestKey(find(address(w[3]), gpubackend.DigestKeySize, g.device))
	if runs == nil || err != nil {
		return illegalAddress
	}
	for run := range w[1] {
		base, first := binary.LittleEndian.Uint64(runs[16*run:]), binary.LittleEndian.Uint64(runs[16*run+8:])
		end := pages
		if run+1 < w[1] {
			end = binary.LittleEndian.Uint64(runs[16*run+24:])
		}
		for p := first; p < end; p++ {
			mem := find(address(base+(p-first)*pageSize), page.Size, g.device)
			if mem == nil {
				return illegalAddress
			}
			sum := uint64(key.Sum(mem))
			if f == 1 {
				binary.LittleEndian.PutUint64(words(w[4]+8*p, 1), sum)
				continue
			}
			modified := find(address(w[5]+p), 1, g.device)
			modified[0] = 0
			if binary.LittleEndian.Uint64(words(w[4]+8*p, 1)) != sum {
				modified[0] = 1
			}
		}
	}
	return success
}

// refresh does what the kernel of that name does.
func (g *fake) refresh(w []uint64) result {
	key, err := gpubackend.DecodeDigestKey(find(address(w[3]), gpubackend.DigestKeySize, g.device))
	table, refused := find(address(w[0]), uintptr(refreshSize*w[2]), g.device),
		find(address(w[4]), uintptr(w[2]), g.device)
	if err != nil || table == nil || refused == nil {
		return illegalAddress
	}
	for i := range w[2] {
		mem := find(address(binary.LittleEndian.Uint64(table[refreshSize*i:])), pageSize, g.device)
		next := find(address(w[1]+i*pageSize), pageSize, g.device)
		if mem == nil || next == nil {
			return illegalAddress
		}
		was := bytes.Clone(mem) // another process may be storing
		if refused[i] = 1; uint64(key.Sum(was)) != binary.LittleEndian.Uint64(table[refreshSize*i+8:]) {
			continue
		}
		refused[i] = 0
		for k, b := range was {
			if b != next[k] {
				mem[k] = next[k]
			}
		}
	}
	return success
}

func hostAddress(p unsafe.Pointer) address { return address(uintptr(p)) }

func (g *fake) anonymous(n uintptr) []byte {
	p, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	return p
}

// forget frees memory that anonymous made, and returns the driver's result.
func forget[K comparable](all map[K][]byte, k K) result {
	p, ok := all[k]
	if !ok {
		return invalidValue
	}
	delete(all, k)
	if err := unix.Munmap(p); err != nil {
		return invalidValue
	}
	return success
}
