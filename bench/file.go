package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// dataFile is a file that several places show.
type dataFile struct {
	name string
	// size is how many bytes the rows use, whole the size of the file.
	size, whole int64
	// sums are the checksums of these bytes, page by page. They are valid as long as only reading rows use the file.
	sums []uint32
	// given is the state of the user's file at the start; nil for a file of bench itself.
	given *stamp
	path  string // path of the user's file

	mu   sync.Mutex
	held map[int]*gaiafs.Mapping // by device; protected by mu
}

// stamp is what changes when a file is written to.
type stamp struct {
	size         int64
	mtime, ctime unix.Timespec
	inode        uint64
}

// stampOf returns the stamp of a file.
func stampOf(path string) (*stamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return &stamp{st.Size, st.Mtim, st.Ctim, st.Ino}, nil
}

// The most that is read of a user's file.
const (
	mostOfFile      = 1 << 30
	mostOfFileQuick = 256 << 20
)

// leastOfFile is the minimum size of a user's file. Smaller files give no useful figures.
const leastOfFile = 1 << 20

// give opens the user's file. It reads the bytes that rows will use, except of a model, which is used whole and checked
// elsewhere.
func (s *session) give() (*dataFile, error) {
	if s.Model == "" {
		return giveFile(s.File, s.Quick)
	}
	st, err := os.Stat(s.File)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("--model %s: it is not a regular file", s.File)
	}
	if err := isSafetensors(s.File, st.Size()); err != nil {
		return nil, fmt.Errorf("--model %s: it is not a safetensors file: %w", s.File, err)
	}
	d := &dataFile{name: filepath.Base(s.File), path: s.File, whole: st.Size(), size: st.Size()}
	d.given, err = stampOf(s.File)
	return d, err
}

// isSafetensors fails if a file of that size does not begin with the length of a header, and a header. The loaders
// check the rest.
func isSafetensors(path string, size int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var begin [9]byte
	if _, err := io.ReadFull(f, begin[:]); err != nil {
		return err
	}
	if n := binary.LittleEndian.Uint64(begin[:]); n > uint64(size-8) || begin[8] != '{' {
		return errors.New("it does not begin with a header")
	}
	return nil
}

// giveFile opens the user's file and computes its checksums.
func giveFile(path string, quick bool) (*dataFile, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("--file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("--file %s: it is not a regular file", path)
	}
	if st.Size() < leastOfFile {
		return nil, fmt.Errorf("--file %s: it has %d bytes; at least %d are needed", path, st.Size(), leastOfFile)
	}
	d := &dataFile{name: filepath.Base(path), path: path, whole: st.Size(),
		size: min(st.Size(), mostOfFile) &^ (pageSize - 1)}
	if quick {
		d.size = min(d.size, mostOfFileQuick)
	}
	if d.given, err = stampOf(path); err != nil {
		return nil, err
	}
	if d.sums, err = checksums(path, d.size); err != nil {
		return nil, fmt.Errorf("--file: %w", err)
	}
	return d, d.unchanged()
}

// errChanged says that a measurement cannot be trusted.
var errChanged = errors.New("it was changed while it was measured, so the row is invalid; run it while no program writes the file")

// unchanged fails if the user's file has changed.
func (d *dataFile) unchanged() error {
	if d.given == nil {
		return nil
	}
	now, err := stampOf(d.path)
	if err == nil && *now != *d.given {
		err = fmt.Errorf("%s: %w", d.path, errChanged)
	}
	return err
}

