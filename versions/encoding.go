package versions

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrMalformed means that bytes or a text are not the encoding of a Vector.
var ErrMalformed = errors.New("malformed version vector")

// AppendBinary appends the encoding of v to buf: a byte for the owner and a uvarint for its version, for each owner in
// ascending order. The zero Vector takes no bytes. It never fails.
func (v Vector) AppendBinary(buf []byte) ([]byte, error) { return append(buf, v.enc...), nil }

// Decode returns the vector that AppendBinary encoded as b, or ErrMalformed. It accepts no other encoding: owners out
// of order, versions of 0 and overlong numbers are malformed. It does not keep b.
func Decode(b []byte) (Vector, error) {
	last := -1
	for rest := b; len(rest) > 0; {
		o := int(rest[0])
		n, size := binary.Uvarint(rest[1:])
		if o <= last || size <= 0 || n == 0 || size > 1 && rest[size] == 0 {
			return Vector{}, fmt.Errorf("%w at byte %d", ErrMalformed, len(b)-len(rest))
		}
		last = o
		rest = rest[1+size:]
	}
	return Vector{string(b)}, nil
}

// String returns the owners in ascending order with their versions: "{cpu:3 gpu0:1}".
func (v Vector) String() string {
	b, _ := v.AppendText(nil)
	return string(b)
}

// AppendText appends String's text to b. It never fails.
func (v Vector) AppendText(b []byte) ([]byte, error) {
	b = append(b, '{')
	first := true
	for o, n := range v.Owners() {
		if !first {
			b = append(b, ' ')
		}
		first = false
		b = append(append(b, o.String()...), ':')
		b = strconv.AppendUint(b, uint64(n), 10)
	}
	return append(b, '}'), nil
}

// MarshalText returns String's text, which is also the vector's JSON string. It never fails.
func (v Vector) MarshalText() ([]byte, error) { return v.AppendText(nil) }

// UnmarshalText is the inverse of MarshalText. It accepts no other spelling, and fails with ErrMalformed.
func (v *Vector) UnmarshalText(text []byte) error {
	s, opened := strings.CutPrefix(string(text), "{")
	s, closed := strings.CutSuffix(s, "}")
	if !opened || !closed {
		return fmt.Errorf("%w: %q", ErrMalformed, text)
	}
	var buf []byte
	last := -1
	for len(s) > 0 {
		entry, rest, more := strings.Cut(s, " ")
		name, number, _ := strings.Cut(entry, ":")
		o, err := parseOwner(name)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil || number[0] == '0' || int(o) <= last || more && rest == "" {
			return fmt.Errorf("%w: %q", ErrMalformed, entry)
		}
		last = int(o)
		buf = appendEntry(buf, o, Version(n))
		s = rest
	}
	*v = Vector{string(buf)}
	return nil
}
