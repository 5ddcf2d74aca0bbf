package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// peerEnv makes a test binary a peer.
const peerEnv = "GAIAFS_CONFORMANCE_PEER"

// served is true if Main was called: then a test binary that is started again becomes a peer, not a second test run.
var served bool

// Main must be the end of a backend's TestMain: os.Exit(conformance.Main(m, imports)). It runs the tests, or, in a
// process that a test started, serves that test.
func Main(m *testing.M, imports Import) (code int) {
	served = true
	if os.Getenv(peerEnv) == "" {
		return m.Run()
	}
	if err := serve(imports, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		return 1
	}
	return 0
}

// request is what a test asks of its peer. Views are numbered in the order of the descriptors given to the peer.
type request struct {
	Op       string // import, load, store, stamp or close
	View     int
	Size     int64
	Writable bool
	Off      int64
	N        int
	Data     []byte
	Stride   int64
	Rounds   int
}

type answer struct {
	Err  string
	Data []byte
	// Lost counts the stamped bytes that had another value after the round.
	Lost int
}

// serve answers requests until there are no more.
func serve(imports Import, in io.Reader, out io.Writer) error {
	views := map[int]View{}
	requests, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var r request
		if err := requests.Decode(&r); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		a, err := r.do(imports, views)
		if err != nil {
			a.Err = err.Error()
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

func (r *request) do(imports Import, views map[int]View) (a answer, err error) {
	if r.Op == "import" {
		v, err := imports(os.NewFile(uintptr(3+r.View), "export"), r.Size, r.Writable)
		if err == nil {
			views[r.View] = v
		}
		return a, err
	}
	v := views[r.View]
	if v == nil {
		return a, errors.New("no such view")
	}
	switch r.Op {
	case "load":
		a.Data = make([]byte, r.N)
		return a, v.Load(a.Data, r.Off)
	case "store":
		return a, v.Store(r.Data, r.Off)
	case "stamp":
		a.Lost, err = r.stamp(v)
		return a, err
	case "close":
		delete(views, r.View)
		return a, v.Close()
	}
	return a, fmt.Errorf("no such request: %q", r.Op)
}

// stamp stores the number of each round into the bytes, and then checks that they all have it.
func (r *request) stamp(v View) (lost int, err error) {
	back := make([]byte, int64(r.N-1)*r.Stride+1)
	for round := 1; round <= r.Rounds; round++ {
		if err := v.Stamp(byte(round), r.Off, r.Stride, r.N); err != nil {
			return lost, err
		}
		if err := v.Load(back, r.Off); err != nil {
			return lost, err
		}
		for i := int64(0); i < int64(len(back)); i += r.Stride {
			if back[i] != byte(round) {
				lost++
			}
		}
	}
	return lost, nil
}

// peer is another process that was given exports.
type peer struct {
	f    *fixture
	cmd  *exec.Cmd
	in   io.WriteCloser
	ask  *json.Encoder
	hear *json.Decoder
}

// startPeer starts a process with duplicates of the exports as its descriptors from 3 on. The process ends with the
// test.
func (f *fixture) startPeer(exports ...*os.File) *peer {
	f.Helper()
	require.True(f, served, "TestMain must end with conformance.Main")
	exe, err := os.Executable()
	require.NoError(f, err)
	p := &peer{f: f, cmd: exec.Command(exe)}
	// Otherwise the race detector would sleep for a second when the peer ends.
	p.cmd.Env = append(os.Environ(), peerEnv+"=1", "GORACE=atexit_sleep_ms=0")
	p.cmd.ExtraFiles = exports
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	require.NoError(f, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(f, err)
	p.ask, p.hear = json.NewEncoder(p.in), json.NewDecoder(out)
	require.NoError(f, p.cmd.Start())
	f.Cleanup(func() {
		_ = p.in.Close() // the peer ends when it hears no more
		if p.cmd.ProcessState == nil {
			require.NoError(f, p.cmd.Wait())
		}
	})
	return p
}

// kill ends the process as kill -9 does.
func (p *peer) kill() {
	p.f.Helper()
	require.NoError(p.f, p.cmd.Process.Kill())
	var killed *exec.ExitError
	require.ErrorAs(p.f, p.cmd.Wait(), &killed)
}

func (p *peer) send(r request) {
	p.f.Helper()
	require.NoError(p.f, p.ask.Encode(r))
}

func (p *peer) receive() answer {
	p.f.Helper()
	var a answer
	require.NoError(p.f, p.hear.Decode(&a))
	return a
}

// try returns the peer's answer, which may have an error of the peer.
func (p *peer) try(r request) (answer, error) {
	p.f.Helper()
	p.send(r)
	a := p.receive()
	if a.Err != "" {
		return a, errors.New(a.Err)
	}
	return a, nil
}

func (p *peer) do(r request) answer {
	p.f.Helper()
	a, err := p.try(r)
	require.NoError(p.f, err, r.Op)
	return a
}

func (p *peer) importView(view int, m gpubackend.Memory, writable bool) {
	p.f.Helper()
	p.do(request{Op: "import", View: view, Size: m.Size(), Writable: writable})
}

func (p *peer) load(view int, off int64, n int) []byte {
	p.f.Helper()
	return p.do(request{Op: "load", View: view, Off: off, N: n}).Data
}

func (p *peer) store(view int, off int64, data []byte) {
	p.f.Helper()
	p.do(request{Op: "store", View: view, Off: off, Data: data})
}
