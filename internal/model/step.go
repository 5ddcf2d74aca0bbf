package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PageSize is the unit of versions and merging, in bytes.
const PageSize = 4096

// Op is the operation of a Step.
type Op uint8

const (
	// Write is pwrite of Len bytes at Off by a CPU program.
	Write Op = iota
	// MapStore stores Len bytes at Off through a CPU program's shared mapping.
	MapStore
	// Read is pread of Len bytes at Off by a CPU program, through the kernel's page cache.
	Read
	// DirectRead is a Read with O_DIRECT.
	DirectRead
	// Fsync is fsync by a CPU program.
	Fsync
	// Truncate sets the size to Off.
	Truncate
	// Punch makes [Off, Off+Len) a hole.
	Punch
	// Flush makes the kernel write back the dirty pages of [Off, Off+Len) and keep them.
	Flush
	// Reclaim makes the kernel drop the clean pages of [Off, Off+Len).
	Reclaim
	// Append is a write of Len bytes with O_APPEND.
	Append
	// DirectWrite is a Write with O_DIRECT.
	DirectWrite
	// OpenTrunc opens the file with O_TRUNC.
	OpenTrunc
	// Allocate is fallocate of [Off, Off+Len). With Keep it leaves the size as it is.
	Allocate
	// Zero is fallocate with ZERO_RANGE. It makes the file longer, unless Keep is set.
	Zero
	// PunchRest punches a hole from Off to the largest offset.
	PunchRest
	// SeekRead reads [Off, Off+Len) as cp --sparse does: it reads what SEEK_DATA and SEEK_HOLE report as data, and
	// takes the rest for zeros.
	SeekRead
	// Copy is copy_file_range of Len bytes at From to Off.
	Copy
	// CopyOut is copy_file_range of [Off, Off+Len) to another file, which is then read.
	CopyOut
	// Stat returns the result of fstat, see AppendStat.
	Stat
	// SetTimes sets mtime to the second that Val selects.
	SetTimes
	// Chmod changes the file's mode.
	Chmod
	// Reopen closes the file and opens it again.
	Reopen
	// Unlink removes the file's name. Clients continue with their open files.
	Unlink

	// SourceWrite writes [Off, Off+Len) directly in SOURCE. The operations up to Map also happen there.
	SourceWrite
	// SourceAppend appends Len bytes.
	SourceAppend
	// SourceTruncate sets the size to Off.
	SourceTruncate
	// SourcePunch makes [Off, Off+Len) a hole.
	SourcePunch
	// SourceCollapse removes the pages of [Off, Off+Len). SourceInsert inserts zeros there.
	SourceCollapse
	SourceInsert
	// SourceClone replaces the file's blocks by those of a reflink in which [Off, Off+Len) was written.
	SourceClone
	// SourceSnapshot makes a reflink of the file and writes [Off, Off+Len) of the reflink.
	SourceSnapshot
	// SourceChmod, SourceLink and SourceRename change metadata: the mode, the number of names, the name.
	SourceChmod
	SourceLink
	SourceRename

	// Map maps the pages of [Off, Off+Len) for a GPU client that maps nothing. It is also an acquire, unless Lazy.
	Map
	// Unmap ends a GPU client's mapping.
	Unmap
	// Kill ends a GPU client's process.
	Kill
	// Store stores Len bytes at Off by a GPU client's kernel.
	Store
	// Load loads Len bytes at Off.
	Load
	// Acquire is macquire of the pages of [Off, Off+Len).
	Acquire
	// Release is mrelease of the pages of [Off, Off+Len).
	Release
	// Publish is the first half of a Release; the kernel still holds its pages.
	Publish
	// Drop makes the kernel write and drop the pages of [Off, Off+Len) that the client's Publish asked it to drop.
	Drop
	// Finish is the second half of a Release, after Publish.
	Finish
	// DontNeed is gaia_madvise(DONTNEED) of the pages of [Off, Off+Len).
	DontNeed
	// Peek looks at all of the extents that a GPU client mapped, beyond its mapping.
	Peek
	// Evict evicts the pages of [Off, Off+Len) that no client maps from the client's device.
	Evict
	// Collect brings home everything that was released and does not drain, in the background.
	Collect
	// Untrack stops tracking pages that no client maps for writing any more.
	Untrack
	// Group begins a group of the pages of [Off, Off+Len), stores Len bytes at Off, and releases the group.
	Group
	// Use begins a bracket of the pages of [Off, Off+Len) of a movable mapping, and acquires them unless Lazy. Done
	// ends brackets of the client; Val says which.
	Use
	Done

	// View makes a view of the step's Segments for a GPU client without a view, and acquires it unless Lazy. Look
	// acquires all or a part of the view and reads it. Unview closes the view.
	View
	Look
	Unview

	numOps
)

