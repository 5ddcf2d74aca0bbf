package mounttest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// deviceMemory is the memory of a device: two extents for the file, and one for the view of each of two programs. A
// mapping of all of it leaves no room. If one GPU serves the programs of two devices, it has the memory of both.
var deviceMemory = int64(8<<20) * int64(3-testdevice.Count(2))

// patience is how long to wait until the daemon notices that a client died.
const patience = 30 * time.Second

// system is a file on a mount, and the programs that use it. It is a model.System.
type system struct {
	t         testing.TB
	layout    model.Layout
	emulated  int // number of devices, counted from the last, that are emulated next to others
	mount     *testmount.Mount
	env       []string // additional environment of the programs
	processes []*process
	filler    *process // has a file open that is as large as a device
	memory    int64    // of a device
	name      string
	home      *os.File // in SOURCE
	base      int64    // offset in the file of the programs' byte 0
	files     int
	links     int
	wide      bool // runs wider programs
	unlinked  bool
	kinds     map[kind]bool         // additional kinds of wider programs
	mapped    map[model.Client]bool // true: movable
	// moving is nil if nothing moves. refused counts the steps that found no room.
	moving  *moving
	rule    string // for evictions, if memory moves
	refused int
	viewed  map[model.Client]bool
	// released has the range of each client's last release.
	released map[model.Client]model.Step
	took     map[model.Op]time.Duration
	// kernelOpens says that the kernel opens files. markers is for awaitEvents.
	kernelOpens bool
	markers     int
}

// newSystem mounts and starts the programs. With Disguised, they take the emulated devices for GPUs and use the fake
// libcuda.
func newSystem(t testing.TB, l model.Layout, o testmount.Options) *system {
	return newMovingSystem(t, l, o, nil)
}

// newMovingSystem is newSystem with mappings that may be movable.
func newMovingSystem(t testing.TB, l model.Layout, o testmount.Options, m *moving) *system {
	x := &system{t: t, layout: l, emulated: o.Emulated, moving: m, took: make(map[model.Op]time.Duration)}
	if o.Disguised {
		x.env = []string{"LD_LIBRARY_PATH=" + fakecuda.Dir(t), fmt.Sprint("FAKECUDA_DEVICES=", l.Devices-o.Emulated)}
	}
	x.rule, x.kernelOpens = o.Eviction, o.KernelOpens
	o.Devices, o.Poison, o.WriteBack = l.Devices, true, l.WriteBack
	if l.Devices == 0 {
		o.Devices = -1
	}
	o.Memory = cmp.Or(o.Memory, deviceMemory)
	x.memory = o.Memory
	x.mount = testmount.Start(t, o)
	for c := range l.Clients() {
		p, err := x.start(c)
		require.NoError(t, err)
		x.processes = append(x.processes, p)
	}
	quiet := o.WriteBackInterval == time.Hour && l.Devices > 0 && !o.Disguised && !testdevice.GPUs()
	if m != nil || quiet {
		x.makeBeside()
	}
	if quiet {
		x.stayInUse()
	}
	var err error
	x.filler, err = startProcess(x.env...)
	require.NoError(t, err)
	require.NoError(t, x.openFiller())
	t.Cleanup(func() {
		for _, p := range append(x.processes, x.filler) {
			if err := p.end(); err != nil && !t.Failed() {
				t.Errorf("a program ended with %v", err)
			}
		}
		if x.home != nil {
			_ = x.home.Close()
		}
	})
	return x
}

// awaitEvents returns when the mount has seen the changes in SOURCE until now, if opens do not look at SOURCE. The
// kernel knows that a marker does not exist, so it learns of it from its event only. The daemon reads events in
// batches, and may handle those of a batch in another order. The second marker is not in the batch of the first.
func (x *system) awaitEvents() error {
	if !x.kernelOpens {
		return nil
	}
	for range 2 {
		x.markers++
		name := fmt.Sprint("marker", x.markers)
		if _, err := os.Stat(x.mount.Path(name)); err == nil {
			return errors.New("there is such a marker")
		}
		source := filepath.Join(x.mount.Source, name)
		if err := os.WriteFile(source, nil, 0o644); err != nil {
			return err
		}
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(x.mount.Path(name)); err == nil {
				break
			}
			if time.Now().After(deadline) {
				return errors.New("a name in SOURCE does not show")
			}
		}
		if err := os.Remove(source); err != nil {
			return err
		}
	}
	return nil
}

