package stress

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// The file that writers of all kinds share. A page has a slot for each of eight writers, so all of them write all of
// its pages. A writer stores higher and higher numbers into its slots: what is found in one tells how much of the
// writer's work is there.
const (
	writerSlot  = 512
	writers     = 4096 / writerSlot
	sharedPages = 512
	sharedBytes = sharedPages * 4096
)

// writerOffset is where the slot of a writer in a page begins.
func writerOffset(writer, page int) int { return page*4096 + writer*writerSlot }

func init() {
	programs["write"] = func(args []string) error { return work(args, newFileWriter) }
	programs["mmap"] = func(args []string) error { return work(args, newMapWriter) }
	programs["gpu"] = func(args []string) error { return work(args, newGPUWriter) }
}

// storer is a way to write slots. Its errors are those of the system or of the helper library.
type storer interface {
	// store writes n all over the slot of a page and does not say that anybody sees it.
	store(page int, n uint64) error
	// look reads the slot back, as this writer sees it.
	look(page int, p []byte) error
	// publish makes what was stored visible to everyone; durable, safe from a crash too.
	publish(durable bool) error
}

// lossOf tells the errors that a program meets when the daemon is gone from those that it must not meet.
func lossOf(err error) (syscall.Errno, bool) {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return 0, false
	}
	switch errno {
	case unix.ENOTCONN, unix.ECONNABORTED, unix.ECONNREFUSED, unix.EIO, unix.EFAULT:
		return errno, true
	}
	return errno, false
}

// work runs a writer: path, ledger, writer, device, seed, pause. It stores in rounds, with a pause between them, until
// asked to end, enters in the ledger what it was promised, checks that it sees its own bytes, and ends well when the
// daemon is lost.
func work(args []string, open func(path string, writer, device int) (storer, error)) error {
	var numbers [2]int
	for i := range numbers {
		n, err := strconv.Atoi(args[2+i])
		if err != nil {
			return err
		}
		numbers[i] = n
	}
	writer, device := numbers[0], numbers[1]
	seed, err := strconv.ParseUint(args[4], 10, 64)
	if err != nil {
		return err
	}
	pause, err := time.ParseDuration(args[5])
	if err != nil {
		return err
	}
	l, err := openLedger(args[1])
	if err != nil {
		return err
	}
	s, err := open(args[0], writer, device)
	if err != nil {
		return err
	}
	done := asked()
	fmt.Println("ready")
	err = rounds(s, l, rand.New(rand.NewPCG(seed, uint64(writer))), pause, done)
	if errno, lost := lossOf(err); lost {
		fmt.Println("lost:", unix.ErrnoName(errno))
		return nil
	}
	if err == nil {
		err = s.publish(true)
	}
	return err
}

func rounds(s storer, l *ledger, rng *rand.Rand, pause time.Duration, done <-chan struct{}) error {
	var last [sharedPages]uint32
	buf := make([]byte, writerSlot)
	number := uint32(0)
	for round := 0; !isDone(done); round++ {
		time.Sleep(pause)
		number++
		l.begun().Store(uint64(number))
		pages := make([]int, 1+rng.IntN(16))
		first := rng.IntN(sharedPages)
		for i := range pages {
			pages[i] = (first + i) % sharedPages // neighbours, so that runs of pages move
			if round%3 == 0 {
				pages[i] = rng.IntN(sharedPages)
			}
			page := pages[i]
			if err := s.look(page, buf); err != nil {
				return err
			}
			if !filled(buf, uint64(last[page])) {
				return fmt.Errorf("the slot of page %d does not read %d, which this program stored there: % x", page,
					last[page], buf[:16])
			}
			if err := s.store(page, uint64(number)); err != nil {
				return err
			}
			last[page] = number
		}
		durable := round%8 == 7
		if err := s.publish(durable); err != nil {
			return err
		}
		for _, page := range pages {
			if !l.add(uint32(page), number) {
				return nil
			}
		}
		if durable {
			l.mark()
		}
	}
	return nil
}

// fileWriter is a CPU program that calls pread and pwrite.
type fileWriter struct {
	fd, writer int
	buf        []byte
}

func newFileWriter(path string, writer, _ int) (storer, error) {
	fd, err := unix.Open(path, unix.O_RDWR, 0)
	return &fileWriter{fd, writer, make([]byte, writerSlot)}, err
}

func (w *fileWriter) store(page int, n uint64) error {
	fill(w.buf, n)
	_, err := unix.Pwrite(w.fd, w.buf, int64(writerOffset(w.writer, page)))
	return err
}

func (w *fileWriter) look(page int, p []byte) error {
	_, err := unix.Pread(w.fd, p, int64(writerOffset(w.writer, page)))
	return err
}

func (w *fileWriter) publish(durable bool) error {
	if durable {
		return unix.Fsync(w.fd)
	}
	return nil
}

// mapWriter is a CPU program that maps the file.
type mapWriter struct {
	memory []byte
	writer int
}

func newMapWriter(path string, writer, _ int) (storer, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	memory, err := unix.Mmap(int(f.Fd()), 0, sharedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return &mapWriter{memory, writer}, err
}

// touch runs what may fault because the daemon is gone: that is EFAULT here, SIGBUS in other languages.
func touch(what func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(runtime.Error); !ok {
				panic(r)
			}
			err = unix.EFAULT
		}
	}()
	what()
	return nil
}

func (w *mapWriter) store(page int, n uint64) error {
	return touch(func() { fill(w.memory[writerOffset(w.writer, page):][:writerSlot], n) })
}

func (w *mapWriter) look(page int, p []byte) error {
	return touch(func() { copy(p, w.memory[writerOffset(w.writer, page):]) })
}

func (w *mapWriter) publish(durable bool) error {
	if durable {
		return unix.Msync(w.memory, unix.MS_SYNC)
	}
	return nil
}

// gpuWriter is a GPU program.
type gpuWriter struct {
	m      *gaiafs.Mapping
	writer int
	rounds int
}

func newGPUWriter(path string, writer, device int) (storer, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m, err := gaiafs.Map(f, 0, sharedBytes, gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(device))
	return &gpuWriter{m: m, writer: writer}, err
}

func (w *gpuWriter) store(page int, n uint64) error {
	var slot [writerSlot]byte
	fill(slot[:], n)
	_, err := w.m.WriteAt(slot[:], int64(writerOffset(w.writer, page)))
	return err
}

func (w *gpuWriter) look(page int, p []byte) error {
	_, err := w.m.ReadAt(p, int64(writerOffset(w.writer, page)))
	return err
}

func (w *gpuWriter) publish(durable bool) error {
	w.rounds++
	if durable {
		return w.m.Sync(0, sharedBytes)
	}
	if _, err := w.m.Release(0, sharedBytes); err != nil {
		return err
	}
	if w.rounds%3 == 0 {
		_, err := w.m.Acquire(0, sharedBytes)
		return err
	}
	return nil
}
