package gaiafs

import (
	"math"
	"os"
	"syscall"
)

// Limits of a view.
const (
	defaultAlign = 256
	maxAlign     = 2 << 20
	maxSegments  = 1 << 19
	maxFiles     = 1 << 14
	maxRows      = 1 << 24
	maxViewSize  = 1 << 62
)

// Segment is Count rows of Length bytes of a file. The first row is at Offset, and each next row is Stride bytes
// further.
type Segment struct {
	File           int // index into MapView's files
	Offset, Length int64
	Stride         int64 // at least Length; ignored if there is one row
	Count          int64 // 0 means 1
}

func (s Segment) rows() int64 { return max(s.Count, 1) }

// stride returns 0 if there is one row.
func (s Segment) stride() int64 {
	if s.rows() == 1 {
		return 0
	}
	return s.Stride
}

// end returns the offset at which the segment ends in its file. check has ruled out an overflow.
func (s Segment) end() int64 { return s.Offset + s.stride()*(s.rows()-1) + s.Length }

func (s Segment) check(i int) error {
	switch {
	case s.Length <= 0:
		return failed(syscall.EINVAL, "segment %d has a length of %d", i, s.Length)
	case s.Count < 0 || s.Count > maxRows:
		return failed(syscall.EINVAL, "segment %d has %d rows, and a view has at most %d", i, s.Count, maxRows)
	case s.Offset < 0:
		return failed(syscall.EINVAL, "segment %d has the negative offset %d", i, s.Offset)
	case s.rows() > 1 && s.Stride < s.Length:
		return failed(syscall.EINVAL, "segment %d has rows of %d bytes, and a stride of only %d", i, s.Length, s.Stride)
	case s.rows() > 1 && s.Stride > (math.MaxInt64-s.Length)/(s.rows()-1),
		s.Offset > math.MaxInt64-(s.stride()*(s.rows()-1)+s.Length):
		return failed(syscall.EOVERFLOW, "segment %d ends past the largest file", i)
	}
	return nil
}

// ViewLayout computes the layout of a view: segment i begins offsets[i] bytes from the start of the view, at a multiple
// of align, and its rows are packed. align is a power of two up to 2 MiB; 0 means 256. It does not contact the daemon.
// Errors: EINVAL, and EOVERFLOW for a segment that ends past the largest file.
func ViewLayout(segments []Segment, align int64) (offsets []int64, size int64, err error) {
	offsets, size, err = layout(segments, align)
	return offsets, size, during("view layout", err)
}

func layout(segments []Segment, align int64) (offsets []int64, size int64, err error) {
	if align == 0 {
		align = defaultAlign
	}
	switch {
	case align < 0 || align&(align-1) != 0 || align > maxAlign:
		return nil, 0, failed(syscall.EINVAL, "the alignment %d is not a power of two up to %d", align, maxAlign)
	case len(segments) == 0:
		return nil, 0, failed(syscall.EINVAL, "there are no segments")
	case len(segments) > maxSegments:
		return nil, 0, failed(syscall.EINVAL, "there are %d segments, and a view has at most %d", len(segments),
			maxSegments)
	}
	var rows int64
	offsets = make([]int64, len(segments))
	for i, s := range segments {
		if err := s.check(i); err != nil {
			return nil, 0, err
		}
		if rows += s.rows(); rows > maxRows {
			return nil, 0, failed(syscall.EINVAL, "segment %d: the view has more than %d rows in all", i, maxRows)
		}
		offsets[i] = (size + align - 1) &^ (align - 1)
		if offsets[i] > maxViewSize || s.Length*s.rows() > maxViewSize-offsets[i] {
			return nil, 0, failed(syscall.EINVAL, "segment %d: the view is larger than 2^62 bytes", i)
		}
		size = offsets[i] + s.Length*s.rows()
	}
	return offsets, size, nil
}

// Align makes MapView begin the view, and each segment in it, at a multiple of n bytes: a power of two up to 2 MiB. The
// default is 256, which suits every kernel. 1 packs the segments.
func Align(n int64) Option { return func(o *options) { o.align = n } }

// View is a read-only mapping with chosen bytes of one or several files, in a layout of its own. Release, Sync and
// Flush do nothing. Offsets count bytes from the start of the view.
type View struct {
	*Mapping
	offsets []int64 // immutable
}

// Offset returns the offset of segment i in the view.
func (v *View) Offset(i int) int64 { return v.offsets[i] }