// stayInUse maps a file, in movable memory that no bracket uses. Once nothing is mapped, the daemon soon brings
// everything home, which an exact model cannot predict: on a busy machine the next step may come later than that.
func (x *system) stayInUse() {
	f, err := os.Open(x.mount.Path(besideName))
	require.NoError(x.t, err)
	defer f.Close()
	m, err := gaiafs.Map(f, 0, besideSize, gaiafs.ProtRead, 0, gaiafs.Movable())
	require.NoError(x.t, err)
	x.t.Cleanup(func() { require.NoError(x.t, m.Close()) })
}

// kind returns a device's kind, if the mount has two kinds.
func (x *system) kind(device int) gaiafs.Kind {
	if x.emulated > 0 && device >= x.layout.Devices-x.emulated {
		return gaiafs.KindEmulated
	}
	return 0
}

// start starts the program of client c.
func (x *system) start(c int) (*process, error) {
	return startProcess(append(slices.Clone(x.env), x.moving.environment(c)...)...)
}

// begin gives the programs a fresh file.
func (x *system) begin() error {
	x.files++
	x.name = fmt.Sprintf("file%d", x.files)
	x.mapped, x.released = make(map[model.Client]bool), make(map[model.Client]model.Step)
	x.viewed = make(map[model.Client]bool)
	x.unlinked = false
	if x.home != nil {
		_ = x.home.Close()
	}
	var err error
	if x.home, err = os.OpenFile(x.sourcePath(), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644); err != nil {
		return err
	}
	// Bytes are written: reads of a hole are served in another way.
	if _, err := x.home.WriteAt(make([]byte, x.layout.Size), x.base); err != nil {
		return err
	}
	if err := x.home.Truncate(x.base + x.layout.Size); err != nil {
		return err
	}
	for c := range x.processes {
		if err := x.open(model.Client(c)); err != nil {
			return err
		}
	}
	return nil
}

func (x *system) open(c model.Client) error {
	o := order{Open: x.mount.Path(x.name), Base: x.base}
	if x.layout.IsCPU(c) {
		o.Limit, o.MapDirect = int64(x.layout.Pages)*model.PageSize, c%2 == 1
	}
	_, err := x.processes[c].do(o)
	return err
}

