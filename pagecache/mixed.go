package pagecache

import (
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// mostPieces is the most differing places of a page of which a search tries all combinations.
	mostPieces = 12
	// nearBytes joins differences at first: fewer equal bytes than this between two make them one.
	nearBytes = 16
	// mostTries is the most mixtures that are tried for one page. allTries, and pageTries for each compared page, bound
	// the tries for all pages that are settled at once: some 5 ms, and the time to compare a page (BenchmarkMixed).
	mostTries = 1 << 15
	allTries  = 1 << 16
	pageTries = 1 << 6
	// trySwap is the number of bytes that are swapped in the time of a try.
	trySwap = 256
)

// triesFor returns how many of the tries that are left the next page may take, if so many pages remain. The others get
// what it does not use.
func triesFor(left, pages int) int { return min(left/pages, mostTries) }

// mixed looks for the base of a page that a device stored into and that also changed at home. Where the two copies
// differ, the base usually has the bytes of one of them. The agreed digest tells when the right mixture is found. mixed
// returns nil if it does not find it within the given number of tries.
//
// A place where they differ may be one change or several adjacent ones: a record that the device stored, and the next
// record, which changed at home. So the search first takes places whole, then single bytes, and then cuts places in
// two.
func mixed(key *gpubackend.DigestKey, agreed gpubackend.Digest, mine, home []byte, most int) (base []byte, tried int) {
	s := search{mine: mine, home: home, of: key.Mix(mine, home), agreed: agreed, tries: most}
	if s.run() {
		base = slices.Clone(s.of.Bytes())
	}
	return base, min(most-s.tries, most)
}

// search looks for the mixture of two contents of a page that has the agreed digest.
type search struct {
	mine, home []byte
	of         *gpubackend.Mixture
	agreed     gpubackend.Digest
	tries      int // tries left
}

// run reports whether it found the mixture, which is then in of.
func (s *search) run() bool {
	for _, near := range []int{nearBytes, 1, 0} {
		if pieces := differences(s.mine, s.home, near); len(pieces) <= mostPieces && s.find(pieces, 0) {
			return true
		}
	}
	pieces := differences(s.mine, s.home, nearBytes)
	for cuts := 1; cuts <= len(pieces) && s.tries > 0; cuts++ {
		if s.find(pieces, cuts) {
			return true
		}
	}
	return false
}

func (s *search) swap(from, to int) {
	s.tries -= (to - from) / trySwap
	s.of.Swap(from, to)
}

// find tries the mixtures that take each of pieces from one of the two contents, and cuts so many pieces in two. On
// success of has the mixture. On failure of is unchanged, unless the tries ran out.
func (s *search) find(pieces []page.Bytes, cuts int) bool {
	if s.tries <= 0 {
		return false
	}
	if len(pieces) == 0 {
		s.tries--
		return s.of.Sum() == s.agreed
	}
	from, to := int(pieces[0].Off), int(pieces[0].End)
	for range 2 {
		if s.find(pieces[1:], cuts) {
			return true
		}
		at := from
		for ; cuts > 0 && at+1 < to && s.tries > 0; at++ {
			if s.mine[at] == s.home[at] {
				continue
			}
			if s.swap(at, at+1); s.find(pieces[1:], cuts-1) {
				return true
			}
		}
		s.swap(at, to)
	}
	return false
}

// differences returns the places where a and b differ. Places with fewer than near equal bytes between them are joined.
// With near 0 each byte is a place of its own.
func differences(a, b []byte, near int) (out []page.Bytes) {
	for i := range a {
		if a[i] == b[i] {
			continue
		}
		at := int64(i)
		if n := len(out); n > 0 && at < out[n-1].End+int64(near) {
			out[n-1].End = at + 1
		} else {
			out = append(out, page.Bytes{Off: at, End: at + 1})
		}
	}
	return out
}
