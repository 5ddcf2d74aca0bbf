package lrc

import (
	"math"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
)

// space carries out the requests that change home without the kernel's pages.
func (x *executor) space(s model.Step) {
	switch s.Op {
	case model.Punch:
		x.zero(s.Off, min(s.Len, x.size-s.Off))
	case model.PunchRest:
		x.zero(s.Off, x.size-s.Off)
	case model.Zero:
		if s.Keep {
			s.Len = min(s.Len, x.size-s.Off)
		}
		x.zero(s.Off, s.Len)
	case model.Allocate:
		x.collect(x.covering(s.Off, s.Len), false)
		if end := s.Off + s.Len; end > x.size && !s.Keep {
			x.moveEnd(x.size, end)
			x.zeroReplicas(x.size, end)
			x.size = end
		}
	case model.DirectWrite:
		x.place(s.Off, s.Bytes())
	case model.Copy:
		x.flush(s.From, s.Len, false)
		x.forget(s.Off, s.Len)
		x.collect(x.covering(s.From, s.Len), false)
		home, _ := x.Home()
		x.place(s.Off, home[s.From:s.From+s.Len])
	}
}

// place writes past the kernel's page cache.
func (x *executor) place(off int64, data []byte) {
	n := int64(len(data))
	x.forget(off, n)
	x.changeHome(off, data, page.Range{Start: x.first + page.Count(off),
		End: x.first + page.Index((off+n)>>page.Shift)})
}

// forget makes the kernel write the pages of [off, off+n) home and forget them.
func (x *executor) forget(off, n int64) {
	x.each(off, n, func(p page.Index, _, _, _ int64) {
		x.drop(page.Range{Start: p, End: p + 1})
		delete(x.kernel, p)
	})
}

func (x *executor) zero(off, n int64) {
	if n <= 0 {
		return
	}
	x.flush(off, n, false)
	x.changeHome(off, make([]byte, n), page.Range{})
	x.each(off, n, func(p page.Index, from, to, _ int64) {
		if k := x.kernel[p]; k != nil {
			clear(k.data[from:to])
			if to-from == page.Size {
				delete(x.kernel, p)
			}
		}
	})
}

// readHome reads home as SEEK_DATA and copy_file_range do. It can find where data begins or ends only if everything
// after the offset is home.
func (x *executor) readHome(s model.Step) []byte {
	n := min(s.Len, x.size-s.Off)
	if s.Op == model.SeekRead {
		x.flush(s.Off, x.size-s.Off, false)
		x.collect(page.Range{Start: x.covering(s.Off, n).Start, End: math.MaxInt64}.Intersect(x.all()), false)
	} else {
		x.flush(s.Off, n, false)
		x.collect(x.covering(s.Off, n), false)
	}
	home, _ := x.Home()
	return home[s.Off : s.Off+n]
}
