package gaiafs

import (
	"encoding/binary"
	"errors"
	"sync"
	"syscall"
	"time"
)

// maxGroupRanges is the largest number of ranges in a group or an AcquireAll.
const maxGroupRanges = 1 << 17

// Range is the Len bytes at Off of a mapping.
type Range struct {
	Of       *Mapping
	Off, Len int64
}

// Whole returns the range of the whole mapping.
func (m *Mapping) Whole() Range { return Range{m, 0, m.length} }

// Group is a set of ranges whose stores are released all at once or not at all. The ranges may be of several mappings
// and files. A Group's methods may be called from any goroutine.
type Group struct {
	ranges []Range // immutable
	conn   *conn   // immutable

	mu     sync.Mutex
	number uint64 // 0 once the group has ended; guarded by mu
}

// Begin opens a group of ranges of writable mappings of one mount. Until Release, only programs on the same device see
// what this program stores there, and what it stored before without releasing. Then everyone sees it at once. Store
// into the ranges only after Begin has returned, and after Release not before the next Begin. If the program ends or
// closes one of the mappings before it releases the group, none of it is released: the memory returns to its state at
// the last release.
//
// Errors: those of Acquire, EINVAL (no ranges, or more than 131072), EACCES (a read-only mapping, or a view), EBUSY
// (another open group on the device has one of the pages), EXDEV (several mounts), ENOTSUP (the daemon is older than
// this package).
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

// Release publishes the group and returns its version. Every later Acquire and read sees all of it. On a GPU, Release
// waits for kernels as Mapping.Release does. After an error the group stays open, except after ECANCELED (the group was
// aborted) and ENODEV (a device was lost, with its part of the group). EINVAL means that the group was released or
// aborted before.
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

// Abort ends the group: the memory returns to its state at the last release, and what was stored since then is never
// released. Abort does nothing if the group has ended.
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

// body returns the body of a request about the group. The caller holds mu.
func (g *Group) body() []byte { return binary.LittleEndian.AppendUint64(nil, g.number) }

// AcquireAll acquires several ranges of mappings and views of one mount together. It brings all of every group up to
// version, and nothing of a later group. version is that of the newest group of the files, or 0 if there is none.
func AcquireAll(ranges ...Range) (version uint64, err error) {
	version, err = acquireAll(ranges, 0, 0)
	return version, during("acquire", err)
}

// AcquireAtLeast waits until one of the files has a released group whose version is at least least, and then acquires
// as AcquireAll does. Errors: those of AcquireAll, ETIMEDOUT, EPIPE (the last program that began groups of the files
// has ended, so the version will not come), EAGAIN (too many requests of the user wait).
func AcquireAtLeast(least uint64, timeout time.Duration, ranges ...Range) (version uint64, err error) {
	version, err = acquireAll(ranges, least, timeout)
	return version, during("acquire", err)
}

// waitSlice is how long one request waits for a version. Between two requests, mappings can be closed.
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

// callAll runs a request with the encoded list of ranges. Their mappings stay open until it returns.
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

// numbered is do for requests that a NUMBERED frame answers.
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