var opNames = [numOps]string{
	"write", "mapstore", "read", "directread", "fsync", "truncate", "punch", "flush", "reclaim",
	"append", "directwrite", "opentrunc", "allocate", "zero", "punchrest", "seekread", "copy", "copyout",
	"stat", "settimes", "chmod", "reopen", "unlink",
	"sourcewrite", "sourceappend", "sourcetruncate", "sourcepunch", "sourcecollapse", "sourceinsert",
	"sourceclone", "sourcesnapshot", "sourcechmod", "sourcelink", "sourcerename",
	"map", "unmap", "kill", "store", "load", "acquire", "release", "publish", "drop", "finish", "dontneed", "peek",
	"evict", "collect", "untrack", "group", "use", "done", "view", "look", "unview",
}

func (o Op) String() string { return opNames[o] }

// hasRange reports whether the Op uses Off and Len.
func (o Op) hasRange() bool {
	switch o {
	case Fsync, Truncate, Unmap, Kill, Finish, Peek, Collect, Untrack, Append, OpenTrunc, PunchRest, SourceAppend,
		SourceTruncate:
		return false
	case Stat, SetTimes, Chmod, Reopen, Unlink, SourceChmod, SourceLink, SourceRename, Done, Unview:
		return false
	}
	return true
}

// hasOffset and hasLength are for operations that use only one of Off and Len.
func (o Op) hasOffset() bool { return o == Truncate || o == PunchRest || o == SourceTruncate }
func (o Op) hasLength() bool { return o == Append || o == SourceAppend }

// wholePages reports whether programs use the Op with whole pages.
func (o Op) wholePages() bool {
	return o.hasRange() && (o >= Map && o < View && o != Store && o != Load && o != Group || o == SourceCollapse ||
		o == SourceInsert)
}

func (o Op) stores() bool {
	switch o {
	case Write, MapStore, Store, Group, Append, DirectWrite, SourceWrite, SourceAppend, SourceClone, SourceSnapshot,
		SetTimes:
		return true
	}
	return false
}

// OfViews reports whether the Op is about views.
func (o Op) OfViews() bool { return o >= View }

// hasValue reports whether the Op uses Val.
func (o Op) hasValue() bool { return o.stores() || o == Use || o == Done || o == View || o == Look }

// byCPU reports whether the Op is of CPU programs, in SOURCE, or of the daemon in the background.
func (o Op) byCPU() bool { return o < Map || o == Collect || o == Untrack }

// InSource reports whether the Op happens directly in SOURCE.
func (o Op) InSource() bool { return o >= SourceWrite && o < Map }

// Exact reports whether the Model predicts the result of the Op exactly and every System supports it. The results of
// other Ops are judged by the Oracle only. Groups, and steps of brackets and views, are predicted exactly too, but not
// every System supports them: a System that does must ask for them.
func (o Op) Exact() bool {
	switch o {
	case Stat, SetTimes, Chmod, Reopen, Unlink, Peek, Group, Use, Done:
		return false
	}
	return !o.InSource() && !o.OfViews()
}

// Ops returns all operations.
func Ops() (list []Op) {
	for o := range numOps {
		list = append(list, o)
	}
	return list
}

// OpNamed returns the Op with a name.
func OpNamed(name string) (Op, bool) {
	i := slices.Index(opNames[:], name)
	return Op(max(i, 0)), i >= 0
}

// Client numbers the processes of a program: first the CPU programs, then the GPU programs.
type Client int

// Step is one event of a program.
type Step struct {
	Op     Op
	Client Client
	// Off and Len are a range of bytes of the file.
	Off, Len int64
	// Val is the first byte stored. Byte i is Val+i, or Val if Same is set.
	Val  byte
	Same bool
	// From is the source offset of a Copy.
	From int64
	// Keep is for Allocate and Zero.
	Keep bool
	// Writable, Lazy and Movable are for Map. Use and View may be Lazy, too.
	Writable, Lazy, Movable bool
	// During says that the step, a Store, happens during the step before it.
	During bool
}

// Bytes returns the bytes that a step stores.
func (s Step) Bytes() []byte {
	b := make([]byte, s.Len)
	for i := range b {
		b[i] = s.Val
		if !s.Same {
			b[i] += byte(i)
		}
	}
	return b
}

// String returns the step in the form that ParseStep reads, without the client's name, which only Layout knows.
func (s Step) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v", s.Op)
	if s.Op.hasOffset() {
		fmt.Fprintf(&b, " %d", s.Off)
	}
	if s.Op.hasLength() {
		fmt.Fprintf(&b, " 0+%d", s.Len)
	}
	if s.Op.hasRange() {
		fmt.Fprintf(&b, " %d+%d", s.Off, s.Len)
	}
	if s.Op.hasValue() {
		fmt.Fprintf(&b, " 0x%02x", s.Val)
		if s.Same && s.Op.stores() {
			b.WriteString(" same")
		}
	}
	if s.Op == Copy {
		fmt.Fprintf(&b, " from %d", s.From)
	}
	if s.Keep && (s.Op == Allocate || s.Op == Zero) {
		b.WriteString(" keep")
	}
	if s.Op == Map && s.Writable {
		b.WriteString(" writable")
	}
	if (s.Op == Map || s.Op == Use || s.Op == View) && s.Lazy {
		b.WriteString(" lazy")
	}
	if s.Op == Map && s.Movable {
		b.WriteString(" movable")
	}
	if s.During {
		b.WriteString(" during")
	}
	return b.String()
}

