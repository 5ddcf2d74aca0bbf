// Package testmount serves a mount to tests from a separate process, as a user would run it. The test and its programs
// do I/O on it without sharing an address space, a scheduler or descriptors with the daemon, and can kill the daemon.
//
// The daemon is the test binary itself, run again: a test package calls Main first thing in its TestMain.
//
// Devices are emulated by default. GAIAFS_TEST_GPUS=cuda:0,1 uses GPUs instead.
package testmount

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache"
)

const environment = "GAIAFS_TESTMOUNT"

// Options says what to mount. The zero Options mount a fresh directory with one device of 256 MiB.
type Options struct {
	// Source is the backing directory; "" means a fresh one.
	Source string
	// Devices is the number of devices; -1 means none, 0 means 1. Each has Memory bytes. They are emulated, or the GPUs
	// that the environment names (package testdevice), of which there may be fewer.
	Devices int
	Memory  int64
	// Disguised makes emulated devices report that they are the CUDA devices of package fakecuda: clients map their
	// memory with its libcuda.
	Disguised bool
	// Emulated is how many of the devices, counted from the last, are emulated even if the others are not. It makes a
	// mount with two kinds of devices.
	Emulated int
	// Poison fills the memory of emulated devices with a pattern, so that code that takes it for zeros fails.
	Poison       bool
	HostMemory   int64
	PinnedMemory int64
	// Eviction is pagecache.Options.Eviction.
	Eviction string
	// Placement is pagecache.Options.Placement.
	Placement pagecache.PlacementPolicy
	// Tenants is pagecache.Options.Tenants.
	Tenants           []pagecache.Tenant
	WriteBackInterval time.Duration
	WriteBack         bool
	// DeviceReads is one of pagecache.DeviceReadsWords. "" means the word in GAIAFS_TEST_DEVICE_READS, or auto if that
	// is empty.
	DeviceReads string
	AllowOther  bool
	ReadOnly    bool
	// KernelOpens lets the kernel open files. It needs root.
	KernelOpens bool
	// Mountpoint is the directory to mount at; "" means a fresh one.
	Mountpoint string
	// WithoutCure turns off package fs's cure for stale readers, for a test that shows why it is needed.
	WithoutCure bool
	// Events is fs.Options.Events.
	Events string
	// Limit is the daemon's limit of descriptors; 0 leaves it unchanged.
	Limit uint64
	// Env is added to the daemon's environment.
	Env []string
	// Faulty lets the test make devices fail (Lose, Hang, Exhaust) and read the log (Log).
	Faulty bool
}

// Mount is a mount that serves requests.
type Mount struct {
	t testing.TB
	// Source is the backing directory, Dir the mountpoint.
	Source, Dir string
	Process     *os.Process
	cmd         *exec.Cmd
	ended       chan struct{}
	err         error // the daemon's; set before ended is closed
	killed      bool
	log         *logWriter
	// For a Faulty mount: faults takes the faults to arrange, and done gets an element for each that is arranged.
	faults *json.Encoder
	done   chan struct{}
}

type job struct {
	Options
	Socket string
}

// Main serves a mount, and does not return, if the process was started for that. Call it first in TestMain.
func Main() {
	fs.Guard()
	text, ok := os.LookupEnv(environment)
	if !ok {
		return
	}
	if err := os.Unsetenv(environment); err != nil {
		panic(err)
	}
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		panic(err)
	}
	if err := serve(j); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// disguise is an emulated device that reports that it is a CUDA device.
type disguise struct{ gpubackend.Device }

func (d disguise) Info() gpubackend.Info {
	info := d.Device.Info()
	info.Kind = gpubackend.KindCUDA
	info.UUID = fakecuda.UUID(info.Ordinal)
	return info
}

// fault tells the daemon of a Faulty mount how to make a device fail.
type fault struct {
	Device int
	Lose   bool
	// Exhaust is the number of next allocations that fail for lack of memory.
	Exhaust int
	// Hang makes copies to the host wait until Resume.
	Hang, Resume bool
}

// faultDone is what the daemon prints when it has arranged a fault.
const faultDone = "fault arranged"

// obey arranges the faults that it reads from in, until in ends.
func obey(in io.Reader, devices []*faulty.Device) {
	hung := make(map[int]*faulty.Gate)
	for orders := json.NewDecoder(in); ; {
		var f fault
		if err := orders.Decode(&f); err != nil {
			return
		}
		d := devices[f.Device]
		switch {
		case f.Lose:
			d.Lose()
		case f.Hang:
			hung[f.Device] = d.Hold(faulty.CopyOut)
		case f.Resume:
			hung[f.Device].Open()
		}
		for i := range f.Exhaust {
			d.Fail(faulty.Alloc, i+1, gpubackend.ErrNoMemory)
		}
		fmt.Println(faultDone)
	}
}

