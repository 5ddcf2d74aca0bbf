package versions

import (
	"encoding/binary"
	"iter"
)

// Vector counts the releases of each owner that a copy contains. It is an immutable value: == compares, and the zero
// Vector contains no release. An owner whose version is 0 is not in it.
type Vector struct {
	// enc has a byte for the owner and a uvarint for its version, for each owner in ascending order. No version is 0
	// and no uvarint is longer than necessary, so each vector has one encoding and == compares vectors.
	enc string
}

// scratchSize is the size of an encoding that fits on the stack: 8 devices and the CPU with versions below 2^42. A
// longer result costs one more allocation.
const scratchSize = 64

// next splits the first entry off enc, which must not be empty.
func next(enc string) (o Owner, v Version, rest string) {
	o = Owner(enc[0])
	var shift uint
	for i := 1; ; i++ {
		c := enc[i]
		v |= Version(c&0x7f) << shift
		if c < 0x80 {
			return o, v, enc[i+1:]
		}
		shift += 7
	}
}

func appendEntry(buf []byte, o Owner, v Version) []byte {
	if v == 0 {
		return buf
	}
	return binary.AppendUvarint(append(buf, byte(o)), uint64(v))
}

// Get returns the version of o, 0 if v contains no release of o.
func (v Vector) Get(o Owner) Version {
	for enc := v.enc; enc != ""; {
		var eo Owner
		var ev Version
		eo, ev, enc = next(enc)
		if eo == o {
			return ev
		}
		if eo > o {
			break
		}
	}
	return 0
}

// With returns v with the version of o set to n. With n = 0, o is not in the result.
func (v Vector) With(o Owner, n Version) Vector {
	var old Version
	before, after := "", v.enc
	for at := v.enc; at != ""; {
		eo, ev, rest := next(at)
		if eo > o {
			break
		}
		after = rest
		if eo == o {
			old = ev
			break
		}
		before, at = v.enc[:len(v.enc)-len(rest)], rest
	}
	if old == n {
		return v
	}
	var scratch [scratchSize]byte
	buf := append(scratch[:0], before...)
	buf = appendEntry(buf, o, n)
	return Vector{string(append(buf, after...))}
}

// Next returns v with one more release of o. It panics after 2^64-1 releases.
func (v Vector) Next(o Owner) Vector {
	n := v.Get(o) + 1
	if n == 0 {
		panic("versions: out of versions for " + o.String())
	}
	return v.With(o, n)
}

// Join returns the vector that contains the releases of both v and w: the larger version of each owner.
func (v Vector) Join(w Vector) Vector {
	switch {
	case v == w || w.enc == "":
		return v
	case v.enc == "":
		return w
	}
	var scratch [scratchSize]byte
	buf := scratch[:0]
	a, b := v.enc, w.enc
	for a != "" && b != "" {
		ao, av, arest := next(a)
		bo, bv, brest := next(b)
		switch {
		case ao < bo:
			buf, a = appendEntry(buf, ao, av), arest
		case bo < ao:
			buf, b = appendEntry(buf, bo, bv), brest
		default:
			buf, a, b = appendEntry(buf, ao, max(av, bv)), arest, brest
		}
	}
	buf = append(append(buf, a...), b...)
	switch {
	case string(buf) == v.enc:
		return v
	case string(buf) == w.enc:
		return w
	}
	return Vector{string(buf)}
}

// Dominates reports whether v contains every release that w contains.
func (v Vector) Dominates(w Vector) bool {
	if v == w {
		return true
	}
	a := v.enc
	for b := w.enc; b != ""; {
		bo, bv, rest := next(b)
		b = rest
		for {
			if a == "" {
				return false
			}
			ao, av, arest := next(a)
			if ao > bo {
				return false
			}
			a = arest
			if ao == bo {
				if av < bv {
					return false
				}
				break
			}
		}
	}
	return true
}

// Order is the relation of two vectors.
type Order uint8

// The orders of v against w.
const (
	Equal      Order = iota // the same releases
	Before                  // w contains all of v's and more
	After                   // v contains all of w's and more
	Concurrent              // each contains some that the other does not
)

func (o Order) String() string {
	return [...]string{"equal", "before", "after", "concurrent"}[o]
}

// Compare returns the relation of v to w.
func (v Vector) Compare(w Vector) Order {
	switch {
	case v == w:
		return Equal
	case w.Dominates(v):
		return Before
	case v.Dominates(w):
		return After
	}
	return Concurrent
}

// Owners iterates over the owners whose releases v contains, in ascending order, with their versions.
func (v Vector) Owners() iter.Seq2[Owner, Version] {
	return func(yield func(Owner, Version) bool) {
		for enc := v.enc; enc != ""; {
			var o Owner
			var n Version
			o, n, enc = next(enc)
			if !yield(o, n) {
				return
			}
		}
	}
}

// Len returns the number of owners whose releases v contains.
func (v Vector) Len() int {
	n := 0
	for range v.Owners() {
		n++
	}
	return n
}
