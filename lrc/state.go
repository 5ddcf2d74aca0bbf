package lrc

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/gaiafs/gaiafs/versions"
)

// Base names the bytes that a replica of a page had when it last agreed with home. A Base is unique among the live
// bases of its page, and says nothing about other pages.
type Base uint32

const (
	// BaseHome means that home still has the bytes.
	BaseHome Base = 0
	// BaseZero is a page of zeros, which needs no copy. It is the base of memory that a program may be storing into
	// although home's bytes were never brought there (Hollow).
	BaseZero Base = 1 << 30
)

func (b Base) String() string {
	switch b {
	case BaseHome:
		return "home"
	case BaseZero:
		return "zeros"
	}
	return strconv.FormatUint(uint64(b), 10)
}

// kept reports whether b names a copy that the caller keeps.
func (b Base) kept() bool { return b != BaseHome && b != BaseZero }

// replica is what is known of a page on one device.
type replica struct {
	owner versions.Owner
	// v counts the releases that the bytes contain. If home has more releases of an owner, v may count none of that
	// owner.
	v versions.Vector
	// base is where the bytes of the last agreement are. It means nothing while tracked is false.
	base Base
	// tracked is true while programs may be storing into the page.
	tracked bool
}

// pending reports whether the device released bytes that home does not have.
func (r *replica) pending(home versions.Vector) bool {
	return r.v.Get(r.owner) > home.Get(r.owner)
}

// stale reports whether home has bytes that the replica does not.
func (r *replica) stale(home versions.Vector) bool { return !r.v.Dominates(home) }

// state is everything known of a page. Pages with equal states share one encoding.
//
// Invariants, run by checkInvariants:
//   - every vector is dominated by released;
//   - a replica has every release of its own owner, and of other owners only what home has;
//   - replicas are in ascending order of owner, each owner once, the CPU never;
//   - without replicas the vectors are empty: nobody is left who could be behind;
//   - a tracked replica with BaseHome is not stale: when home moved on, its base was kept;
//   - a replica with BaseZero is stale: it never had home's bytes;
//   - a pending replica is tracked;
//   - an untracked replica has BaseHome.
type state struct {
	released versions.Vector
	home     versions.Vector
	// cpu is true if the kernel may hold the page.
	cpu      bool
	replicas []replica
	// nonePending caches that firstPending returns nil: with many devices, reads ask for it again and again.
	nonePending bool
}

// clone returns a copy to be changed.
func (s *state) clone() *state {
	c := *s
	c.replicas, c.nonePending = slices.Clone(s.replicas), false
	return &c
}

// memory returns the bytes that the decoded state takes, without vectors that it shares with others.
func (s *state) memory() int64 {
	return int64(unsafe.Sizeof(*s)) + int64(cap(s.replicas))*int64(unsafe.Sizeof(replica{}))
}

func (s *state) find(o versions.Owner) *replica {
	for i := range s.replicas {
		if s.replicas[i].owner == o {
			return &s.replicas[i]
		}
	}
	return nil
}

// add returns the replica of o. It makes the replica if there is none.
func (s *state) add(o versions.Owner) *replica {
	i := 0
	for ; i < len(s.replicas) && s.replicas[i].owner <= o; i++ {
		if s.replicas[i].owner == o {
			return &s.replicas[i]
		}
	}
	s.replicas = append(s.replicas, replica{})
	copy(s.replicas[i+1:], s.replicas[i:])
	s.replicas[i] = replica{owner: o}
	return &s.replicas[i]
}

func (s *state) remove(o versions.Owner) {
	for i := range s.replicas {
		if s.replicas[i].owner == o {
			s.replicas = append(s.replicas[:i], s.replicas[i+1:]...)
			break
		}
	}
	// Releases that never came home are lost with the replica, because no other replica has them.
	s.released = s.released.With(o, s.home.Get(o))
	if len(s.replicas) == 0 {
		// The kernel's copy need not be tracked any more. So the page costs nothing again.
		s.released, s.home, s.cpu = versions.Vector{}, versions.Vector{}, true
	}
}

// addHollow adds a replica of o that holds zeros, which are not home's bytes. It is stale because home has a release
// that it lacks. If home has none, home counts as a write of the CPU that all other replicas have seen.
func (s *state) addHollow(o versions.Owner) {
	behind := false
	for other := range s.home.Owners() {
		behind = behind || other != o
	}
	if !behind {
		s.released = s.released.Next(versions.CPU)
		n := s.released.Get(versions.CPU)
		s.home = s.home.With(versions.CPU, n)
		for i := range s.replicas {
			s.replicas[i].v = s.replicas[i].v.With(versions.CPU, n)
		}
	}
	r := s.add(o)
	r.v = versions.Vector{}.With(o, s.released.Get(o))
	r.tracked, r.base = true, BaseZero
}

// uses reports whether a replica has base b.
func (s *state) uses(b Base) bool {
	for i := range s.replicas {
		if s.replicas[i].tracked && s.replicas[i].base == b {
			return true
		}
	}
	return false
}

// freeBase returns the smallest base that no replica of the page has.
func (s *state) freeBase() Base {
	for b := BaseHome + 1; ; b++ {
		if !s.uses(b) {
			return b
		}
	}
}

// firstPending returns the pending replica with the lowest owner.
func (s *state) firstPending() *replica {
	if s.nonePending {
		return nil
	}
	for i := range s.replicas {
		if s.replicas[i].pending(s.home) {
			return &s.replicas[i]
		}
	}
	return nil
}