// open makes device i of the mount.
func (o Options) open(i int) (gpubackend.Device, error) {
	// devices copy in two ways, and even ones use copy engines
	e := emulated.Options{Ordinal: i, Memory: o.Memory, Poison: o.Poison, CopyEngines: i%2 == 0}
	other := i >= o.Devices-o.Emulated
	if !o.Disguised && !other {
		return testdevice.Open(e)
	}
	d, err := emulated.New(e)
	if err != nil || other {
		return d, err
	}
	return disguise{d}, nil
}

type granter struct{ *control.Server }

func (g granter) Grant(src pagecache.Source, uid uint32) (fs.Grant, error) {
	x, err := g.Server.Grant(src, uid)
	return fs.Grant(x), err
}

func (g granter) GrantStatus(uid uint32) (fs.Grant, error) {
	x, err := g.Server.GrantStatus(uid)
	return fs.Grant(x), err
}

func serve(j job) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	var devices []gpubackend.Device
	var fail []*faulty.Device
	for i := range j.Devices {
		d, err := j.open(i)
		if err != nil {
			return err
		}
		if j.Faulty {
			fail = append(fail, faulty.Wrap(d))
			d = fail[i]
		}
		devices = append(devices, d)
	}
	if j.Faulty {
		go obey(os.Stdin, fail)
	}
	cache, err := pagecache.New(pagecache.Options{
		Devices:           devices,
		HostMemory:        j.HostMemory,
		PinnedMemory:      j.PinnedMemory,
		Eviction:          j.Eviction,
		Placement:         j.Placement,
		Tenants:           j.Tenants,
		WriteBackInterval: j.WriteBackInterval,
		WriteBack:         j.WriteBack,
		DeviceReads: pagecache.DeviceReadsNamed(cmp.Or(j.DeviceReads, os.Getenv("GAIAFS_TEST_DEVICE_READS"),
			"auto")),
		Log: log,
	})
	if err != nil {
		return err
	}
	var inService atomic.Pointer[fs.Server]
	server, err := control.Listen(control.Options{
		Socket:     j.Socket,
		AllowOther: j.AllowOther,
		Cache:      control.ForCache(cache),
		Status: func(control.Viewer) any {
			runtime.GC() // twice, so that heap_live_bytes is current and has no pooled buffers
			runtime.GC()
			status := cache.Status()
			if mount := inService.Load(); mount != nil {
				for i := range status.Files {
					status.Files[i].Inode = mount.Inode(status.Files[i].ID)
				}
			}
			return status
		},
		Log: log,
	})
	if err != nil {
		return err
	}
	options := fs.Options{
		Source:     j.Source,
		Mountpoint: j.Mountpoint,
		Cache:      cache,
		Granter:    granter{server},
		AllowOther: j.AllowOther,
		ReadOnly:   j.ReadOnly,
		WriteBack:  j.WriteBack,
		Events:     j.Events,

		KernelOpens: j.KernelOpens,
		Log:         log,
	}
	if j.WithoutCure {
		options.LeaveOutCureForTesting()
	}
	mount, err := fs.Mount(options)
	if err != nil {
		return err
	}
	inService.Store(mount)
	if j.Limit > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: j.Limit, Max: j.Limit}); err != nil {
			return err
		}
	}
	go pagecache.BoundHeap(context.Background(), cache.HostMemory())
	fmt.Println("ready")
	served := make(chan struct{})
	go func() {
		mount.Wait()
		close(served)
	}()
	var errs []error
	select {
	case <-stop:
		errs = append(errs, server.Close(), cache.Close(context.Background()), mount.Unmount())
	case <-served:
		errs = append(errs, server.Close(), cache.Close(context.Background()))
	}
	return errors.Join(errs...)
}

// Start mounts, and unmounts when the test ends. The test fails if mounting fails or the daemon ends with an error.
func Start(t testing.TB, o Options) *Mount {
	t.Helper()
	m, err := Try(t, o)
	if err != nil {
		t.Fatalf("mounting failed: %v", err)
	}
	return m
}

