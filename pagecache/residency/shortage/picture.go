package shortage

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// Program is a program that maps memory. Process 0 is unknown.
type Program struct{ Process, User uint32 }

// Mapper is a pin of an extent that is not part of the request.
type Mapper struct {
	Program
	InBracket bool // brackets are shown apart
}

// Extent is an extent of the device.
type Extent struct {
	Size int64
	// Own means that it is in the device's own memory, not in pinned memory.
	Own bool
	// OfTenant means that it belongs to the tenant who asks, Asked that the request has it.
	OfTenant, Asked bool
	// Pinned means that nobody maps it and its file is pinned to the device. Guaranteed means that it lies within its
	// owner's guarantee.
	Pinned, Guaranteed bool
	Mappers            []Mapper
}

// Asker is who asks, and is charged.
type Asker struct {
	User    uint32
	Limited bool // may see only the user's programs
	Tenant  string
	Name    func(process uint32) string // of a process; nil: it is not known
}

// Limits are figures of the device.
type Limits struct {
	Device       int
	Budget, Used int64
	Share, Most  int64 // what the user may map, and what the tenant may own
	Unused       int64 // guaranteed to other tenants, and without an extent
	Kept         int64 // what programs keep after they unmapped it
}

// Picture is who has how much of a device, as the one who asks may see it. An extent that several programs map counts
// for each of them.
type Picture struct {
	Asker
	Limits
	PinnedBy []uint32 // users who pinned files to the device

	user, tenant              int64 // bytes that the user maps, and that the tenant owns and programs map
	had, got                  int64 // bytes that the request has, and those of them that nobody else maps
	pinned, guaranteed, stuck int64 // bytes that nobody maps
	all, ofUser, ofTenant     map[Program]int64
	brackets                  []bracket
	unseenBrackets            int64
}

type bracket struct {
	process uint32
	bytes   int64
	age     time.Duration
}

func (p *Picture) sees(user uint32) bool { return !p.Limited || user == p.User }

// Add adds an extent.
func (p *Picture) Add(x Extent) {
	if p.all == nil {
		p.all, p.ofUser, p.ofTenant = make(map[Program]int64), make(map[Program]int64), make(map[Program]int64)
	}
	seen, users := make(map[Program]bool), make(map[uint32]bool)
	for _, m := range x.Mappers {
		users[m.User] = true
		if seen[m.Program] {
			continue
		}
		seen[m.Program] = true
		if m.User == p.User {
			p.ofUser[m.Program] += x.Size
		}
		if x.Own && x.OfTenant {
			p.ofTenant[m.Program] += x.Size
		}
		if x.Own && !m.InBracket {
			p.all[m.Program] += x.Size
		}
	}
	if users[p.User] {
		p.user += x.Size
	}
	switch {
	case !x.Own:
	case x.Asked:
		if p.had += x.Size; len(x.Mappers) == 0 {
			p.got += x.Size
		}
	case len(x.Mappers) > 0:
		if x.OfTenant {
			p.tenant += x.Size
		}
	case x.Pinned:
		p.pinned += x.Size
	case x.Guaranteed && !x.OfTenant:
		p.guaranteed += x.Size
	default:
		p.stuck += x.Size
	}
}

// AddBracket adds an open bracket.
func (p *Picture) AddBracket(of Program, bytes int64, age time.Duration) {
	if !p.sees(of.User) {
		p.unseenBrackets += bytes
		return
	}
	p.brackets = append(p.brackets, bracket{of.Process, bytes, age.Round(time.Millisecond)})
}

// mostNamed is how many programs, and how many brackets, a sentence names.
const mostNamed = 4

// Who says who has the memory.
func (p *Picture) Who() (words []string) {
	slices.SortFunc(p.brackets, func(a, b bracket) int { return cmp.Compare(b.bytes, a.bytes) })
	for i, b := range p.brackets {
		if i == mostNamed {
			words = append(words, fmt.Sprintf("%d more brackets are open", len(p.brackets)-i))
			break
		}
		words = append(words, fmt.Sprintf("%s holds %s in a bracket for %v", p.program(b.process), size(b.bytes), b.age))
	}
	words = append(words, p.programs(p.all)...)
	unseen, pinnedBy := int64(0), []string{}
	for of, bytes := range p.all {
		if !p.sees(of.User) {
			unseen += bytes
		}
	}
	for _, user := range p.PinnedBy {
		if p.sees(user) {
			pinnedBy = append(pinnedBy, fmt.Sprintf("user %d", user))
		}
	}
	by := ""
	if len(pinnedBy) > 0 {
		by = " by " + strings.Join(pinnedBy, ", ")
	}
	for _, of := range []struct {
		bytes int64
		text  string
	}{{p.unseenBrackets, "are in brackets of other users"}, {unseen, "are mapped by programs of other users"},
		{p.pinned, "are pinned" + by + " and not mapped"},
		{p.guaranteed + p.Unused, "are guaranteed to other tenants"},
		{p.Kept, "are kept by programs that unmapped them"},
		{p.stuck, "are in use for a moment, or hold bytes that cannot be written back"}} {
		if of.bytes > 0 {
			words = append(words, size(of.bytes)+" "+of.text)
		}
	}
	return words
}

// program names a process.
func (p *Picture) program(process uint32) string {
	if process == 0 {
		return "a program"
	}
	if p.Name != nil {
		if name := p.Name(process); name != "" {
			return fmt.Sprintf("process %d (%s)", process, name)
		}
	}
	return fmt.Sprintf("process %d", process)
}

// programs says how much the programs map that the asker may see.
func (p *Picture) programs(bytes map[Program]int64) (words []string) {
	list := slices.DeleteFunc(slices.Collect(maps.Keys(bytes)), func(of Program) bool { return !p.sees(of.User) })
	slices.SortFunc(list, func(a, b Program) int {
		return cmp.Or(cmp.Compare(bytes[b], bytes[a]), cmp.Compare(a.Process, b.Process), cmp.Compare(a.User, b.User))
	})
	for i, of := range list {
		if i == mostNamed {
			words = append(words, fmt.Sprintf("%d more programs map memory", len(list)-i))
			break
		}
		whose := ""
		if of.User != p.User {
			whose = fmt.Sprintf(" of user %d", of.User)
		}
		words = append(words, fmt.Sprintf("%s%s maps %s", p.program(of.Process), whose, size(bytes[of])))
	}
	return words
}

func size(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }
