package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	pageSize = 4096
	// pieceSize is how many bytes one SHA-256 covers.
	pieceSize = 64 << 20
	// headerSize is the length of a data file's header, which makes it a safetensors file.
	headerSize = 64 << 10
)

// dataFile is a file whose bytes are checked by their hashes.
type dataFile struct {
	name string
	size int64
	sums [][sha256.Size]byte // of each pieceSize bytes, and of the rest
}

// looked returns the pieces for a quick check: the first, one in the middle and the last.
func (d *dataFile) looked() []int { return []int{0, len(d.sums) / 2, len(d.sums) - 1} }

// same compares the hashes that another process computed for the pieces of looked.
func (d *dataFile) same(sums [][]byte) error {
	for k, i := range d.looked() {
		if k >= len(sums) || !bytes.Equal(sums[k], d.sums[i][:]) {
			return fmt.Errorf("wrong bytes: piece %d of %s in another process has another SHA-256 than the file", i,
				d.name)
		}
	}
	return nil
}

// pieces returns how many pieces n bytes have.
func pieces(n int64) int { return int((n + pieceSize - 1) / pieceSize) }

// piece returns the range of piece i of n bytes.
func piece(i int, n int64) (off, size int64) {
	off = int64(i) * pieceSize
	return off, min(pieceSize, n-off)
}

// parallel calls f for 0 to n-1, up to `most` calls at a time; 0 means as many as there are processors. It returns the
// first errors.
func parallel(n, most int, f func(i int) error) error {
	workers := min(n, runtime.GOMAXPROCS(0))
	if most > 0 {
		workers = min(n, most)
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && errs[w] == nil; i = next.Add(1) - 1 {
				errs[w] = f(int(i))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// safetensorsHeader describes size-headerSize bytes as tensors of one-byte elements, none larger than a piece.
func safetensorsHeader(size int64) ([]byte, error) {
	type tensor struct {
		Type    string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	const most = 500 // as many tensors as fit into the header
	if size > most*pieceSize {
		return nil, fmt.Errorf("a file of %s has more tensors than its header has room for; the largest is %s",
			sizeText(size), sizeText(most*pieceSize))
	}
	tensors := make(map[string]tensor)
	for at := int64(0); at < size-headerSize; at += pieceSize {
		end := min(at+pieceSize, size-headerSize)
		tensors[fmt.Sprintf("t%05d", at/pieceSize)] = tensor{"U8", []int64{end - at}, [2]int64{at, end}}
	}
	text, err := json.Marshal(tensors)
	if err != nil {
		return nil, err
	}
	room := headerSize - 8
	header := binary.LittleEndian.AppendUint64(nil, uint64(room))
	return append(append(header, text...), bytes.Repeat([]byte(" "), room-len(text))...), nil
}

// makeData makes a data file of random bytes on the backing filesystem, and writes it to the disk.
func makeData(path, name string, size int64) (*dataFile, error) {
	header, err := safetensorsHeader(size)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// If the disk is full, it fails here and not later. Some filesystems cannot reserve space.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("no space for %d bytes at %s: %w; choose another directory with --dir, or a smaller --size", size, path, err)
	}
	d := &dataFile{name: name, size: size, sums: make([][sha256.Size]byte, pieces(size))}
	err = parallel(len(d.sums), 0, func(i int) error {
		off, n := piece(i, size)
		p, err := hostMemory(n)
		if err != nil {
			return err
		}
		defer unix.Munmap(p)
		_, _ = rand.NewChaCha8([32]byte{1, byte(i), byte(i >> 8)}).Read(p) // never fails
		if i == 0 {
			copy(p, header)
		}
		d.sums[i] = sha256.Sum256(p)
		_, err = f.WriteAt(p, off)
		return err
	})
	if err != nil {
		return nil, err
	}
	return d, f.Sync()
}

// checker compares a GPU's memory with the expected bytes.
type checker struct {
	gpu     gpu
	buffers chan []byte // page-locked, one piece each
}

// newChecker allocates page-locked memory for n pieces at a time.
func newChecker(g gpu, n int) (*checker, error) {
	c := &checker{gpu: g, buffers: make(chan []byte, n)}
	for range n {
		p, err := g.pinned(pieceSize)
		if err != nil {
			return nil, fmt.Errorf("page-locked memory: %w", err)
		}
		c.buffers <- p
	}
	return c, nil
}

// read calls f with each piece of the n bytes at a, on several goroutines. on is the GPU with that memory.
func (c *checker) read(on gpu, a address, n int64, f func(i int, p []byte) error) error {
	return parallel(pieces(n), cap(c.buffers), func(i int) error {
		off, size := piece(i, n)
		buf := <-c.buffers
		defer func() { c.buffers <- buf }()
		if err := on.copyOut(buf[:size], a+address(off)); err != nil {
			return err
		}
		return f(i, buf[:size])
	})
}

// data compares n bytes at a with d. a is the start of the memory, or a multiple of pieceSize into it.
func (c *checker) data(on gpu, a address, n int64, d *dataFile) error {
	return c.read(on, a, n, func(i int, p []byte) error {
		if len(p) < pieceSize && int64(i)*pieceSize+int64(len(p)) < d.size {
			return nil // there is no hash for a part of a piece
		}
		if sha256.Sum256(p) != d.sums[i] {
			return fmt.Errorf("wrong bytes: piece %d of %s in the memory of %s has another SHA-256 than the file", i,
				d.name, on)
		}
		return nil
	})
}

// same compares n bytes at a with those at off in a file.
func (c *checker) same(on gpu, a address, f *os.File, off, n int64) error {
	return c.read(on, a, n, func(i int, p []byte) error {
		at, _ := piece(i, n)
		read := make([]byte, len(p))
		if _, err := f.ReadAt(read, off+at); err != nil {
			return err
		}
		if sha256.Sum256(read) != sha256.Sum256(p) {
			return fmt.Errorf("wrong bytes: %s at %d has another SHA-256 in the memory of %s than for a reader",
				f.Name(), off+at, on)
		}
		return nil
	})
}

// wrongInFile counts bytes among the first n of a file that no writer of stripes with this seed stored.
func wrongInFile(f *os.File, n int64, seed byte) (int64, error) {
	var total atomic.Int64
	err := parallel(pieces(n), 0, func(i int) error {
		off, size := piece(i, n)
		p := make([]byte, size)
		if _, err := f.ReadAt(p, off); err != nil {
			return err
		}
		total.Add(wrong(p, off, seed))
		return nil
	})
	return total.Load(), err
}