// Try is Start for a mount that may be refused. The error is what the daemon printed before it ended.
func Try(t testing.TB, o Options) (*Mount, error) {
	t.Helper()
	if o.Source == "" {
		o.Source = t.TempDir()
	}
	switch {
	case o.Devices == 0:
		o.Devices = 1
	case o.Devices < 0:
		o.Devices = 0
	}
	if !o.Disguised && o.Devices > 0 {
		testdevice.Require(t)
		o.Devices = testdevice.Count(o.Devices-o.Emulated) + o.Emulated
	}
	if o.Memory == 0 {
		o.Memory = 256 << 20
	}
	// Not t.TempDir, whose path contains the test's name: a socket's path must be short.
	place, err := os.MkdirTemp("", "mount")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(place) })
	if o.Mountpoint == "" {
		o.Mountpoint = filepath.Join(place, "mnt")
		require.NoError(t, os.Mkdir(o.Mountpoint, 0o755))
	}
	text, err := json.Marshal(job{o, filepath.Join(place, "run", "sock")})
	require.NoError(t, err)
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), environment+"="+string(text)), o.Env...)
	log := &logWriter{keep: o.Faulty}
	cmd.Stderr = log
	// The daemon must not outlive a test binary that crashes.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	m := &Mount{t: t, Source: o.Source, Dir: o.Mountpoint, log: log, cmd: cmd, ended: make(chan struct{}),
		done: make(chan struct{}, 1)}
	if o.Faulty {
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		m.faults = json.NewEncoder(in)
	}
	require.NoError(t, cmd.Start())
	m.Process = cmd.Process
	lines := bufio.NewScanner(out)
	ready := lines.Scan() && lines.Text() == "ready"
	first := lines.Text()
	go func() {
		var rest []string
		for lines.Scan() {
			if lines.Text() == faultDone {
				m.done <- struct{}{}
			} else {
				rest = append(rest, lines.Text())
			}
		}
		m.err = cmd.Wait()
		if m.err != nil && len(rest) > 0 {
			m.err = fmt.Errorf("%w: %s", m.err, strings.Join(rest, "; "))
		}
		close(m.ended)
	}()
	if !ready {
		<-m.ended
		return nil, fmt.Errorf("%s (%w)", first, m.err)
	}
	t.Cleanup(func() {
		m.stop()
		if m.killed || m.err != nil {
			_ = unix.Unmount(m.Dir, unix.MNT_DETACH)
		}
	})
	return m, nil
}

// Wait waits until the daemon has ended, by itself or because the mount was unmounted, and returns its error. The test
// fails if that takes longer than patience.
func (m *Mount) Wait(patience time.Duration) error {
	m.t.Helper()
	select {
	case <-m.ended:
	case <-time.After(patience):
		m.t.Fatalf("the daemon did not end within %v", patience)
	}
	return m.err
}

// Path joins names to the mountpoint.
func (m *Mount) Path(names ...string) string {
	return filepath.Join(append([]string{m.Dir}, names...)...)
}

// Stop ends the daemon with SIGTERM, which makes it collect and unmount. The test fails if the daemon reports an error.
func (m *Mount) Stop() {
	m.t.Helper()
	m.stop()
	require.NoError(m.t, m.err)
}

func (m *Mount) stop() {
	select {
	case <-m.ended:
		return
	default:
	}
	_ = m.Process.Signal(syscall.SIGTERM)
	select {
	case <-m.ended:
	case <-time.After(30 * time.Second):
		m.killed = true
		_ = m.Process.Signal(syscall.SIGQUIT) // prints the stacks
		select {
		case <-m.ended:
		case <-time.After(5 * time.Second):
			_ = m.Process.Kill()
			<-m.ended
		}
		m.t.Errorf("the daemon did not end within 30 s of SIGTERM")
	}
}

// Crash ends the daemon with SIGKILL. The dead mount stays, so that the programs that use it notice.
func (m *Mount) Crash() {
	m.t.Helper()
	m.killed = true
	require.NoError(m.t, m.Process.Kill())
	<-m.ended
	m.err = nil
}

// Kill ends the daemon with SIGKILL and unmounts the dead mount.
func (m *Mount) Kill() {
	m.t.Helper()
	m.Crash()
	if err := unix.Unmount(m.Dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		require.NoError(m.t, err)
	}
}

// Lose makes every later call of a device fail, as for a GPU that fell off the bus.
func (m *Mount) Lose(device int) {
	m.t.Helper()
	m.arrange(fault{Device: device, Lose: true})
}

// Hang makes copies from the device to the host wait until Resume.
func (m *Mount) Hang(device int) { m.arrange(fault{Device: device, Hang: true}) }

// Resume undoes Hang.
func (m *Mount) Resume(device int) { m.arrange(fault{Device: device, Resume: true}) }

// Exhaust makes the next allocations on a device fail for lack of memory, as if other programs used it.
func (m *Mount) Exhaust(device, allocations int) {
	m.t.Helper()
	m.arrange(fault{Device: device, Exhaust: allocations})
}

func (m *Mount) arrange(f fault) {
	m.t.Helper()
	require.NotNil(m.t, m.faults, "Options.Faulty is not set")
	require.NoError(m.t, m.faults.Encode(f))
	select {
	case <-m.done:
	case <-m.ended:
		m.t.Fatalf("the daemon ended: %v", m.err)
	}
}

// Log returns what the daemon of a Faulty mount has logged so far.
func (m *Mount) Log() string {
	m.log.mu.Lock()
	defer m.log.mu.Unlock()
	return m.log.kept.String()
}

// logWriter copies the daemon's log to the test's standard error.
type logWriter struct {
	keep bool // immutable
	mu   sync.Mutex
	kept strings.Builder // protected by mu
}

func (w *logWriter) Write(p []byte) (int, error) {
	if w.keep {
		w.mu.Lock()
		w.kept.Write(p)
		w.mu.Unlock()
	}
	fmt.Fprintf(os.Stderr, "%s", p)
	return len(p), nil
}
