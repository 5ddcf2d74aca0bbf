package model

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOracleOfWiderSteps gives the Oracle programs with operations that the Model does not predict exactly, and answers
// to their last step.
func TestOracleOfWiderSteps(t *testing.T) {
	const stored = "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\n"
	for _, c := range []struct {
		name, text string
		got        []byte
		allowed    bool
	}{
		{"a hole where a device released", stored + "cpu0 seekread 0+1", []byte{0}, false},
		{"the data of a device", stored + "cpu0 seekread 0+1", []byte{1}, true},
		{"a copy of released bytes", stored + "cpu0 copyout 0+1", []byte{1}, true},
		{"a copy without released bytes", stored + "cpu0 copyout 0+1", []byte{0}, false},
		{"a copy within the file", stored + "cpu0 copy 100+1 from 0\ncpu0 read 100+1", []byte{1}, true},
		{"a copy within the file, not collected", stored + "cpu0 copy 100+1 from 0\ncpu0 read 100+1", []byte{0}, false},
		{
			"a copy of bytes that two stores raced for",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 write 0+1 0x02\n" +
				"gpu0a release 0+1p\ncpu0 copy 100+1 from 0\ncpu0 read 100+1", []byte{2}, true,
		},
		{"an append", "cpu0 append 0+2 0x05\ncpu0 read 4p1000+2", []byte{5, 6}, true},
		{"an append that is not seen", "cpu0 append 0+2 0x05\ncpu0 read 4p1000+2", nil, false},
		{"an append that reads as zeros", "cpu0 append 0+2 0x05\ncpu0 read 4p1000+2", []byte{0, 0}, false},
		{"allocated bytes", "cpu0 allocate 4p1000+2\ncpu0 read 4p1000+2", []byte{0, 0}, true},
		{"allocation that keeps the size", "cpu0 allocate 4p1000+2 keep\ncpu0 stat",
			AppendStat(nil, 4*PageSize+1000, time.Time{}), true},
		{"allocation that does not", "cpu0 allocate 4p1000+2 keep\ncpu0 stat",
			AppendStat(nil, 4*PageSize+1002, time.Time{}), false},
		{"allocation takes nothing away", "cpu0 write 0+1 0x05\ncpu0 allocate 0+2p\ncpu0 read 0+1", []byte{0}, false},
		{"zeroed bytes", "cpu0 write 0+1 0x05\ncpu0 zero 0+2p\ncpu0 read 0+1", []byte{5}, false},
		{"what a punch to the end took", "cpu0 write 1p+1 0x05\ncpu0 punchrest 1\ncpu0 read 1p+1", []byte{5}, false},
		{
			"cut bytes come back to a device",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 opentrunc\ncpu0 truncate 8\n" +
				"gpu0a load 0+1", []byte{1}, false,
		},
		{"a change in SOURCE before it is noticed", "cpu0 sourcewrite 0+1 0x05\ncpu0 read 0+1", []byte{0}, true},
		{"a change in SOURCE that is seen early", "cpu0 sourcewrite 0+1 0x05\ncpu0 read 0+1", []byte{5}, true},
		{"a change in SOURCE after an open", "cpu0 sourcewrite 0+1 0x05\ncpu1 reopen\ncpu0 read 0+1", []byte{0}, false},
		{"a change in SOURCE after an acquire", "cpu0 sourcewrite 0+1 0x05\ngpu0a map 0+1p\ngpu0a load 0+1", []byte{0},
			false},
		{
			"a change in SOURCE that another write hides",
			"gpu0a map 0+2p\ncpu0 sourcewrite 0+1 0x05\ncpu0 write 1p+1 0x09\ngpu0a acquire 0+2p\ngpu0a load 0+1",
			[]byte{0}, false,
		},
		{
			"a change in SOURCE over which a page goes home",
			"gpu0a map 0+1p writable\ngpu0a store 8+1 0x01\ncpu0 sourcewrite 0+1 0x05\ngpu0a release 0+1p\ncpu0 reopen\ncpu0 read 0+1", []byte{0}, true,
		},
		{
			"a change in SOURCE beside bytes that are home",
			"gpu0a map 0+1p writable\ngpu0a store 8+1 0x01\ngpu0a release 0+1p\ncpu0 fsync\ncpu0 sourcewrite 0+1 0x05\ncpu0 reopen\ncpu0 read 0+1",
			[]byte{0}, false,
		},
		{
			"a synced byte after a change of mode in SOURCE",
			"gpu0a map 0+1p writable\ngpu0a store 8+1 0x01\ncpu0 write 0+1 0x05\ncpu0 fsync\ncpu0 sourcechmod\ncpu0 reopen\n" +
				"gpu0a release 0+1p\ncpu0 read 0+1", []byte{0}, false,
		},
		{"an append in SOURCE that is not noticed", "cpu0 sourceappend 0+2 0x05\ncpu0 read 4p999+3", []byte{0}, true},
		{"an append in SOURCE that is noticed", "cpu0 sourceappend 0+2 0x05\ncpu0 read 4p999+3", []byte{0, 5, 6}, true},
		{"an append in SOURCE that shows as zeros", "cpu0 sourceappend 0+2 0x05\ncpu0 read 4p999+3", []byte{0, 0, 0},
			false},
		{
			"an append in SOURCE that is seen, and a write there that is not yet",
			"cpu0 sourceappend 0+2 0x05\ncpu0 sourcewrite 4p1000+1 0x09\ncpu0 read 4p999+3", []byte{0, 5, 6}, true,
		},
		{
			"an append in SOURCE that is seen, and a write there too",
			"cpu0 sourceappend 0+2 0x05\ncpu0 sourcewrite 4p1000+1 0x09\ncpu0 read 4p999+3", []byte{0, 9, 6}, true,
		},
		{
			"an append in SOURCE with a write there that shows as zeros",
			"cpu0 sourceappend 0+2 0x05\ncpu0 sourcewrite 4p1000+1 0x09\ncpu0 read 4p999+3", []byte{0, 0, 6}, false,
		},
		{
			"an append in SOURCE and a write there, after an open",
			"cpu0 sourceappend 0+2 0x05\ncpu0 sourcewrite 4p1000+1 0x09\ncpu0 reopen\ncpu0 read 4p999+3",
			[]byte{0, 5, 6}, false,
		},
		{
			"an append in SOURCE over which zeros are written",
			"cpu0 sourceappend 0+2 0x05\ncpu0 mapstore 4p+1 0x09\ncpu0 fsync\ncpu0 reopen\ncpu0 read 4p1000+2",
			[]byte{0, 0}, false,
		},
		{
			"memory with what is not current",
			"cpu0 write 0+2 0x05\ngpu0a map 0+1p\ncpu0 write 0+2 0x06\ngpu0b map 1p+1p\ngpu0b peek", []byte{5, 6},
			false,
		},
		{"memory with what is current", "cpu0 write 0+2 0x05\ngpu0b map 1p+1p\ngpu0b peek", []byte{5, 6}, true},
		{"memory that was cleared", "cpu0 write 0+2 0x05\ngpu0b map 1p+1p\ngpu0b peek", []byte{0, 0}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := DefaultLayout(false)
			x := &system{Model: New(l)}
			r := NewRun(l, x)
			r.Loose = true
			steps := program(t, l, c.text)
			for _, s := range steps[:len(steps)-1] {
				done, err := r.Step(s)
				require.NoError(t, err)
				require.True(t, done, l.Format(s))
			}
			x.wrong = func(Step, []byte) []byte { return c.got }
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

// TestOracleOfTimes: the mtimes that fstat may return. Each step takes a second.
func TestOracleOfTimes(t *testing.T) {
	const set = "cpu0 settimes 0x07\n"
	for _, c := range []struct {
		name, text string
		mtime      int64 // in seconds since the start
		allowed    bool
	}{
		{"a write", set + "cpu0 write 0+1 0x01\ncpu0 fsync", 2, true},
		{"a write whose time moves with fsync", set + "cpu0 write 0+1 0x01\ncpu0 fsync\ncpu0 fsync", 4, false},
		{"a release", set + "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 fsync", 4, true},
		{"a release whose time is that of a collect", set +
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 fsync\ncpu0 fsync", 6, false},
		{"a second release", set + "gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ngpu0a release 0+1p", 5, true},
		{"a second release after fsync", set +
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 fsync\ngpu0a release 0+1p", 6,
			false},
		{"a second release after a time was set",
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ngpu0a release 0+1p\n" + set + "gpu0a release 0+1p", 5,
			false},
		{"a store that goes home early", set +
			"gpu0a map 0+1p writable\ngpu0a store 0+1 0x01\ncpu0 read 0+1\ncpu0 read 0+1", 5, true},
		{"a store through mmap", set + "cpu0 mapstore 0+1 0x01\ncpu0 read 0+1", 3, true},
		{"reads", set + "cpu0 read 0+1\ncpu0 read 0+1", 3, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := DefaultLayout(false)
			x := &system{Model: New(l)}
			r := NewRun(l, x)
			r.Loose = true
			start := time.Unix(2_000_000_000, 0)
			now := start
			r.Oracle.WatchTimes(func() time.Time { return now })
			for _, s := range program(t, l, c.text) {
				now = now.Add(time.Second)
				done, err := r.Step(s)
				require.NoError(t, err)
				require.True(t, done, l.Format(s))
			}
			stat := Step{Op: Stat}
			require.Equal(t, c.allowed, r.Oracle.Event(stat, AppendStat(nil, l.Size,
				start.Add(time.Duration(c.mtime)*time.Second))) == nil)
		})
	}
	for _, writeBack := range []bool{false, true} {
		t.Run(fmt.Sprint("a refused fallocate, with caching of writes: ", writeBack), func(t *testing.T) {
			l := DefaultLayout(writeBack)
			now := time.Unix(2_000_000_000, 0)
			o := NewOracle(l)
			o.WatchTimes(func() time.Time { return now })
			require.NoError(t, o.Event(Step{Op: SetTimes, Val: 7}, nil))
			now = now.Add(time.Second)
			o.Refused(Step{Op: SourceClone, Len: 1})
			require.Error(t, o.Event(Step{Op: Stat}, AppendStat(nil, l.Size, now)))
			now = now.Add(time.Second)
			o.Refused(Step{Op: Zero, Len: 1})
			require.Equal(t, writeBack, o.Event(Step{Op: Stat}, AppendStat(nil, l.Size, now)) == nil)
		})
	}
	t.Run("a time that was set and written over", func(t *testing.T) {
		l := DefaultLayout(false)
		now := time.Unix(2_000_000_000, 0)
		o := NewOracle(l)
		o.WatchTimes(func() time.Time { return now })
		for _, s := range program(t, l, "gpu0a store 0+1 0x01\ngpu0a release 0+1p\ncpu0 settimes 0x07") {
			now = now.Add(time.Second)
			require.NoError(t, o.Event(s, nil))
		}
		require.NoError(t, o.Event(Step{Op: Stat}, AppendStat(nil, l.Size, Step{Val: 7}.Time())))
		require.Error(t, o.Event(Step{Op: Stat}, AppendStat(nil, l.Size, now)))
	})
}

// TestOracleStaysSmall: few values of a byte are remembered, however often SOURCE changes a page that programs store
// into.
func TestOracleStaysSmall(t *testing.T) {
	l := DefaultLayout(true)
	o := NewOracle(l)
	for i := range 64 {
		require.NoError(t, o.Event(Step{Op: Write, Off: 8, Len: 1, Val: byte(i)}, nil))
		require.NoError(t, o.Event(Step{Op: SourceWrite, Len: PageSize, Val: byte(i)}, nil))
	}
	for _, seg := range o.pages[0].segments {
		for _, s := range seg.stores {
			require.LessOrEqual(t, len(s.vals), 200)
		}
	}
}
