package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PageSize is the unit of versions and merging, in bytes.
const PageSize = 4096

// Op is what a Step does.
type Op uint8

const (
	// Write is pwrite of Len bytes at Off by a CPU program.
	Write Op = iota
	// MapStore stores Len bytes at Off through a CPU program's shared mapping.
	MapStore
	// Read is pread of Len bytes at Off by a CPU program, through the kernel's page cache.
	Read
	// DirectRead is the same with O_DIRECT.
	DirectRead
	// Fsync is fsync by a CPU program.
	Fsync
	// Truncate sets the size to Off.
	Truncate
	// Punch makes [Off, Off+Len) a hole.
	Punch
	// Flush is the kernel's write-back of the dirty pages of [Off, Off+Len), which it keeps.
	Flush
	// Reclaim has the kernel forget the clean pages of [Off, Off+Len).
	Reclaim
	// Append is a write of Len bytes with O_APPEND.
	Append
	// DirectWrite is a Write with O_DIRECT.
	DirectWrite
	// OpenTrunc opens the file with O_TRUNC.
	OpenTrunc
	// Allocate is fallocate of [Off, Off+Len), with Keep one that leaves the size alone.
	Allocate
	// Zero is fallocate with ZERO_RANGE, which makes the file longer unless Keep.
	Zero
	// PunchRest makes everything from Off to the largest offset a hole.
	PunchRest
	// SeekRead reads [Off, Off+Len) as cp --sparse does: what SEEK_DATA and SEEK_HOLE call data is read, the rest is
	// zeros.
	SeekRead
	// Copy is copy_file_range of Len bytes at From to Off.
	Copy
	// CopyOut is copy_file_range of [Off, Off+Len) to another file, which is then read.
	CopyOut
	// Stat returns what fstat says, see AppendStat.
	Stat
	// SetTimes sets mtime to second Val.
	SetTimes
	// Chmod changes the file's mode.
	Chmod
	// Reopen closes the file and opens it again.
	Reopen
	// Unlink removes the file's name. Clients go on with what they have open.
	Unlink

	// SourceWrite writes [Off, Off+Len) in SOURCE directly, as do all that follow up to Map.
	SourceWrite
	// SourceAppend appends Len bytes.
	SourceAppend
	// SourceTruncate sets the size to Off.
	SourceTruncate
	// SourcePunch makes [Off, Off+Len) a hole.
	SourcePunch
	// SourceCollapse takes the pages of [Off, Off+Len) out, and SourceInsert puts zeros there.
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

	// Map maps the pages of [Off, Off+Len) for a GPU client that maps nothing. It is an acquire unless Lazy.
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
	// Drop has the kernel write and drop the pages of [Off, Off+Len) that the client's Publish asked it to.
	Drop
	// Finish is the rest of the Release that Publish began.
	Finish
	// DontNeed is gaia_madvise(DONTNEED) of the pages of [Off, Off+Len).
	DontNeed
	// Peek looks at the whole of the extents that a GPU client mapped, beyond its mapping.
	Peek
	// Evict takes the pages of [Off, Off+Len) that no client maps from the device of the client.
	Evict
	// Collect brings everything home that was released and does not drain, in the background.
	Collect
	// Untrack stops tracking what no client maps for writing any more.
	Untrack
	// Group begins a group of the pages of [Off, Off+Len), stores Len bytes at Off, and releases the group.
	Group
	// Use begins a bracket of the pages of [Off, Off+Len) of a movable mapping, and acquires them unless Lazy. Done
	// ends brackets of the client, which ones Val says.
	Use
	Done

	// View makes a view of the Segments of the step for a GPU client that has none, and acquires it unless Lazy. Look
	// acquires a part of it, or all, and reads that. Unview ends it.
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

// hasOffset and hasLength are for operations without a range of both.
func (o Op) hasOffset() bool { return o == Truncate || o == PunchRest || o == SourceTruncate }
func (o Op) hasLength() bool { return o == Append || o == SourceAppend }

// wholePages reports whether programs use whole pages with the Op.
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

// OfViews reports whether it is about views.
func (o Op) OfViews() bool { return o >= View }

// hasValue reports whether the Op uses Val.
func (o Op) hasValue() bool { return o.stores() || o == Use || o == Done || o == View || o == Look }

// byCPU reports whether CPU programs do it, or somebody in SOURCE.
func (o Op) byCPU() bool { return o < Map || o == Collect || o == Untrack }

// InSource reports whether it happens beside the mount.
func (o Op) InSource() bool { return o >= SourceWrite && o < Map }

// Exact reports whether the Model knows exactly what comes of it. Of the others only the Oracle can judge. Groups and
// steps of views and of brackets are exact too, but not every System has them: who has asks for them besides.
func (o Op) Exact() bool {
	switch o {
	case Stat, SetTimes, Chmod, Reopen, Unlink, Peek, Group, Use, Done:
		return false
	}
	return !o.InSource() && !o.OfViews()
}

// Ops returns all of them.
func Ops() (list []Op) {
	for o := range numOps {
		list = append(list, o)
	}
	return list
}

// OpNamed returns the Op of a name.
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
	// Off and Len are bytes of the file.
	Off, Len int64
	// Val is the first byte stored; the i-th is Val+i, or Val again with Same.
	Val  byte
	Same bool
	// From is where a Copy copies from.
	From int64
	// Keep is for Allocate and Zero.
	Keep bool
	// Writable, Lazy and Movable are for Map. Use and View may be Lazy, too.
	Writable, Lazy, Movable bool
	// During says that the step, a Store, happens in the midst of the one before it.
	During bool
}

// Bytes returns what a step stores.
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

// String returns the step as ParseStep reads it, but for the client's name, which Layout knows.
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

// Layout says who takes part in a program.
type Layout struct {
	// Pages bounds the size of the file.
	Pages int
	// Devices is the number of devices.
	Devices int
	// CPUs is the number of CPU programs; GPUs has the device of each GPU program.
	CPUs int
	GPUs []int
	// WriteBack says that the kernel caches writes.
	WriteBack bool
	// ReadAhead says that a read that finds a page on a device brings home what devices released of the pages after it.
	ReadAhead bool
	// Size is the file's size at the start. Its bytes are zero.
	Size int64
}

// DefaultLayout is two CPU programs and three devices, of which two programs share the first.
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

// Format returns a step as a line of a program.
func (l Layout) Format(s Step) string { return l.Name(s.Client) + " " + s.String() }

// ParseStep reads what Format wrote.
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

// parseOffset reads a number of bytes, or "2p7" for byte 7 of page 2.
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

// ParseProgram reads lines of steps. Empty lines and those that begin with # are skipped.
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