// MapView makes a view of segments of open files of one gaiafs mount in the memory of a device. All processes that ask
// for the same segments of the same files on the same device share it. It stays coherent: after Acquire it shows what
// was released or written before, and only changed bytes are copied again. Padding between segments is zeros, and so
// are bytes past the end of a file. Segments may overlap, repeat, and come in any order. The caller may close the files
// afterwards.
//
// Errors: those of Map, EOVERFLOW for a segment that ends past the largest file, EXDEV for files of several mounts, and
// ENOTSUP if the daemon is older than this package.
func MapView(files []*os.File, segments []Segment, device int, opts ...Option) (*View, error) {
	v, err := newView(files, segments, device, opts)
	return v, during("map view", err)
}

func newView(files []*os.File, segments []Segment, device int, opts []Option) (*View, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	offsets, size, err := layout(segments, o.align)
	if err != nil {
		return nil, err
	}
	switch {
	case len(files) == 0 || len(files) > maxFiles:
		return nil, failed(syscall.EINVAL, "there are %d files, and a view has 1 to %d", len(files), maxFiles)
	case device < 0 || device > math.MaxInt32:
		return nil, failed(syscall.ENODEV, "there is no device %d", device)
	}
	if o.align == 0 {
		o.align = defaultAlign
	}
	source := &viewSource{segments: segments}
	if err := source.open(files); err != nil {
		source.close()
		return nil, err
	}
	m := &Mapping{length: size, prot: ProtRead, device: device, view: source}
	if err := m.openTwice(o); err != nil {
		source.close()
		return nil, err
	}
	source.segments = nil
	return &View{m, offsets}, nil
}

// viewSource has the files of a view. It is immutable once the view is mapped.
type viewSource struct {
	files    []viewFile
	segments []Segment // the caller's, while the view is being mapped
}

// viewFile is a file of a view. All segments of the file lie between from and to; there are none if from and to are
// equal.
type viewFile struct {
	*os.File // a duplicate of the caller's descriptor
	from, to int64
}

// open duplicates the descriptors. The caller closes v, even if open fails.
func (v *viewSource) open(files []*os.File) error {
	v.files = make([]viewFile, 0, len(files))
	for _, f := range files {
		file, err := duplicate(f)
		if err != nil {
			return err
		}
		v.files = append(v.files, viewFile{File: file})
		if err := checkFile(file, ProtRead); err != nil {
			return err
		}
	}
	for i, s := range v.segments {
		if s.File < 0 || s.File >= len(files) {
			return failed(syscall.EINVAL, "segment %d is of file %d, and there are %d", i, s.File, len(files))
		}
		f := &v.files[s.File]
		if f.from == f.to {
			f.from = s.Offset
		}
		f.from, f.to = min(f.from, s.Offset), max(f.to, s.end())
	}
	return nil
}

// close closes the files, and returns the first error.
func (v *viewSource) close() (err error) {
	for _, f := range v.files {
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
	}
	return err
}

// flushKernel writes back what CPU programs stored through their mappings of the files, as Mapping.flushKernel does.
func (v *viewSource) flushKernel() (launder bool, err error) {
	for _, f := range v.files {
		if f.from == f.to {
			continue
		}
		if launder, err = flushKernel(f.File, f.from, f.to-f.from); err != nil {
			return false, err
		}
	}
	return launder, nil
}

// grants returns the grant of the first file, and the tokens of all files.
func (v *viewSource) grants() (first grant, tokens [][16]byte, err error) {
	for i, f := range v.files {
		g, err := grantFile(f.File)
		if err != nil {
			return grant{}, nil, err
		}
		if i == 0 {
			first = g
		}
		if g.socket != first.socket {
			return grant{}, nil, failed(syscall.EXDEV, "file %d of the view is on another mount than the first one", i)
		}
		tokens = append(tokens, g.token)
	}
	return first, tokens, nil
}

// askForView sends MAPVIEW. The reply has the frames of a MAP's.
func (m *Mapping) askForView(c *conn, uuid [16]byte, flags uint32, o options, tokens [][16]byte, a *assembly) error {
	if c.welcome.chosen()&featureView == 0 {
		return failed(syscall.ENOTSUP, "the daemon of the mount is older than this library, and has no views")
	}
	body := viewBody(uint32(m.device), o.kind, uuid, flags, o.align, tokens, m.view.segments)
	err := c.doMap(typeMapView, body, a.take)
	if err == nil && a.reply.size != m.length {
		err = failed(syscall.EPROTO, "the daemon made a view of %d bytes instead of %d", a.reply.size, m.length)
	}
	return err
}
