package mounttest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"unsafe"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testmount"
	"github.com/gaiafs/gaiafs/pagecache"
)

// moving says that mappings may be movable, and how much pinned memory there is.
type moving struct {
	pinned  int64 // pinned memory of the host, in bytes
	tenants bool
}

// movingMemory is the memory of a device: two extents.
const movingMemory = 2 * extent

// roomy and crammed are the extremes: nothing needs to leave pinned memory, and nothing fits into it.
var (
	roomy   = &moving{pinned: plenty}
	tenants = &moving{pinned: 6 * extent, tenants: true}
	crammed = &moving{}
)

// options adds the options of m. Each seed selects a rule for evictions, and a placement.
func (m *moving) options(o testmount.Options, seed uint64) testmount.Options {
	if m == nil {
		return o
	}
	o.PinnedMemory = m.pinned
	names := pagecache.EvictionNames()
	o.Eviction = names[model.NewSource(seed).IntN(len(names))]
	if *evictionFlag != "" {
		o.Eviction = *evictionFlag
	}
	if of := model.NewSource(seed + 1); of.IntN(2) == 0 {
		o.Placement = pagecache.PlacementPolicy{Name: pagecache.PlaceByThreshold, Penalty: 2}
		o.Placement.Threshold = 1 + uint64(of.IntN(8))
	}
	if m.tenants {
		o.Tenants = []pagecache.Tenant{
			{ID: pagecache.NamedTenant("small"), Weight: 1, MostPinned: 4 * extent, Everyone: true},
			{ID: pagecache.NamedTenant("large"), Weight: 3, Guaranteed: extent, Everyone: true},
		}
	}
	return o
}

// environment returns the additional environment of client c.
func (m *moving) environment(c int) []string {
	if m == nil || !m.tenants {
		return nil
	}
	return [][]string{{"GAIAFS_TENANT=small"}, {"GAIAFS_TENANT=large"}, nil}[c%3]
}

var evictionFlag = flag.String("eviction", "", "the rule for evictions where memory moves, in place of one by the seed")

// besideName is a file that all programs use in addition to the file of the steps, so that its extents compete with the
// others. Byte i of it is besideByte(i), except for a slot of each program in each page.
const (
	besideName  = "beside"
	besideParts = 5
	besideSize  = besideParts*extent - 2*model.PageSize - 5
	firstSlot   = 64
	slotBytes   = 8
	slots       = 16
)

func besideByte(at int64) byte { return byte(at*7 + at>>12) }

func (x *system) makeBeside() {
	b := make([]byte, besideSize)
	for i := range b {
		b[i] = besideByte(int64(i))
	}
	require.NoError(x.t, os.WriteFile(filepath.Join(x.mount.Source, besideName), b, 0o600))
}

// beside is that file, as one program has it mapped.
type beside struct {
	mapping *gaiafs.Mapping
	memory  []byte
	slot    int64
	// stored has the expected byte of the program's slot, for each page into which the program stored.
	stored map[int64]byte
}

// bracket is an open bracket of a program.
type bracket struct {
	*gaiafs.Bracket
	of     *gaiafs.Mapping
	off, n int64
	part   int64 // of beside, or -1
}

func (b bracket) covers(m *gaiafs.Mapping, off, n int64) bool {
	return b.of == m && b.off <= off && off+n <= b.off+b.n
}

// refusal turns an error that says that there is no room now into model.ErrRefused.
func refusal(err error) error {
	if errors.Is(err, syscall.EDEADLK) || errors.Is(err, syscall.ENOMEM) {
		return fmt.Errorf("%w: %w", model.ErrRefused, err)
	}
	return err
}

// flags returns the flags that repeat a failure, in addition to the seed.
func (x *system) flags() string {
	if x.rule == "" {
		return ""
	}
	return " -eviction=" + x.rule
}

// begin begins a bracket. The bracket may wait only if no other program has memory that it could wait for.
func (p *program) begin(o order, ranges ...gaiafs.Range) (b *gaiafs.Bracket, err error) {
	if o.Alone && len(p.brackets) == 0 {
		b, err = gaiafs.Use(context.Background(), ranges...)
	} else {
		b, err = new(gaiafs.Bracket).Use(context.Background(), ranges...)
	}
	return b, refusal(err)
}

// memoryOf returns the memory of a mapping. It may be accessed in brackets only.
func memoryOf(m *gaiafs.Mapping) []byte {
	at := m.DevicePointer()
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))), m.Len())
}

