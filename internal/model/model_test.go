package model

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestFormatRoundTrip(t *testing.T) {
	l := DefaultLayout(false)
	rapid.Check(t, func(t *rapid.T) {
		s := l.Random(rapidSource{t}, nil)
		back, err := l.ParseStep(l.Format(s))
		require.NoError(t, err)
		require.Equal(t, l.Format(s), l.Format(back))
		require.Equal(t, s.Op, back.Op)
		require.Equal(t, s.Client, back.Client)
		if s.Op.stores() {
			require.Equal(t, s.Bytes(), back.Bytes())
		}
	})
	for _, line := range []string{"", "gpu9a store 1+1", "cpu0 leap", "cpu0 read x+1", "cpu0 write 0+1 0xzz",
		"cpu0 read 1p+p"} {
		_, err := l.ParseStep(line)
		require.Error(t, err, line)
	}
	s, err := l.ParseStep("gpu0b store 2p8+4 0x7f same during")
	require.NoError(t, err)
	require.Equal(t, Step{Op: Store, Client: 3, Off: 2*PageSize + 8, Len: 4, Val: 0x7f, Same: true, During: true}, s)
	_, err = l.ParseProgram("# a comment\n\ncpu0 fsync\ncpu7 fsync\n")
	require.Error(t, err)
}

type rapidSource struct{ t *rapid.T }

func (s rapidSource) IntN(n int) int { return rapid.IntRange(0, n-1).Draw(s.t, "n") }

// system is a Model that is checked against a Model, and can be made faulty.
type system struct {
	*Model
	wrong func(s Step, got []byte) []byte
}

func (x *system) Do(s Step) ([]byte, error) {
	got := x.Model.Do(s)
	if x.wrong != nil {
		got = x.wrong(s, got)
	}
	return got, nil
}

func program(t *testing.T, l Layout, text string) []Step {
	t.Helper()
	p, err := l.ParseProgram(text)
	require.NoError(t, err)
	return p
}

