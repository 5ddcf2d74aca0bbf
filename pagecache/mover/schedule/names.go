package schedule

import (
	"fmt"
	"strings"
)

// Default is the name of the discipline that is used where nobody asks for another one.
const Default = "fcfs"

// disciplines are in the order in which people want to see them.
var disciplines = []struct {
	name, about string
	make        func(weight func(tenant uint32) float64) Discipline
}{
	{"fcfs", "first come, first served, but reads that somebody waits for before others",
		func(func(uint32) float64) Discipline { return new(FCFS) }},
	{"priority", "the most urgent class first; transfers are made whole",
		func(func(uint32) float64) Discipline { return new(Priority) }},
	{"preemptive", "the most urgent class first; transfers come in pieces of 2 MiB, and less urgent ones fill gaps",
		func(func(uint32) float64) Discipline { return &Priority{Preemptive: true} }},
	{"preemptive-exclusive", "the same, but nothing less urgent begins while a more urgent transfer is under way",
		func(func(uint32) float64) Discipline { return &Priority{Preemptive: true, Exclusive: true} }},
	{"shares", "tenants share the link by weight, in pieces of 2 MiB; what nobody claims is lent",
		func(weight func(uint32) float64) Discipline { return &Shares{Weight: weight} }},
}

// Names returns the names that New knows.
func Names() (names []string) {
	for _, d := range disciplines {
		names = append(names, d.name)
	}
	return names
}

// About says in one line what a discipline does.
func About(name string) string {
	for _, d := range disciplines {
		if d.name == name {
			return d.about
		}
	}
	return ""
}

// New makes a discipline by its name. weight is that of Shares.
func New(name string, weight func(tenant uint32) float64) (Discipline, error) {
	for _, d := range disciplines {
		if d.name == name {
			return d.make(weight), nil
		}
	}
	return nil, fmt.Errorf("there is no discipline %q for transfers; there are %s", name, strings.Join(Names(), ", "))
}