// useStep begins a bracket. Val may select several ranges and files.
func (p *program) useStep(o order, off, n int64) error {
	s, m := o.Step, p.mapping
	b := bracket{of: m, off: off, n: n, part: -1}
	ranges := []gaiafs.Range{{Of: m, Off: off, Len: n}}
	if s.Val&1 != 0 {
		ranges = append(ranges, gaiafs.Range{Of: m, Len: 1}, gaiafs.Range{Of: m, Off: m.Len() - 1, Len: 1})
	}
	if s.Val&6 != 0 {
		if err := p.openBeside(o); err != nil {
			return err
		}
		b.part = int64(s.Val>>3) % besideParts
		ranges = append(ranges, gaiafs.Range{Of: p.beside.mapping, Off: b.part * extent, Len: extent})
	}
	if s.Val&64 != 0 {
		slices.Reverse(ranges)
	}
	var err error
	if b.Bracket, err = p.begin(o, ranges...); err != nil {
		return err
	}
	p.brackets = append(p.brackets, b)
	if !s.Lazy {
		if _, err := m.Acquire(off, n); err != nil {
			return err
		}
	}
	if b.part < 0 {
		return nil
	}
	return p.beside.work(b.part, s.Val)
}

// openBeside maps the file beside, if the program has not mapped it.
func (p *program) openBeside(o order) error {
	if p.beside.mapping != nil {
		return nil
	}
	f, err := os.OpenFile(o.Beside, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := gaiafs.Map(f, 0, besideParts*extent, gaiafs.ProtWrite, o.Device, gaiafs.OnKind(o.Kind), gaiafs.Movable())
	if err != nil {
		return err
	}
	x := &p.beside
	x.mapping, x.memory, x.slot = m, memoryOf(m), firstSlot+slotBytes*int64(o.Step.Client)
	if x.stored == nil {
		x.stored = make(map[int64]byte)
	}
	return m.Advise(0, m.Len(), gaiafs.AdviceRandom)
}

// work checks some pages of a part of the file and stores into one of them. The part is in a bracket.
func (x *beside) work(part int64, val byte) error {
	const pages = extent / model.PageSize
	chosen := []int64{0, int64(val), pages - 3, pages - 1}
	for _, p := range chosen {
		if err := x.check(part*pages + p); err != nil {
			return err
		}
	}
	p := part*pages + chosen[val%3]
	if at := p*model.PageSize + x.slot; at+slotBytes <= besideSize {
		x.stored[p] = val
		copy(x.memory[at:], bytes.Repeat([]byte{val}, slotBytes))
	}
	return nil
}

// check compares a page.
func (x *beside) check(p int64) error {
	start := p * model.PageSize
	for i, b := range x.memory[start : start+model.PageSize] {
		at, want := start+int64(i), byte(0)
		if at < besideSize {
			want = besideByte(at)
		}
		if in := int64(i); firstSlot <= in && in < firstSlot+slots*slotBytes {
			stored, ok := x.stored[p]
			if want = stored; !ok || in < x.slot || in >= x.slot+slotBytes {
				continue
			}
		}
		if b != want {
			return fmt.Errorf("byte %d of page %d of the second file is 0x%02x, want 0x%02x", i, p, b, want)
		}
	}
	return nil
}

// allBrackets is the Val of a Done that ends all brackets.
const allBrackets = 255

// doneStep ends the newest bracket, the oldest, or all of them. It first checks that beside's bytes in it are
// unchanged.
func (p *program) doneStep(s model.Step) error {
	for len(p.brackets) > 0 {
		i := len(p.brackets) - 1
		if s.Val%4 == 0 {
			i = 0
		}
		b := p.brackets[i]
		p.brackets = slices.Delete(p.brackets, i, i+1)
		if b.part >= 0 && p.beside.mapping != nil {
			if err := p.beside.work(b.part, s.Val); err != nil {
				return err
			}
			if s.Val&8 != 0 {
				if _, err := p.beside.mapping.Release(b.part*extent, extent); err != nil {
					return err
				}
			}
		}
		if err := b.Done(); err != nil || s.Val != allBrackets {
			return err
		}
	}
	return nil
}

// inBracket calls do with the memory of n bytes at off, in an open bracket or in one of its own.
func (p *program) inBracket(o order, off, n int64, do func(memory []byte) error) error {
	m := p.mapping
	if !slices.ContainsFunc(p.brackets, func(b bracket) bool { return b.covers(m, off, n) }) {
		b, err := p.begin(o, gaiafs.Range{Of: m, Off: off, Len: n})
		if err != nil {
			return err
		}
		defer b.Done()
	}
	return do(memoryOf(m)[off : off+n])
}

// movingStep carries out a step that needs the memory of a movable mapping. Some stores and loads use the library's
// copies.
func (p *program) movingStep(o order, off, n int64) (data []byte, err error) {
	s := o.Step
	copies := o.Alone && len(p.brackets) == 0 && s.Len%2 == 0
	switch {
	case s.Op == model.Use:
		return nil, p.useStep(o, off, n)
	case s.Op == model.Done:
		return nil, p.doneStep(s)
	case s.Op == model.Peek:
		err = p.inBracket(o, 0, p.mapping.Len(), func([]byte) error {
			data, err = p.peek(s.Len)
			return err
		})
	case copies && s.Op == model.Store:
		_, err = p.mapping.WriteAt(s.Bytes(), off)
	case copies:
		data = make([]byte, n)
		_, err = p.mapping.ReadAt(data, off)
	case s.Op == model.Store:
		err = p.inBracket(o, off, n, func(memory []byte) error { copy(memory, s.Bytes()); return nil })
	default:
		err = p.inBracket(o, off, n, func(memory []byte) error { data = bytes.Clone(memory); return nil })
	}
	return data, refusal(err)
}

// bracketed reports whether a step needs the memory of a movable mapping, or is about brackets.
func (p *program) bracketed(s model.Step) bool {
	switch s.Op {
	case model.Use, model.Done:
		return true
	case model.Store, model.Load, model.Peek:
		return p.mapping.Movable()
	}
	return false
}

// closeMoving ends brackets and unmaps beside. The program remembers what it stored into beside.
func (p *program) closeMoving() error {
	err := p.doneStep(model.Step{Val: allBrackets})
	if m := p.beside.mapping; m != nil {
		err = errors.Join(err, m.Close())
	}
	p.beside.mapping = nil
	return err
}

// stuck reports whether something on the device of c cannot move: a mapping that is not movable, a view, or a bracket.
func (x *system) stuck(run *model.Run, c model.Client) bool {
	for other := range x.layout.Clients() {
		o := model.Client(other)
		if x.layout.IsCPU(o) || x.layout.Device(o) != x.layout.Device(c) {
			continue
		}
		_, viewed := run.Model.Viewed(o)
		if viewed || run.Model.Mapped(o) && !run.Model.Movable(o) || x.processes[o].open > 0 {
			return true
		}
	}
	return false
}

// alone reports whether a bracket of c could wait for no other program.
func (x *system) alone(c model.Client) bool {
	for o, p := range x.processes {
		if model.Client(o) != c && p.open > 0 {
			return false
		}
	}
	for _, moves := range x.mapped {
		if !moves {
			return false
		}
	}
	return len(x.viewed) == 0
}

// expandMoving returns the steps for a random step if mappings may be movable. The device's copy of a mapping may be
// evicted at any time, and is filled from home later. An exact model can predict that only if everything that is used
// was just brought up to date, and nothing was pending.
func (x *system) expandMoving(run *model.Run, s model.Step) (steps []model.Step, known bool) {
	movable := run.Model.Movable(s.Client)
	whole := model.Step{Op: model.Use, Client: s.Client, Val: s.Val, Len: int64(x.layout.Pages) * model.PageSize}
	sync := model.Step{Op: model.Fsync}
	switch s.Op {
	case model.Map:
		if s.Lazy = false; s.Movable {
			s.Off, s.Len = 0, whole.Len
		}
		return []model.Step{sync, s}, true
	case model.Use:
		return []model.Step{whole}, true
	case model.Store, model.Load:
		if !movable {
			return nil, false
		}
		if s.Op == model.Store && s.Off+s.Len > run.Model.Size() {
			return nil, true
		}
		return []model.Step{whole, s, {Op: model.Done, Client: s.Client, Val: 1}}, true
	case model.Acquire:
		if movable {
			return []model.Step{sync, s}, true
		}
	case model.DontNeed:
		return nil, movable
	case model.Unmap:
		return []model.Step{{Op: model.Flush, Len: run.Model.Size()},
			{Op: model.Done, Client: s.Client, Val: allBrackets}, s}, true
	case model.Evict:
		if x.stuck(run, s.Client) {
			return nil, true
		}
		return []model.Step{sync, {Op: model.Evict, Client: s.Client, Len: whole.Len}}, true
	}
	return nil, false
}

// needsMoves reports whether programs must continue because nothing has moved between the tiers, which requireMoves
// needs.
func (x *system) needsMoves() bool {
	if x.moving != roomy {
		return false
	}
	s, err := x.status()
	require.NoError(x.t, err)
	return s.Counters["extents_moved_in"] == 0 || s.Counters["extents_moved_out"] == 0
}

// requireMoves fails unless memory moved, if the number of steps is large enough: out of the device and in again, and
// also between the device and pinned memory if there is plenty of that.
func (x *system) requireMoves(steps int) {
	s, err := x.status()
	require.NoError(x.t, err)
	var evicted int64
	for _, d := range s.Devices {
		for _, e := range d.Evicted {
			evicted += e.Extents
		}
	}
	c := s.Counters
	x.t.Logf("rule %s: %d brackets, %d refused; extents: %d out, %d in, %d round trips, %d left the devices",
		s.Devices[0].Eviction, c["brackets"], x.refused, c["extents_moved_out"], c["extents_moved_in"], c["extents_round_trips"], evicted)
	if steps < 300 {
		return
	}
	require.Positive(x.t, c["brackets"])
	require.Positive(x.t, evicted)
	if steps >= 1000 {
		require.Positive(x.t, c["extents_round_trips"])
	}
	if x.moving == roomy {
		require.Positive(x.t, c["extents_moved_in"])
		require.Positive(x.t, c["extents_moved_out"])
	}
}
