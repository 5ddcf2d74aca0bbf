package pagecache

import (
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// mostPieces is the most places in which a page differs that a search tries in all ways.
	mostPieces = 12
	// nearBytes is the number of equal bytes between two differences that are taken for one at first.
	nearBytes = 16
	// mostTries is the most mixtures of one page that are tried. allTries, and pageTries for each page that is
	// compared, are the most for all pages that are settled at once: some 5 ms, and what comparing a page takes
	// (BenchmarkMixed).
	mostTries = 1 << 15
	allTries  = 1 << 16
	pageTries = 1 << 6
	// trySwap is the bytes that are swapped in the time of a try.
	trySwap = 256
)

// triesFor returns how many tries the first of so many pages may take of those that are left. What it does not take is
// for the others.
func triesFor(left, pages int) int { return min(left/pages, mostTries) }

// mixed looks for the base of a page that a device stored into and that was changed in home too: where the two differ,
// it has mostly what the one or the other has. The digest that was agreed on tells. It returns nil if it is not found
// by most tries.
//
// A place where they differ may be one change, or several side by side: a record that the device stored, and the next
// one that was changed in home. So places are taken whole first, then by their bytes, and then cut in two.
func mixed(key *gpubackend.DigestKey, agreed gpubackend.Digest, mine, home []byte, most int) (base []byte, tried int) {
	s := search{mine: mine, home: home, of: key.Mix(mine, home), agreed: agreed, tries: most}
	if s.run() {
		base = slices.Clone(s.of.Bytes())
	}
	return base, min(most-s.tries, most)
}

// search is for a mixture of two contents of a page that has a digest.
type search struct {
	mine, home []byte
	of         *gpubackend.Mixture
	agreed     gpubackend.Digest
	tries      int // that are left
}

// run reports whether it found one, which of is then.
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

// find tries the mixtures in which each of pieces is of one of the two, but for so many, which are cut in two. It
// leaves of as it was, or as the one that it found, or as anything where there are no tries left.
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

// differences returns where a and b differ. Places that are fewer than near bytes apart are one; with 0 each byte is.
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
