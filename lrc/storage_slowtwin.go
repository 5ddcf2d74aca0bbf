//go:build slowtwin

package lrc

import (
	"fmt"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// storage keeps the states of a File's pages.
type storage = twins

// twins keeps everything twice, and panics if the answers differ.
type twins struct {
	runs  runs
	plain plain
}

// mustAgree panics unless both gave the same answers.
func mustAgree(what string, ranges []page.Range, runs, plain []answer) {
	if !slices.Equal(runs, plain) {
		panic(fmt.Sprintf("lrc: %s of %v: %v of the runs, %v of their slow twin", what, ranges, runs, plain))
	}
}

// answer is a run of pages, and the answer for it. Neighbours differ.
type answer struct {
	run  page.Range
	text string
}

func appendAnswer(list []answer, run page.Range, text string) []answer {
	if n := len(list); n > 0 && list[n-1].text == text && list[n-1].run.End == run.Start {
		list[n-1].run.End = run.End
		return list
	}
	return append(list, answer{run, text})
}

// scanned returns what a scan finds. The encoding of a state has everything that matters.
func scanned(s states, ranges []page.Range, want func(s *state) bool) (list []answer) {
	s.scan(ranges, want, func(run page.Range, s *state) { list = appendAnswer(list, run, string(s.encode(nil))) })
	return list
}

func (t *twins) end() page.Index {
	end := t.runs.end()
	if plain := t.plain.end(); end < plain {
		panic(fmt.Sprintf("lrc: the runs end at %v, before page %v", end, plain))
	}
	return end
}

func (t *twins) next(p page.Index) page.Index {
	next := t.runs.next(p)
	if plain := t.plain.next(p); next < p || next > plain {
		panic(fmt.Sprintf("lrc: the runs pass from %v to %v over page %v", p, next, plain))
	}
	return next
}

func (t *twins) scan(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	mustAgree("a scan", ranges, scanned(&t.runs, ranges, want), scanned(&t.plain, ranges, want))
	t.runs.scan(ranges, want, fn)
}

func (t *twins) update(
	ranges []page.Range, note func(s *state) Base, kind changeKind, fn func(s *state),
) (noted []PageBase) {
	noted = t.runs.update(ranges, note, kind, fn)
	said := func(noted []PageBase) (list []answer) {
		for _, n := range noted {
			list = append(list, answer{n.Range, n.Base.String()})
		}
		return list
	}
	mustAgree("what is noted", ranges, said(noted), said(t.plain.update(ranges, note, kind, fn)))
	mustAgree("what became", ranges, scanned(&t.runs, ranges, nil), scanned(&t.plain, ranges, nil))
	return noted
}

func (t *twins) trim() {
	t.runs.trim()
	t.plain.trim()
	t.end()
}

func (t *twins) memory() int64       { return t.runs.memory() }
func (t *twins) estimate() int64     { return t.runs.estimate() }
func (t *twins) check(rg page.Range) { t.runs.check(rg) }
