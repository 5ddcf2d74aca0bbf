package gaiafs

import (
	"encoding/binary"
	"errors"
	"sync"
	"syscall"
	"time"
)

// maxGroupRanges is the most ranges of a group, and of an AcquireAll.
const maxGroupRanges = 1 << 17

// Range is the Len bytes at Off of a mapping.
type Range struct {
	Of       *Mapping
	Off, Len int64
}

// Whole returns all of the mapping.
func (m *Mapping) Whole() Range { return Range{m, 0, m.length} }

// Group is ranges of mappings, of several files perhaps, of which all stores are released at once, or none. Its
// methods may be called from any goroutine.
type Group struct {
	ranges []Range // immutable
	conn   *conn   // immutable

	mu     sync.Mutex
	number uint64 // 0 once it has ended; guarded by mu
}

// Begin opens a group of ranges of mappings for writing, of one mount. What the program stores there from then on,
// and what it stored before and did not release, is seen by nobody but programs on the same device before Release,
// and then by everyone at once. Store only after Begin has returned, and not again after Release before the next
// Begin. A program that ends, or closes one of the mappings, before it released the group has none of it released:
// the memory is what it was at the last release.
//
// Errors: those of Acquire, EINVAL (no ranges, or more than 131072), EACCES (a mapping for reading, or a view), EBUSY
// (another open group on the device has a page of it), EXDEV (mappings of several mounts), ENOTSUP where the daemon
// is older than this package.
func Begin(ranges ...Range) (*Group, error) {
	g := &Group{ranges: ranges}
	err := callAll(ranges, func(c *conn, body []byte) (err error) {
		g.conn = c
		g.number, _, err = c.numbered(typeBeginGroup, body)
		return err
	})
	if err != nil {
		return nil, during("begin", err)
	}
	return g, nil
}

// Release publishes the group, and returns its version: every later Acquire and read sees all of it. On a GPU it
// waits for kernels as Mapping.Release does. After an error the group is open still, unless it is ECANCELED: the
// group was aborted; or ENODEV: a device was lost, and with it what it had of the group. EINVAL says that it was
// released or aborted before.
func (g *Group) Release() (version uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.number == 0 {
		return 0, during("release", failed(syscall.EINVAL, "the group was released or aborted before"))
	}
	err = callAll(g.ranges, func(c *conn, _ []byte) (err error) {
		for _, r := range g.ranges {
			if err := r.Of.assembly.memory.quiesce(); err != nil {
				return err
			}
			r.Of.startFlush(r.Off, r.Len)
		}
		version, _, err = c.numbered(typeReleaseGroup, g.body())
		return err
	})
	if err == nil || errors.Is(err, syscall.ECANCELED) {
		g.number = 0
	}
	return version, during("release", err)
}

// Abort ends the group: the memory is what it was at the last release, and nothing that was stored since is ever
// released. It does nothing where the group has ended.
func (g *Group) Abort() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.number == 0 {
		return nil
	}
	_, err := g.conn.simple(typeAbortGroup, g.body())
	g.number = 0
	if errors.Is(err, syscall.ENOTCONN) {
		err = nil // the end of the connection aborted it
	}
	return during("abort", err)
}

// body is that of a request of the group. The caller holds mu.
func (g *Group) body() []byte { return binary.LittleEndian.AppendUint64(nil, g.number) }

// AcquireAll is Acquire of several ranges at once, of mappings and of views of one mount: what it brings has all of
// every group up to version, and nothing of a later one. version is that of the newest group of the files, and 0
// where there was none.
func AcquireAll(ranges ...Range) (version uint64, err error) {
	version, err = acquireAll(ranges, 0, 0)
	return version, during("acquire", err)
}

// AcquireAtLeast is AcquireAll that waits until a group of one of the files was released whose version is at least so
// high. Errors are those of AcquireAll, ETIMEDOUT, EPIPE (the last program ended that began groups of the files: it
// will not come), and EAGAIN (too many requests of the user wait).
func AcquireAtLeast(least uint64, timeout time.Duration, ranges ...Range) (version uint64, err error) {
	version, err = acquireAll(ranges, least, timeout)
	return version, during("acquire", err)
}

// waitSlice is how long one request waits for a version: in between, mappings can be closed.
const waitSlice = 500 * time.Millisecond

func acquireAll(ranges []Range, least uint64, timeout time.Duration) (version uint64, err error) {
	for end := time.Now().Add(timeout); ; {
		left := max(time.Until(end), 0)
		err := callAll(ranges, func(c *conn, body []byte) error {
			var flags uint32
			for _, r := range ranges {
				launder, err := r.Of.flushKernel(r.Off, r.Len)
				if err != nil {
					return err
				}
				if launder {
					flags = acquireLaunder
				}
			}
			head := binary.LittleEndian.AppendUint64(nil, least)
			head = binary.LittleEndian.AppendUint32(head, uint32(min(left, waitSlice).Milliseconds()))
			head = binary.LittleEndian.AppendUint32(head, flags)
			version, _, err = c.numbered(typeAcquireAll, append(head, body...))
			return err
		})
		if !errors.Is(err, syscall.ETIMEDOUT) || left <= waitSlice {
			return version, err
		}
	}
}

// callAll runs a request with the list of ranges, whose mappings stay open meanwhile.
func callAll(ranges []Range, request func(c *conn, list []byte) error) error {
	if len(ranges) == 0 || len(ranges) > maxGroupRanges {
		return failed(syscall.EINVAL, "there are %d ranges, and a request has 1 to %d", len(ranges), maxGroupRanges)
	}
	return withOpen(ranges, func(c *conn) error {
		if c.welcome.chosen()&featureGroup == 0 {
			return failed(syscall.ENOTSUP, "the daemon of the mount is older than this library, and has no groups")
		}
		return request(c, groupRanges(ranges))
	})
}

// rangeSize is the bytes of a range in a list.
const rangeSize = 24

// groupRanges encodes ranges of open mappings.
func groupRanges(ranges []Range) []byte {
	b := make([]byte, 0, 8+rangeSize*len(ranges))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ranges)))
	b = binary.LittleEndian.AppendUint32(b, rangeSize)
	for _, r := range ranges {
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Of.assembly.reply.mapping))
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Off))
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Len))
	}
	return b
}

// numbered is do for requests that a NUMBERED answers.
func (c *conn) numbered(typ frameType, body []byte) (number uint64, pages int64, err error) {
	err = c.do(typ, body, func(h header, body []byte, _ []int) error {
		switch {
		case h.typ == typeNumbered && len(body) >= 16:
			number, pages = binary.LittleEndian.Uint64(body), int64(binary.LittleEndian.Uint64(body[8:]))
			return nil
		case h.typ == typeResult:
			if _, err := resultOf(body); err != nil {
				return err
			}
		}
		return failed(syscall.EPROTO, "the daemon answered with type %#x and %d bytes", uint16(h.typ), len(body))
	})
	return number, pages, err
}