// newFile makes a file of that name and size in each of the places, until the group ends. If the user gave a file,
// newFile returns that.
func (s *session) newFile(name string, size int64, places ...*place) (*dataFile, error) {
	d := s.given
	if d == nil {
		d = &dataFile{name: name, size: size, whole: size}
		for _, p := range places {
			var err error
			if d.sums, err = s.fill(p.home(name), size); err != nil {
				return nil, err
			}
		}
		s.later(func() {
			for _, p := range places {
				_ = os.Remove(p.path(name))
			}
		})
	}
	s.later(d.letGo)
	return d, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fill is fill for a file of the session.
func (s *session) fill(path string, n int64) (sums []uint32, err error) {
	if s.listing {
		return nil, nil
	}
	if sums, err = fill(path, n); err != nil {
		return nil, explain(err, s.Dir)
	}
	return sums, nil
}

// fill makes a file of n bytes that do not compress or repeat, and writes it to the disk. It returns the checksums.
func fill(path string, n int64) (sums []uint32, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	rnd := rand.NewChaCha8([32]byte{7})
	for at := int64(0); at < n; at += int64(len(block)) {
		part := block[:min(int64(len(block)), n-at)]
		_, _ = rnd.Read(part) // never fails
		sums = appendSums(sums, part)
		if _, err := f.Write(part); err != nil {
			return nil, err
		}
	}
	return sums, f.Sync()
}

// appendSums adds the checksums of the pages of p. The last page may be short.
func appendSums(sums []uint32, p []byte) []uint32 {
	for part := range slices.Chunk(p, pageSize) {
		sums = append(sums, crc32.Checksum(part, castagnoli))
	}
	return sums
}

// agrees fails if a place shows other bytes than the backing file has.
func (p *place) agrees(d *dataFile) error {
	mine, err := checksums(p.path(d.name), d.size)
	if err != nil {
		return err
	}
	home, err := checksums(p.home(d.name), d.size)
	if err == nil && !slices.Equal(mine, home) {
		err = fmt.Errorf("%s and the backing file differ", p.path(d.name))
	}
	return err
}

// checksums reads the first n bytes of a file.
func checksums(path string, n int64) (sums []uint32, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	block := make([]byte, min(n, 1<<20))
	for left := n; left > 0; {
		part := block[:min(left, int64(len(block)))]
		if _, err := io.ReadFull(f, part); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		sums = appendSums(sums, part)
		left -= int64(len(part))
	}
	return sums, nil
}

// verify fails if p differs from the file, starting with the page at off.
func (d *dataFile) verify(p []byte, off int64) error {
	first := off / pageSize
	for i, sum := range appendSums(nil, p) {
		if sum != d.sums[first+int64(i)] {
			return errors.Join(d.unchanged(), fmt.Errorf("page %d of %s was read with bytes that the file does not have",
				first+int64(i), d.name))
		}
	}
	return nil
}

// checkBytes fails if a place shows other bytes than the file has.
func (d *dataFile) checkBytes(p *place) error {
	sums, err := checksums(p.path(d.name), d.size)
	if err != nil {
		return err
	}
	for i := range sums {
		if sums[i] != d.sums[i] {
			return errors.Join(d.unchanged(), fmt.Errorf("page %d of %s differs from the file", i, p.path(d.name)))
		}
	}
	return nil
}

// reading turns a side into one that reads the file. check compares bytes in the same state. If the user's file has
// changed, that is an error.
func (d *dataFile) reading(x rows.Side, check func(ctx context.Context) error) rows.Side {
	measure := x.Measure
	x.Measure = func(ctx context.Context) (float64, error) {
		v, err := measure(ctx)
		if changed := d.unchanged(); changed != nil {
			err = changed
		}
		return v, err
	}
	x.Check = func(ctx context.Context) error {
		if x.Prepare != nil {
			if err := x.Prepare(ctx); err != nil {
				return err
			}
		}
		return check(ctx)
	}
	return x
}

// mapped maps the file on a device of a mount for reading, until the group ends.
func (d *dataFile) mapped(p *place, device int, options ...gaiafs.Option) (*gaiafs.Mapping, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m := d.held[device]; m != nil {
		return m, nil
	}
	f, err := os.Open(p.path(d.name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m, err := gaiafs.Map(f, 0, d.size, gaiafs.ProtRead, device, append(options, gaiafs.Stays())...)
	if isFull(err) {
		return nil, rows.Impossible{Reason: fmt.Sprintf("%d MiB do not fit on a device: %v", d.size>>20, err)}
	}
	if err != nil {
		return nil, err
	}
	if d.held == nil {
		d.held = make(map[int]*gaiafs.Mapping)
	}
	d.held[device] = m
	return m, nil
}

// letGo unmaps the file.
func (d *dataFile) letGo() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.held {
		_ = m.Close()
	}
	d.held = nil
}

// onDevice returns which share of the file's pages is on a device and up to date there.
func (d *dataFile) onDevice(p *place, device int) (float64, error) {
	st, err := p.status()
	if err != nil {
		return 0, err
	}
	for _, f := range st.Files {
		if f.Name != d.name {
			continue
		}
		for _, h := range f.Holders {
			if h.Device == device {
				return float64(h.Resident-h.Stale) * pageSize / float64(d.size), nil
			}
		}
	}
	return 0, nil
}
