package mounttest

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

var atomicFlag = flag.Bool("atomic", false,
	"have TestLinearizable check that no reader sees an older value than an earlier one, which fails")

const (
	// linearOps is the number of reads and writes of each program.
	linearOps = 150
	// linearPages is how many pages are written at once.
	linearPages = 2
	// linearBytes is how many bytes of each page belong to CPU programs. Devices store behind them.
	linearBytes = 8
)

// access is a read of the CPU programs' bytes of a page, which all have one value, or a write to them, or the begin or
// end of one.
type access struct {
	page        int
	kind        accessKind
	value       byte
	write       int // the write's number
	begun, done int64
}

type accessKind uint8

const (
	reads accessKind = iota
	begins
	ends
	writes
)

// atomic models a page as one memory: a read returns the last value written.
var atomic = porcupine.Model{
	Partition: byPage,
	Init:      func() any { return byte(0) },
	Step: func(state, input, output any) (bool, any) {
		if in := input.(access); in.kind == writes {
			return true, in.value
		}
		return output.(byte) == state.(byte), state
	},
}

// regular models a page whose readers may see the old or the new value during a write, alternately: the kernel shows a
// written byte before the daemon has it, and a release may drop the page in between. The state is the writes that may
// be seen.
var regular = porcupine.Model{
	Partition: byPage,
	Init:      func() any { return []access{{write: -1, done: 1}} },
	Step: func(state, input, output any) (bool, any) {
		seen, in := state.([]access), input.(access)
		switch in.kind {
		case begins:
			return true, append(slices.Clone(seen), in)
		case ends:
			var left []access
			for _, w := range seen {
				if w.write == in.write {
					w.done = in.done
				}
				if w.done == 0 || w.done >= in.begun {
					left = append(left, w)
				}
			}
			return true, left
		}
		return slices.ContainsFunc(seen, func(w access) bool { return w.value == output.(byte) }), state
	},
	Equal: func(a, b any) bool { return slices.Equal(a.([]access), b.([]access)) },
}

func byPage(history []porcupine.Operation) [][]porcupine.Operation {
	pages := make([][]porcupine.Operation, linearPages)
	for _, op := range history {
		p := op.Input.(access).page
		pages[p] = append(pages[p], op)
	}
	return pages
}

// split makes two operations of each write: its begin and its end.
func split(history []porcupine.Operation) (out []porcupine.Operation) {
	for i, op := range history {
		in := op.Input.(access)
		if in.kind == reads {
			out = append(out, op)
			continue
		}
		in.write, in.begun = i, op.Call
		begin, end := op, op
		in.kind = begins
		begin.Input, begin.Return = in, op.Call
		in.kind, in.done = ends, op.Return
		end.Input, end.Call = in, op.Return
		out = append(out, begin, end)
	}
	return out
}

// TestLinearizable makes several processes read and write pages on the CPU while devices release other bytes of the
// same pages. No read may return a value that was overwritten before the read began.
func TestLinearizable(t *testing.T) {
	testdevice.Emulated(t, "it is about the CPU")
	l := model.Layout{Pages: linearPages, Devices: 2, CPUs: 4, GPUs: []int{0, 1}, Size: linearPages * model.PageSize}
	x := newSystem(t, l, testmount.Options{WriteBackInterval: time.Millisecond})
	require.NoError(t, x.begin())
	start := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	var programs, devices sync.WaitGroup
	ended := make(chan struct{})
	var errs [6]error
	for c := range l.CPUs {
		programs.Go(func() {
			r := rand.New(rand.NewPCG(uint64(c), 1))
			for n := range linearOps {
				// A written value differs from the program's last 59, and from other programs' values.
				in := access{page: r.IntN(linearPages), value: byte(1 + c + l.CPUs*(n%60))}
				if r.IntN(3) == 0 {
					in.kind = writes
				}
				s := model.Step{Client: model.Client(c), Op: model.Read, Off: int64(in.page) * model.PageSize,
					Len: linearBytes}
				if in.kind == writes {
					s.Op, s.Val, s.Same = model.Write, in.value, true
				}
				call := time.Since(start)
				got, err := x.processes[c].do(order{Step: s})
				end := time.Since(start)
				if err == nil && in.kind == reads && !bytes.Equal(got, bytes.Repeat(got[:1], linearBytes)) {
					err = fmt.Errorf("page %d was read torn: % x", in.page, got)
				}
				if err != nil {
					errs[c] = err
					return
				}
				op := porcupine.Operation{ClientId: c, Input: in, Call: call.Nanoseconds(), Return: end.Nanoseconds()}
				if in.kind == reads {
					op.Output = got[0]
				}
				mu.Lock()
				history = append(history, op)
				mu.Unlock()
			}
		})
	}
	for d := range l.GPUs {
		c := l.CPUs + d
		devices.Go(func() {
			whole := model.Step{Client: model.Client(c), Op: model.Map, Len: l.Size, Writable: true}
			if _, errs[c] = x.processes[c].do(order{Device: d, Step: whole}); errs[c] != nil {
				return
			}
			for n := 0; ; n++ {
				select {
				case <-ended:
					return
				default:
				}
				for _, s := range []model.Step{
					{Op: model.Store, Off: int64(n%linearPages)*model.PageSize + linearBytes*int64(1+d), Len: 1,
						Val: byte(n), Same: true},
					{Op: model.Release, Len: l.Size},
				} {
					if _, errs[c] = x.processes[c].do(order{Device: d, Step: s}); errs[c] != nil {
						return
					}
				}
			}
		})
	}
	programs.Wait()
	close(ended)
	devices.Wait()
	for c, err := range errs {
		require.NoError(t, err, "program %d", c)
	}
	model, ops := regular, split(history)
	if *atomicFlag {
		model, ops = atomic, history
	}
	require.Equal(t, porcupine.Ok, porcupine.CheckOperationsTimeout(model, ops, time.Minute),
		"the history of %d reads and writes", len(history))
	t.Logf("%d reads and writes in %v", len(history), time.Since(start).Round(time.Millisecond))
}
