package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// workerVariable makes this program a worker: another process that maps files, like a second user of the GPU. It reads
// orders from standard input and answers each on standard output, in JSON.
const workerVariable = "GAIAFS_GPU_BENCH_WORKER"

// order is what a worker is asked to do.
type order struct {
	// Do is "open", "map", "check", "unmap", "udev" or "cufile".
	Do string
	// GPUs and Device name the device for open.
	GPUs   string `json:",omitempty"`
	Device int    `json:",omitempty"`
	// Path and Size name the file to map or read.
	Path string `json:",omitempty"`
	Size int64  `json:",omitempty"`
	// Pieces are the numbers of the pieces that check and cufile hash.
	Pieces []int `json:",omitempty"`
	// Log is the folder of cuFile's log.
	Log string `json:",omitempty"`
	// Outside, Kept, Name and Text are arguments of showRecord, for udev.
	Outside string `json:",omitempty"`
	Kept    string `json:",omitempty"`
	Name    string `json:",omitempty"`
	Text    string `json:",omitempty"`
}

type answer struct {
	Took time.Duration
	// Note is a remark on the result.
	Note string   `json:",omitempty"`
	Sums [][]byte `json:",omitempty"`
	Err  string   `json:",omitempty"`
	// Missing says that something the order needs is not installed.
	Missing bool `json:",omitempty"`
}

// errMissing says that a side's software is not installed.
var errMissing = errors.New("not installed")

// workIfAsked does not return if this process was started as a worker.
func workIfAsked() {
	if os.Getenv(workerVariable) == "" {
		return
	}
	if err := work(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func work(in io.Reader, out io.Writer) error {
	orders, answers := json.NewDecoder(in), json.NewEncoder(out)
	var w workerState
	for {
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return w.unmap()
		} else if err != nil {
			return err
		}
		a, err := w.carryOut(o)
		if err != nil {
			a.Err, a.Missing = strings.TrimPrefix(err.Error(), errMissing.Error()+": "), errors.Is(err, errMissing)
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

type workerState struct {
	gpu     gpu
	check   *checker
	mapping *gaiafs.Mapping
	cufile  *cuFile
}

func (w *workerState) unmap() error {
	if w.mapping == nil {
		return nil
	}
	m := w.mapping
	w.mapping = nil
	return m.Close()
}

func (w *workerState) carryOut(o order) (a answer, err error) {
	switch o.Do {
	case "open":
		choice, err := parseDevices(o.GPUs)
		if err != nil {
			return a, err
		}
		choice.ordinals = []int{o.Device}
		all, err := choice.open()
		if err != nil {
			return a, err
		}
		w.gpu = all[0]
		if w.check, err = newChecker(w.gpu, 1); err != nil {
			return a, err
		}
		// Allocate what the context needs for its first copy before anything is measured.
		some, err := w.gpu.alloc(pieceSize)
		if err != nil {
			return a, err
		}
		_, err = w.sums(some, pieceSize, []int{0})
		return a, errors.Join(err, w.gpu.free(some))
	case "map":
		f, err := os.Open(o.Path)
		if err != nil {
			return a, err
		}
		defer f.Close()
		start := time.Now()
		w.mapping, err = gaiafs.Map(f, 0, o.Size, gaiafs.ProtRead, w.gpu.device(), gaiafs.Stays())
		a.Took = time.Since(start)
		return a, err
	case "check":
		a.Sums, err = w.sums(addressOf(w.mapping), w.mapping.Len(), o.Pieces)
		return a, err
	case "unmap":
		return a, w.unmap()
	case "udev":
		return a, showRecord(o.Outside, o.Kept, o.Name, o.Text)
	case "cufile":
		if w.cufile == nil {
			if w.cufile, err = openCuFile(w.gpu, o.Log); err != nil {
				return a, err
			}
		}
		a.Took, err = w.cufile.read(o.Path, o.Size, func(at address) (err error) {
			a.Sums, err = w.sums(at, o.Size, o.Pieces)
			return err
		})
		a.Note = w.cufile.note()
		return a, err
	}
	return a, fmt.Errorf("a worker cannot do %q", o.Do)
}

// sums returns the SHA-256 of pieces of the size bytes at an address.
func (w *workerState) sums(at address, size int64, of []int) (sums [][]byte, err error) {
	for _, i := range of {
		off, n := piece(i, size)
		if err := w.check.read(w.gpu, at+address(off), n, func(_ int, p []byte) error {
			sum := sha256.Sum256(p)
			sums = append(sums, sum[:])
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return sums, nil
}

// child is a process that answers orders, as the session sees it.
type child struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	orders  *json.Encoder
	answers *json.Decoder
}

func startChild(cmd *exec.Cmd) (*child, error) {
	c := &child{cmd: cmd}
	cmd.Stderr = os.Stderr
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Pdeathsig, cmd.SysProcAttr.Setpgid = syscall.SIGKILL, true
	var err error
	if c.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c.orders, c.answers = json.NewEncoder(c.in), json.NewDecoder(bufio.NewReader(out))
	return c, nil
}

// childPatience is how long a child may take for an order, so that a hanging child does not take up the rest of the
// run.
const childPatience = 3 * time.Minute

// do makes the child carry out an order, and waits for the answer.
func (c *child) do(o order) (a answer, err error) {
	timer := time.AfterFunc(childPatience, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	if err := c.orders.Encode(o); err != nil {
		return a, fmt.Errorf("%s ended: %w", c.cmd.Path, err)
	}
	if err := c.answers.Decode(&a); err != nil {
		return a, fmt.Errorf("%s ended: %w", c.cmd.Path, err)
	}
	switch {
	case a.Missing:
		return a, fmt.Errorf("%w: %s", errMissing, a.Err)
	case a.Err != "":
		return a, fmt.Errorf("%s: %s", o.Do, a.Err)
	}
	return a, nil
}

// end makes the child end, and waits for it. If it does not end, it is killed.
func (c *child) end() {
	_ = c.in.Close()
	timer := time.AfterFunc(10*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	_ = c.cmd.Wait()
}

// startWorker starts a worker that has opened a device of --gpus. It is killed when ctx ends.
func startWorker(ctx context.Context, gpus string, device int) (*child, error) {
	return startWorkerIn(ctx, new(syscall.SysProcAttr), gpus, device)
}

// startWorkerIn is startWorker for a process with other attributes or another environment.
func startWorkerIn(ctx context.Context, attributes *syscall.SysProcAttr, gpus string, device int,
	environment ...string) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append(append(os.Environ(), workerVariable+"=1"), environment...)
	cmd.SysProcAttr = attributes
	c, err := startChild(cmd)
	if err != nil {
		return nil, err
	}
	if _, err := c.do(order{Do: "open", GPUs: gpus, Device: device}); err != nil {
		c.end()
		return nil, err
	}
	return c, nil
}
