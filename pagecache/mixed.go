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
	// mostTries is the most mixtures of one page that are tried, leastTries how many are tried of each page, and
	// allTries about how many of all pages that are settled at once: that takes some 10 ms (BenchmarkMixed).
	mostTries  = 1 << 15
	leastTries = 1 << 9
	allTries   = 1 << 16
)

// mixed looks for the base of a page that a device stored into and that was changed in home too: where the two differ,
// it has mostly what the one or the other has. The digest that was agreed on tells. It returns nil if it is not found.
//
// A place where they differ may be one change, or several side by side: a record that the device stored, and the next
// one that was changed in home. So places are taken whole first, then by their bytes, and then cut in two. left is how
// many tries other pages left, and are left.
func mixed(key *gpubackend.DigestKey, agreed gpubackend.Digest, mine, home []byte, left *int) []byte {
	most := max(min(*left, mostTries), leastTries)
	s := search{mine: mine, home: home, of: key.Mix(mine, home), agreed: agreed, tries: most}
	defer func() { *left -= most - s.tries }()
	for _, near := range []int{nearBytes, 1, 0} {
		if pieces := differences(mine, home, near); len(pieces) <= mostPieces && s.find(pieces, 0) {
			return slices.Clone(s.of.Bytes())
		}
	}
	pieces := differences(mine, home, nearBytes)
	for cuts := 1; cuts <= len(pieces) && s.tries > 0; cuts++ {
		if s.find(pieces, cuts) {
			return slices.Clone(s.of.Bytes())
		}
	}
	return nil
}

// search is for a mixture of two contents of a page that has a digest.
type search struct {
	mine, home []byte
	of         *gpubackend.Mixture
	agreed     gpubackend.Digest
	tries      int // that are left
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
			if s.of.Swap(at, at+1); s.find(pieces[1:], cuts-1) {
				return true
			}
		}
		s.of.Swap(at, to)
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