func (s *state) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "released %v home %v", s.released, s.home)
	if s.cpu {
		b.WriteString(" cpu")
	}
	for i := range s.replicas {
		r := &s.replicas[i]
		fmt.Fprintf(&b, " | %v %v", r.owner, r.v)
		if r.tracked {
			b.WriteString(" tracked")
		}
		if r.base.kept() {
			fmt.Fprintf(&b, " base %d", r.base)
		} else if r.base == BaseZero {
			b.WriteString(" hollow")
		}
		if r.pending(s.home) {
			b.WriteString(" pending")
		}
		if r.stale(s.home) {
			b.WriteString(" stale")
		}
	}
	return b.String()
}

// The encoding of a state, which is what a page costs in memory when it agrees with no neighbour:
//
//	set      the owners that hold the page; the CPU is one when the kernel may
//	set      the owners in released, then for each, as a uvarint, its version
//	set      which of these home is behind in, then for each, as a uvarint, by how many releases
//	         for each replica:
//	uvarint    base<<1 | tracked
//	set        which of the owners in released it is behind home in
//
// It does not matter by how many releases a replica is behind: it gets all missing bytes from home at once. So if a
// vector is behind home in an owner, decoding returns it without that owner, which is still true of the bytes. A
// replica always has all its own releases. An empty set costs one byte; a set of numbers below 13 costs two.

// setBits is the number of members that a set has room for in its first uvarint.
const setBits = 62

// appendSet encodes a set of ascending numbers as a uvarint. Bit i+1 means that i is in the set. Bit 0 means that there
// are members from setBits on; then their count and each of them follow, as uvarints.
func appendSet(buf []byte, set []int) []byte {
	var mask uint64
	rest := len(set)
	for n, i := range set {
		if i >= setBits {
			mask, rest = mask|1, n
			break
		}
		mask |= 1 << (i + 1)
	}
	buf = binary.AppendUvarint(buf, mask)
	if rest < len(set) {
		buf = binary.AppendUvarint(buf, uint64(len(set)-rest))
		for _, i := range set[rest:] {
			buf = binary.AppendUvarint(buf, uint64(i))
		}
	}
	return buf
}

func (s *state) encode(buf []byte) []byte {
	var scratch [16]int
	set := scratch[:0]
	if s.cpu {
		set = append(set, int(versions.CPU))
	}
	for i := range s.replicas {
		set = append(set, int(s.replicas[i].owner))
	}
	buf = appendSet(buf, set)

	set = set[:0]
	for o := range s.released.Owners() {
		set = append(set, int(o))
	}
	buf = appendSet(buf, set)
	for _, v := range s.released.Owners() {
		buf = binary.AppendUvarint(buf, uint64(v))
	}

	set = set[:0]
	i := 0
	for o, v := range s.released.Owners() {
		if s.home.Get(o) != v {
			set = append(set, i)
		}
		i++
	}
	buf = appendSet(buf, set)
	for o, v := range s.released.Owners() {
		if n := s.home.Get(o); n != v {
			buf = binary.AppendUvarint(buf, uint64(v-n))
		}
	}

	for i := range s.replicas {
		r := &s.replicas[i]
		bits := uint64(r.base) << 1
		if r.tracked {
			bits |= 1
		}
		buf = binary.AppendUvarint(buf, bits)
		set = set[:0]
		i := 0
		for o := range s.released.Owners() {
			if o != r.owner && r.v.Get(o) != s.home.Get(o) {
				set = append(set, i)
			}
			i++
		}
		buf = appendSet(buf, set)
	}
	return buf
}

// decoder reads what encode wrote. The encoding never leaves this package, so a malformed one is a bug.
type decoder struct{ b []byte }

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		panic("lrc: malformed page state")
	}
	d.b = d.b[n:]
	return v
}

// set appends the members of a set to list.
func (d *decoder) set(list []int) []int {
	mask := d.uvarint()
	for m := mask >> 1; m != 0; m &= m - 1 {
		list = append(list, bits.TrailingZeros64(m))
	}
	if mask&1 != 0 {
		for n := d.uvarint(); n > 0; n-- {
			list = append(list, int(d.uvarint()))
		}
	}
	return list
}

func decode(b []byte) *state {
	d := decoder{b}
	var s state
	var holderScratch, ownerScratch, behindScratch [16]int
	holders := d.set(holderScratch[:0])
	owners := d.set(ownerScratch[:0])
	for _, o := range owners {
		s.released = s.released.With(versions.Owner(o), versions.Version(d.uvarint()))
	}
	s.home = s.released
	for _, i := range d.set(behindScratch[:0]) {
		o := versions.Owner(owners[i])
		s.home = s.home.With(o, s.released.Get(o)-versions.Version(d.uvarint()))
	}
	if len(holders) > 0 && holders[0] == int(versions.CPU) {
		s.cpu, holders = true, holders[1:]
	}
	if len(holders) > 0 {
		s.replicas = make([]replica, len(holders))
	}
	for n, h := range holders {
		r := &s.replicas[n]
		r.owner = versions.Owner(h)
		bits := d.uvarint()
		r.base, r.tracked = Base(bits>>1), bits&1 != 0
		r.v = s.home.With(r.owner, s.released.Get(r.owner))
		for _, i := range d.set(behindScratch[:0]) {
			r.v = r.v.With(versions.Owner(owners[i]), 0)
		}
	}
	return &s
}
