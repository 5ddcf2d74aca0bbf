package schedule

import "github.com/gaiafs/gaiafs/internal/choices"

// Default is the name of the default discipline.
const Default = "fcfs"

// disciplines are listed in the order in which people want to see them.
var disciplines = choices.Table[func(weight func(tenant uint32) float64) Discipline]{
	{Name: "fcfs", About: "first come, first served; reads that somebody waits for go before others",
		Of: func(func(uint32) float64) Discipline { return new(FCFS) }},
	{Name: "priority", About: "the most urgent class first; transfers are made whole",
		Of: func(func(uint32) float64) Discipline { return new(Priority) }},
	{Name: "preemptive", About: "the most urgent class first; transfers come in pieces of 4 MiB, and less urgent ones fill gaps",
		Of: func(func(uint32) float64) Discipline { return &Priority{Preemptive: true} }},
	{Name: "preemptive-exclusive", About: "the same, but nothing less urgent begins while a more urgent transfer is under way",
		Of: func(func(uint32) float64) Discipline { return &Priority{Preemptive: true, Exclusive: true} }},
	{Name: "shares", About: "tenants share the link by weight, in pieces of 4 MiB; unclaimed parts are lent",
		Of: func(weight func(uint32) float64) Discipline { return &Shares{Weight: weight} }},
}

// Names returns the names of all disciplines.
func Names() []string { return disciplines.Names() }

// About says in one line what a discipline does.
func About(name string) string { return disciplines.About(name) }

// New makes the discipline of the given name. weight is Shares.Weight.
func New(name string, weight func(tenant uint32) float64) (Discipline, error) {
	newOne, err := disciplines.Find(name, "discipline %q for transfers")
	if err != nil {
		return nil, err
	}
	return newOne(weight), nil
}
