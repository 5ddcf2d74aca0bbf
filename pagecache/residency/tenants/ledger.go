package tenants

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// ID names a tenant.
type ID string

// Nobody asks for memory where some is only given up.
const Nobody ID = ""

// User names the tenant that a user is.
func User(uid uint32) ID { return ID(fmt.Sprint("user ", uid)) }

// Cgroup names the tenant that the processes of a cgroup are, and of those below it. path is as /proc/PID/cgroup has
// it.
func Cgroup(path string) ID { return ID("cgroup " + path) }

// Named names the tenant of the processes that call themselves so.
func Named(name string) ID { return ID("named " + name) }

// Directory names the tenant that owns what is below a directory, whoever maps it. path is relative to the mountpoint.
func Directory(path string) ID { return ID("directory " + path) }

// Process is what says of which tenant a process is.
type Process struct {
	User uint32
	// Cgroup is as /proc/PID/cgroup has it, "" where it is not known.
	Cgroup string
	// Name is what the process calls its tenant, "" where it says nothing.
	Name string
	// Files are the paths below the mountpoint of what it maps.
	Files []string
}

// Find returns the tenant that owns what a process maps: the innermost directory which is configured and has all of it,
// or the one that the process names, or that of the innermost cgroup which is configured, or else the user. It fails
// where the process names one that is not configured, or not for its user.
func Find(configured []Tenant, p Process) (found ID, err error) {
	if p.Name != "" {
		if found, err = findNamed(configured, p); err != nil {
			return "", err
		}
	}
	if of, is := findDirectory(configured, p.Files); is {
		return of, nil
	}
	if p.Name != "" {
		return found, nil
	}
	found, best := User(p.User), ""
	for _, t := range configured {
		path, is := strings.CutPrefix(string(t.ID), "cgroup ")
		within := is && (path == "/" || p.Cgroup == path || strings.HasPrefix(p.Cgroup, path+"/"))
		if within && p.Cgroup != "" && len(path) > len(best) {
			found, best = t.ID, path
		}
	}
	return found, nil
}

func findDirectory(configured []Tenant, files []string) (found ID, is bool) {
	best := ""
	for _, t := range configured {
		path, of := strings.CutPrefix(string(t.ID), "directory ")
		outside := func(name string) bool { return !strings.HasPrefix(name, path+"/") }
		if of && len(path) > len(best) && len(files) > 0 && !slices.ContainsFunc(files, outside) {
			found, best = t.ID, path
		}
	}
	return found, best != ""
}

func findNamed(configured []Tenant, p Process) (ID, error) {
	id := Named(p.Name)
	i := slices.IndexFunc(configured, func(t Tenant) bool { return t.ID == id })
	switch {
	case i < 0:
		return "", fmt.Errorf("the mount knows no tenant of the name %q: no entry of its file of tenants has it",
			p.Name)
	case !configured[i].Everyone && !slices.Contains(configured[i].Users, p.User):
		return "", fmt.Errorf("user %d may not be the tenant of the name %q: the mount's file of tenants does not list that user", p.User, p.Name)
	}
	return id, nil
}

// Tenant is what is configured of one.
type Tenant struct {
	ID ID
	// Weight is how the tenant's share compares with those of others. It is positive.
	Weight float64
	// Guaranteed is the bytes of each device that nobody takes from the tenant, and Most those that it may own. 0
	// stands for none of them, and for all.
	Guaranteed, Most int64
	// MostPinned is the bytes that it may own of pinned memory of the host, for all devices. 0: all.
	MostPinned int64
	// Users are those whose processes may name this tenant, with Everyone: all. They are for Named ones.
	Users    []uint32
	Everyone bool
}

// Check says what is wrong with a list of tenants.
func Check(list []Tenant) error {
	seen := make(map[ID]bool)
	for _, t := range list {
		switch {
		case t.ID == "":
			return fmt.Errorf("a tenant needs a name")
		case seen[t.ID]:
			return fmt.Errorf("there are two tenants %q", t.ID)
		case !(t.Weight > 0) || math.IsInf(t.Weight, 0):
			return fmt.Errorf("tenant %q: the weight %v is not positive; who shall have nothing that others need gets a small one", t.ID, t.Weight)
		case t.Guaranteed < 0 || t.Most < 0 || t.MostPinned < 0:
			return fmt.Errorf("tenant %q: what is guaranteed, and the most, must not be negative", t.ID)
		case t.Most > 0 && t.Guaranteed > t.Most:
			return fmt.Errorf("tenant %q: more is guaranteed to it than it may own", t.ID)
		}
		seen[t.ID] = true
	}
	return nil
}

