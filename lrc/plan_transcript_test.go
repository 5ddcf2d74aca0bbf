package lrc

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TestPlanTranscripts runs the plans of testdata/plans, one file for each kind. An indented line is the result of the
// line above it. The other lines are
//
//	NAME = KIND [OWNER] FROM END     begins a plan and gives it a name
//	NAME VERB [FROM END [WORD]]      goes on with it
//	read FROM END                    CPURead; so are hollow and untrack, with an owner
//	dump                             the state of the File
//	# …                              for the reader
func TestPlanTranscripts(t *testing.T) {
	compareTranscripts(t, "testdata/plans/*.txt", func(_ *testing.T, text string) string {
		script := planScript{plans: make(map[string]any)}
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, " ") {
				continue
			}
			script.out.WriteString(line)
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				script.run(line)
			}
		}
		script.f.CheckEnded()
		return script.out.String()
	})
}

// planScript runs the lines of a transcript. It panics on a line that it does not understand.
type planScript struct {
	f     File
	plans map[string]any
	out   strings.Builder
}

func (x *planScript) sayf(format string, args ...any) { fmt.Fprintf(&x.out, "  "+format+"\n", args...) }

func (x *planScript) bases(what string, list []PageBase) {
	for _, b := range list {
		x.sayf("%s %v as base %v", what, b.Range, b.Base)
	}
}

func (x *planScript) pending(what string, list []Pending) {
	for _, p := range list {
		x.sayf("%s %v of %v, base %v", what, p.Range, p.Owner, p.Base)
	}
}

// words are the words of a line after the first, as far as they are numbers of pages, an owner, or others.
type words struct {
	rg     page.Range
	ranges []page.Range
	owner  versions.Owner
	word   string
}

func parseWords(list []string) (w words) {
	var pages []page.Index
	for _, s := range list {
		var n int
		if _, err := fmt.Sscanf(s, "gpu%d", &n); err == nil {
			w.owner = versions.GPU(n)
		} else if _, err := fmt.Sscanf(s, "%d", &n); err == nil {
			pages = append(pages, page.Index(n))
		} else {
			w.word = s
		}
	}
	if len(pages) == 2 {
		w.rg = page.Range{Start: pages[0], End: pages[1]}
		w.ranges = []page.Range{w.rg}
	}
	return w
}

func (x *planScript) run(line string) {
	list := strings.Fields(line)
	if len(list) > 2 && list[1] == "=" {
		x.plans[list[0]] = x.begin(list[2], parseWords(list[3:]))
		return
	}
	w := parseWords(list[1:])
	switch list[0] {
	case "dump":
		x.out.WriteString(indent(x.f.Dump()))
	case "read":
		x.pending("first collect", x.f.CPURead(w.rg))
	case "hollow":
		x.f.Hollow(w.rg, w.owner)
	case "untrack":
		x.bases("drop", x.f.Untrack(w.rg, w.owner))
	default:
		w = parseWords(list[2:])
		x.goOn(list[0], list[1], w)
	}
}

func (x *planScript) begin(kind string, w words) any {
	switch kind {
	case "write":
		p := x.f.BeginWrite(w.rg)
		x.pending("first collect", p.Collect)
		x.bases("keep", p.Keep)
		return p
	case "collect":
		p := x.f.BeginCollect(x.f.Pending(w.rg, false))
		x.pending("collect", p.Runs)
		x.bases("keep", p.Keep)
		return p
	case "acquire", "relieve":
		p := x.f.BeginAcquire(w.rg, w.owner)
		if kind == "relieve" {
			p.End()
			p = x.f.BeginRelieve(w.rg, w.owner)
		}
		for _, u := range p.Updates() {
			x.sayf("%v %v, base %v", u.Mode, u.Range, u.Base)
		}
		return p
	case "expose":
		p := x.f.BeginExpose(w.rg, w.owner)
		x.sayf("untracked %v", p.Untracked)
		return p
	case "release":
		return x.f.BeginRelease(w.ranges, w.rg, w.owner)
	case "redrop":
		d := x.f.Redrop(w.rg)
		x.sayf("the kernel drops %v", d.Pages)
		return d
	case "evict":
		p := x.f.BeginEvict(w.rg, w.owner)
		x.sayf("draining %v", p.Draining)
		return p
	case "truncate":
		return x.f.BeginTruncate(w.rg.Start)
	case "compare":
		p := x.f.BeginCompare(w.rg)
		x.sayf("compare %v", p.Compare)
		return p
	}
	panic("no such plan: " + kind)
}

func (x *planScript) goOn(name, verb string, w words) {
	p := x.plans[name]
	if verb == "abort" {
		p.(interface{ Abort() }).Abort()
		return
	}
	switch p := p.(type) {
	case WritePlan:
		held := page.Range{}
		if w.word == "held" {
			held = w.rg
		}
		p.Commit(held)
	case CollectPlan:
		x.commitCollect(p, w)
	case AcquirePlan:
		if verb == "end" {
			p.End()
			return
		}
		x.bases("drop", p.Updated(w.ranges, w.word == "tracked"))
	case ExposePlan:
		p.Commit(w.ranges)
	case ReleasePlan:
		x.drain(name, p.Commit())
	case Drain:
		if verb == "giveup" {
			p.GiveUp()
			return
		}
		x.drain(name, p.Dropped())
	case EvictPlan:
		p.Lossy = w.word == "lossy"
		x.bases("drop", p.Commit())
	case TruncatePlan:
		x.bases("drop", p.Commit())
	case ComparePlan:
		x.bases("keep", p.Commit(w.ranges))
	default:
		panic("no plan has the name " + name)
	}
}

func (x *planScript) commitCollect(p CollectPlan, w words) {
	agree, differ := w.ranges, []page.Range(nil)
	if w.word == "differ" {
		agree, differ = differ, agree
	}
	keep, drop := p.Commit(agree, differ)
	x.bases("keep what was collected of", keep)
	x.bases("drop", drop)
}

func (x *planScript) drain(name string, d Drain) {
	if x.plans[name] = d; len(d.Pages) == 0 {
		x.sayf("nothing is left in the kernel")
		return
	}
	x.sayf("the kernel drops %v", d.Pages)
}