// TestOracleAlone gives the Oracle answers that no rule of coherence allows, and some that look odd but are allowed.
func TestOracleAlone(t *testing.T) {
	l := DefaultLayout(false)
	for _, c := range []struct {
		name, text string
		got        byte
		allowed    bool
	}{
		{"an old value after a release",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 read 0+1", 0, false},
		{"the released value", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 read 0+1", 1,
			true},
		{"a value that is not released", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 read 0+1", 1, true},
		{"an old value before a release", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 read 0+1", 0, true},
		{"a value that nobody stored", "cpu0 read 0+1", 9, false},
		{"a lost store of one's own", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a load 0+1", 0, false},
		{"the other program's store", "gpu0a map 0+1p writable\ngpu0b map 0+1p\ngpu0a store 0+1 0x01\ngpu0b load 0+1",
			0, false},
		{"a stale load", "gpu0a map 0+1p\ncpu0 write 0+1 0x01\ngpu0a load 0+1", 0, true},
		{"a stale load after an acquire", "gpu0a map 0+1p\ncpu0 write 0+1 0x01\ngpu0a acquire 0+1p\ngpu0a load 0+1", 0,
			false},
		{"what a hole took", "cpu0 write 0+1 0x01\ncpu0 punch 0+8\ncpu0 read 0+1", 1, false},
		{"what a truncation took", "cpu0 write 0+1 0x01\ncpu0 truncate 0\ncpu0 truncate 8\ncpu0 read 0+1", 1, false},
		{"either of two that overlap", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 write 0+1 0x02\ngpu0a release 0+1p\ncpu0 read 0+1", 2, true},
		{"neither of two that overlap",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 write 0+1 0x02\ngpu0a release 0+1p\ncpu0 read 0+1", 0,
			false},
		{"a release that has not returned",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a publish 0+1p\ncpu0 directread 0+1", 0, true},
		{"a stale view", "gpu0a view 0+9 0x08\ncpu0 write 0+1 0x01\ngpu0a look 0+1 0x01", 0, false},
		{"a view that was acquired", "gpu0a view 0+9 0x08\ncpu0 write 0+1 0x01\ngpu0a look 0+1 0x01", 1, true},
		{"a view without what its device released",
			"gpu0a map 0+1p writable\ngpu0a view 0+9 0x08\ngpu0a store 0+1 0x01\n" +
				"gpu0b view 0+9 0x08\ngpu0a release 0+1p\ngpu0b look 0+1 0x01", 0, false},
		{"a view without what its device stored",
			"gpu0a map 0+1p writable\ngpu0a view 0+9 0x08\ngpu0a store 0+1 0x01\n" +
				"gpu0a look 0+1 0x01", 0, true},
		{"what was past end of file in a view", "gpu0a view 4p999+9 0x08\ngpu0a look 1+1 0x01", 7, false},
		{"a kill that released", "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a kill\ncpu0 read 0+1", 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			steps := program(t, l, c.text)
			x := &system{Model: New(l)}
			r := NewRun(l, x)
			r.Loose = true
			for _, s := range steps[:len(steps)-1] {
				done, err := r.Step(s)
				require.NoError(t, err)
				require.True(t, done)
			}
			x.wrong = func(Step, []byte) []byte { return []byte{c.got} }
			done, err := r.Step(steps[len(steps)-1])
			require.True(t, done)
			if c.allowed {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
			}
		})
	}
}

func TestCheckFindsAndShrinks(t *testing.T) {
	l := DefaultLayout(false)
	// A system that loses every byte of value 7 that a device's program stored.
	broken := func() *system {
		return &system{Model: New(l), wrong: func(s Step, got []byte) []byte {
			if s.Op == Load {
				for i := range got {
					if got[i] == 7 {
						got[i] = 0
					}
				}
			}
			return got
		}}
	}
	steps := program(t, l, `
		cpu0 write 100+9 0x20
		gpu0a map 0+2p writable
		gpu1a map 0+2p writable
		gpu0a store 8+3 0x06
		gpu1a store 8+3 0x16
		cpu1 read 8+4
		gpu0a load 8+3
		gpu0a release 0+2p`)
	require.ErrorContains(t, Check(l, broken(), steps), "step 6")
	require.NoError(t, Check(l, &system{Model: New(l)}, steps))
	small := Shrink(steps, func(p []Step) bool { return Check(l, broken(), p) != nil })
	require.Len(t, small, 3, l.FormatProgram(small))
}

// TestModelBreaksNoRule runs the Model against itself, with its own checks and the Oracle's.
func TestModelBreaksNoRule(t *testing.T) {
	for seed := range uint64(40) {
		l := DefaultLayout(seed%2 == 1)
		l.ReadAhead = seed%4 > 1
		src := NewSource(seed)
		r := NewRun(l, &system{Model: New(l)})
		for len(r.Program) < 250 {
			if _, err := r.Step(l.Random(src, func(o Op) bool {
				return o.Exact() || o == Group || o == Use || o == Done || o.OfViews()
			})); err != nil {
				t.Fatalf("seed %d: %v\n%s", seed, err, l.FormatProgram(r.Program))
			}
		}
		for _, s := range l.Closing() {
			if _, err := r.Step(s); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
	}
}

// TestOwnRulesAreChecked breaks the Model's state by hand.
func TestOwnRulesAreChecked(t *testing.T) {
	l := DefaultLayout(false)
	for name, breakIt := range map[string]func(m *Model){
		"a vector from the future": func(m *Model) { m.pages[0].replicas[1].v[2] = 9 },
		"a base that is not home":  func(m *Model) { m.pages[0].replicas[1].base[0] = 9 },
		"a kernel with old bytes":  func(m *Model) { m.pages[0].home[0], m.pages[0].replicas[1].base[0] = 9, 9 },
	} {
		t.Run(name, func(t *testing.T) {
			m := New(l)
			for _, s := range program(t, l, "cpu0 read 0+1\ngpu0a map 0+1p writable") {
				require.True(t, m.Legal(s))
				m.Do(s)
			}
			require.NoError(t, m.Verify())
			breakIt(m)
			require.Error(t, m.Verify())
		})
	}
}

var errDone = errors.New("done")

// TestSystemErrorsAreReported: an error of a System ends a program.
func TestSystemErrorsAreReported(t *testing.T) {
	l := DefaultLayout(false)
	err := Check(l, failing{}, program(t, l, "cpu0 fsync"))
	require.ErrorIs(t, err, errDone)
}

type failing struct{}

func (failing) Do(Step) ([]byte, error) { return nil, errDone }