// OfPinned returns what the list says of pinned memory of the host, as a list for its Ledger.
func OfPinned(list []Tenant) []Tenant {
	of := slices.Clone(list)
	for i := range of {
		of[i].Guaranteed, of[i].Most = 0, of[i].MostPinned
	}
	return of
}

// Ledger is the account of one device.
type Ledger struct {
	total      int64
	configured map[ID]Tenant
	owned      map[ID]int64
}

// New returns the account of a device of so many bytes. It fails as Check does, and where more is guaranteed than there
// is.
func New(total int64, list []Tenant) (*Ledger, error) {
	l := &Ledger{total: total, owned: make(map[ID]int64)}
	if err := CheckFor(total, list); err != nil {
		return nil, err
	}
	l.Configure(list)
	return l, nil
}

// CheckFor is Check for a device of so many bytes, of which no more is guaranteed than there is.
func CheckFor(total int64, list []Tenant) error {
	if err := Check(list); err != nil {
		return err
	}
	guaranteed := int64(0)
	for _, t := range list {
		if guaranteed += t.Guaranteed; guaranteed > total || guaranteed < 0 {
			return fmt.Errorf("more is guaranteed to tenants than the %d bytes that the device has", total)
		}
	}
	return nil
}

// Configure replaces what is configured. Whoever owns more than the new most gives it up when asking for more.
func (l *Ledger) Configure(list []Tenant) {
	l.configured = make(map[ID]Tenant)
	for _, t := range list {
		l.configured[t.ID] = t
	}
}

// Most returns the bytes that a tenant may own, 0 for all.
func (l *Ledger) Most(id ID) int64 { return l.tenant(id).Most }

// Guaranteed returns the bytes that are guaranteed to tenants.
func (l *Ledger) Guaranteed() (n int64) {
	for _, t := range l.configured {
		n += t.Guaranteed
	}
	return n
}

// Resize changes the bytes of the device.
func (l *Ledger) Resize(total int64) { l.total = total }

// tenant returns what is configured, or the default.
func (l *Ledger) tenant(id ID) Tenant {
	if t, ok := l.configured[id]; ok {
		return t
	}
	return Tenant{ID: id, Weight: 1}
}

// Add says that a tenant owns n more bytes, or asks for them; negative ones are given up.
func (l *Ledger) Add(id ID, n int64) {
	if l.owned[id] += n; l.owned[id] == 0 {
		delete(l.owned, id)
	}
}

// Owned returns the bytes of a tenant.
func (l *Ledger) Owned(id ID) int64 { return l.owned[id] }

// Over reports whether a tenant owns more than the most that it may.
func (l *Ledger) Over(id ID) bool {
	most := l.tenant(id).Most
	return most > 0 && l.owned[id] > most
}

// Share returns the bytes that are a tenant's by weight, among those who own something.
func (l *Ledger) Share(id ID) int64 {
	all := 0.0
	for other := range l.owned {
		all += l.tenant(other).Weight
	}
	t := l.tenant(id)
	if _, counted := l.owned[id]; !counted {
		all += t.Weight
	}
	return max(int64(float64(l.total)*t.Weight/all), t.Guaranteed)
}

// Victims returns the tenants that may have to give up an extent for what a tenant asks for, who is counted as owning
// it: the one that exceeds its share by most comes first. Those that own no more than what is guaranteed to them are
// not among them, but the one who asks always is. Where that one owns more than it may, it is the only one.
func (l *Ledger) Victims(asks ID) (order []ID) {
	if l.Over(asks) {
		return []ID{asks}
	}
	for id, n := range l.owned {
		if id == asks || n > l.tenant(id).Guaranteed {
			order = append(order, id)
		}
	}
	slices.SortFunc(order, func(a, b ID) int {
		return cmp.Or(cmp.Compare(l.owned[b]-l.Share(b), l.owned[a]-l.Share(a)), cmp.Compare(a, b))
	})
	return order
}

// Account is a line of the ledger.
type Account struct {
	Tenant ID    `json:"tenant"`
	Owned  int64 `json:"bytes"`
	Share  int64 `json:"share_bytes"`
	// Most is the bytes that the tenant may own, 0 for all.
	Most int64 `json:"maximum_bytes,omitempty"`
}

// Accounts returns all who own something, by name.
func (l *Ledger) Accounts() []Account {
	all := make([]Account, 0, len(l.owned))
	for id, n := range l.owned {
		all = append(all, Account{id, n, l.Share(id), l.Most(id)})
	}
	slices.SortFunc(all, func(a, b Account) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all
}