// Layout describes the programs and devices that take part.
type Layout struct {
	// Pages limits the size of the file.
	Pages int
	// Devices is the number of devices.
	Devices int
	// CPUs is the number of CPU programs. GPUs has the device of each GPU program.
	CPUs int
	GPUs []int
	// WriteBack says that the kernel caches writes.
	WriteBack bool
	// ReadAhead says that a read of a page that a device released also brings home the released pages after it.
	ReadAhead bool
	// Size is the file's initial size. Its bytes are zero.
	Size int64
}

// DefaultLayout returns a layout with two CPU programs and three devices. Two GPU programs share the first device.
func DefaultLayout(writeBack bool) Layout {
	return Layout{Pages: 6, Devices: 3, CPUs: 2, GPUs: []int{0, 0, 1, 2}, WriteBack: writeBack, Size: 4*PageSize + 1000}
}

// IsCPU reports whether c is a CPU program.
func (l Layout) IsCPU(c Client) bool { return int(c) < l.CPUs }

// Device returns the device of a GPU program.
func (l Layout) Device(c Client) int { return l.GPUs[int(c)-l.CPUs] }

// Clients returns the number of programs.
func (l Layout) Clients() int { return l.CPUs + len(l.GPUs) }

// Name returns "cpu0", or "gpu1b" for the second program of device 1.
func (l Layout) Name(c Client) string {
	if l.IsCPU(c) {
		return fmt.Sprintf("cpu%d", c)
	}
	letter := 'a'
	for _, d := range l.GPUs[:int(c)-l.CPUs] {
		if d == l.Device(c) {
			letter++
		}
	}
	return fmt.Sprintf("gpu%d%c", l.Device(c), letter)
}

// Format returns a step as one line of a program.
func (l Layout) Format(s Step) string { return l.Name(s.Client) + " " + s.String() }

// ParseStep parses a line that Format returned.
func (l Layout) ParseStep(line string) (s Step, err error) {
	f := strings.Fields(line)
	if len(f) < 2 {
		return s, fmt.Errorf("%q: want a client and an operation", line)
	}
	s.Client = -1
	for c := range l.Clients() {
		if l.Name(Client(c)) == f[0] {
			s.Client = Client(c)
		}
	}
	if s.Client < 0 {
		return s, fmt.Errorf("%q: no client %q", line, f[0])
	}
	op, ok := OpNamed(f[1])
	if !ok {
		return s, fmt.Errorf("%q: no operation %q", line, f[1])
	}
	s.Op = op
	for i, w := range f[2:] {
		off, n, isRange := strings.Cut(w, "+")
		switch {
		case w == "from":
		case f[1+i] == "from":
			s.From, err = parseOffset(w)
		case w == "keep":
			s.Keep = true
		case w == "same":
			s.Same = true
		case w == "writable":
			s.Writable = true
		case w == "lazy":
			s.Lazy = true
		case w == "movable":
			s.Movable = true
		case w == "during":
			s.During = true
		case strings.HasPrefix(w, "0x"):
			v, perr := strconv.ParseUint(w[2:], 16, 8)
			s.Val, err = byte(v), perr
		case isRange:
			if s.Off, err = parseOffset(off); err == nil {
				s.Len, err = parseOffset(n)
			}
		default:
			s.Off, err = parseOffset(w)
		}
		if err != nil {
			return s, fmt.Errorf("%q: %q: %w", line, w, err)
		}
	}
	return s, nil
}

// parseOffset parses a number of bytes, or "2p7" for byte 7 of page 2.
func parseOffset(w string) (int64, error) {
	pages, rest, ok := strings.Cut(w, "p")
	if !ok {
		return strconv.ParseInt(w, 10, 64)
	}
	n, err := strconv.ParseInt(pages, 10, 64)
	if err != nil || rest == "" {
		return n * PageSize, err
	}
	m, err := strconv.ParseInt(rest, 10, 64)
	return n*PageSize + m, err
}

// ParseProgram parses lines of steps. It skips empty lines and lines that begin with #.
func (l Layout) ParseProgram(text string) (program []Step, err error) {
	for _, line := range strings.Split(text, "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		s, err := l.ParseStep(line)
		if err != nil {
			return nil, err
		}
		program = append(program, s)
	}
	return program, nil
}