// cool makes the host's page cache drop the clean pages of the file, so that devices are filled from the disk.
func (x *system) cool() {
	_ = unix.Fadvise(int(x.home.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// Home implements model.Homer.
func (x *system) Home() ([]byte, error) { return readWhole(x.home, x.base) }

// HomeFollows implements model.Follower: reads do not wait for home.
func (x *system) HomeFollows() {}

// Do implements model.System.
func (x *system) Do(s model.Step) (data []byte, err error) {
	start := time.Now()
	defer func() { x.took[s.Op] += time.Since(start) }()
	o := order{Step: s}
	if !x.layout.IsCPU(s.Client) {
		o.Device = x.layout.Device(s.Client)
		o.Kind = x.kind(o.Device)
	}
	if s.Op.InSource() {
		return x.changeSource(s)
	}
	if x.moving != nil {
		o.Alone, o.Beside = x.alone(s.Client), x.mount.Path(besideName)
		defer func() { x.countRefused(s, err) }()
	}
	switch s.Op {
	case model.Write, model.Append:
		// The model writes a write back at once if it makes the file longer.
		if x.wide && x.kinds["kernelsize"] {
			break
		}
		home, err := x.Home()
		if err != nil {
			return nil, err
		}
		o.SyncRange = x.layout.WriteBack && (s.Op == model.Append || s.Off+s.Len > int64(len(home)))
	case model.Fsync:
		if _, err := x.processes[s.Client].do(o); err != nil || !x.wide {
			return nil, err
		}
		return x.Home()
	case model.Reopen:
		if err := x.awaitEvents(); err != nil {
			return nil, err
		}
		return nil, x.open(s.Client)
	case model.Unlink, model.CopyOut, model.OpenTrunc:
		o.Path = x.mount.Path(x.name)
		x.unlinked = x.unlinked || s.Op == model.Unlink
	case model.Acquire, model.Look:
		x.cool()
	case model.View:
		x.cool()
		x.viewed[s.Client] = true
	case model.Unview:
		delete(x.viewed, s.Client)
	case model.Map:
		x.cool()
		x.mapped[s.Client] = s.Movable
	case model.Unmap:
		delete(x.mapped, s.Client)
	case model.Kill:
		return nil, x.kill(s.Client)
	case model.Release:
		x.released[s.Client] = s
	case model.Collect:
		last := x.released[s.Client]
		o.Step.Off, o.Step.Len = last.Off, last.Len
	case model.Evict:
		return nil, x.evict(o.Device)
	}
	return x.processes[s.Client].do(o)
}

// countRefused counts a refused step, and forgets the mapping or view that it would have made.
func (x *system) countRefused(s model.Step, err error) {
	if !errors.Is(err, model.ErrRefused) {
		return
	}
	x.refused++
	switch s.Op {
	case model.Map:
		delete(x.mapped, s.Client)
	case model.View:
		delete(x.viewed, s.Client)
	}
}

// openFiller makes the filler open a file that is as large as a device.
func (x *system) openFiller() error {
	filler, err := os.Create(filepath.Join(x.mount.Source, "filler"))
	if err == nil {
		err = errors.Join(filler.Truncate(x.memory), filler.Close())
	}
	if err == nil {
		_, err = x.filler.do(order{Open: x.mount.Path("filler")})
	}
	return err
}

// leaveRoom removes the filler's file, so that its extents leave the device and what evict displaced has room again.
func (x *system) leaveRoom() error {
	if err := os.Remove(x.mount.Path("filler")); err != nil {
		return err
	}
	return x.openFiller()
}

// evict maps a file that takes the whole device. Another process does it: a program that closed a descriptor of the
// tested file would make the kernel write it back.
func (x *system) evict(device int) error {
	for _, s := range []model.Step{{Op: model.Map, Len: x.memory}, {Op: model.Unmap}} {
		o := order{Step: s, Device: device, Kind: x.kind(device)}
		if x.moving != nil {
			o.Beside = x.mount.Path(besideName)
		}
		if _, err := x.filler.do(o); err != nil {
			return err
		}
	}
	if x.moving != nil {
		return x.leaveRoom()
	}
	return nil
}

// kill ends a client with SIGKILL, waits until the daemon has released what the client mapped, and starts the program
// again.
func (x *system) kill(c model.Client) error {
	if err := x.processes[c].kill(); err != nil {
		return err
	}
	delete(x.mapped, c)
	delete(x.viewed, c)
	if err := x.settled(); err != nil {
		return err
	}
	p, err := x.start(int(c))
	if err != nil {
		return err
	}
	x.processes[c] = p
	return x.open(c)
}

// settled waits until the daemon has only the mappings of living programs.
func (x *system) settled() error {
	for start := time.Now(); ; {
		n, err := x.mappings()
		if err != nil {
			return err
		}
		if n == len(x.mapped)+len(x.viewed) {
			return nil
		}
		if time.Since(start) > patience {
			return fmt.Errorf("%d mappings are left after a client died, want %d", n, len(x.mapped)+len(x.viewed))
		}
	}
}

// slowest returns the kinds of steps that took longest, as text.
func (x *system) slowest() string {
	ops := slices.Collect(maps.Keys(x.took))
	slices.SortFunc(ops, func(a, b model.Op) int { return cmp.Compare(x.took[b], x.took[a]) })
	var words []string
	for _, o := range ops[:min(3, len(ops))] {
		words = append(words, fmt.Sprintf("%v %v", o, x.took[o].Round(time.Millisecond)))
	}
	return strings.Join(words, ", ")
}

// status is the part of the daemon's status that tests use.
type status struct {
	Counters map[string]int64 `json:"counters"`
	Memory   struct {
		Classes map[string]int64 `json:"classes"`
	} `json:"memory"`
	Devices []struct {
		Eviction string `json:"eviction"`
		Evicted  []struct {
			Extents int64 `json:"extents"`
		} `json:"evicted"`
	} `json:"devices"`
	Files []struct {
		Name     string `json:"name"`
		Mappings int    `json:"mappings"`
		Views    []struct {
			Mappings int `json:"mappings"`
		} `json:"views"`
	} `json:"files"`
}

func (x *system) status() (s status, err error) {
	text, err := gaiafs.Status(x.mount.Dir)
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(text, &s)
}

// waitFlights waits until the bytes that CPU reads fetched from devices are home. A change made in SOURCE before that
// may be lost.
func (x *system) waitFlights() error {
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		s, err := x.status()
		switch {
		case err != nil:
			return err
		case s.Memory.Classes["flights"] == 0:
			return nil
		case time.Since(began) > time.Minute:
			return errors.New("what reads brought does not come home")
		}
	}
}

// mappings returns the number of mappings, without those of the file beside. No program maps a third file.
func (x *system) mappings() (n int, err error) {
	s, err := x.status()
	for _, f := range s.Files {
		if filepath.Base(f.Name) != besideName {
			n += f.Mappings
		}
		for _, v := range f.Views {
			n += v.Mappings
		}
	}
	return n, err
}

// overlaps returns the number of overlapping bytes of all files so far.
func (x *system) overlaps() int64 {
	s, err := x.status()
	require.NoError(x.t, err)
	return s.Counters["overlapping_bytes"]
}
