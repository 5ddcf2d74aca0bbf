package tenants

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
)

// ID names a tenant.
type ID string

// Nobody is the tenant that asks when memory is only given up.
const Nobody ID = ""

// User returns the ID of a user.
func User(uid uint32) ID { return ID("user " + strconv.FormatUint(uint64(uid), 10)) }

// Cgroup returns the ID of a cgroup with those below it. path is as in /proc/PID/cgroup.
func Cgroup(path string) ID { return ID("cgroup " + path) }

// Named returns the ID of the processes that name this tenant.
func Named(name string) ID { return ID("named " + name) }

// Directory returns the ID of the tenant that owns everything below a directory, whoever maps it. path is relative to
// the mountpoint.
func Directory(path string) ID { return ID("directory " + path) }

// Process has what determines a process's tenant.
type Process struct {
	User uint32
	// Cgroup returns the cgroup as in /proc/PID/cgroup; "" if there is none. It is called if a cgroup is configured.
	Cgroup func() (string, error)
	// Name is the tenant that the process names; "" if it names none.
	Name string
	// Files are the paths, below the mountpoint, of what it maps.
	Files []string
}

// Find returns the tenant that owns what a process maps. That is the innermost configured directory that contains all
// its files; otherwise the tenant that the process names; otherwise the innermost configured cgroup; otherwise the
// user. Find fails if the process names a tenant that is not configured, or not for its user, and if Cgroup fails.
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
		if !is || p.Cgroup == nil {
			continue
		}
		of, err := p.Cgroup()
		if err != nil {
			return "", err
		}
		within := path == "/" || of == path || strings.HasPrefix(of, path+"/")
		if within && of != "" && len(path) > len(best) {
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
		return "", fmt.Errorf("the mount knows no tenant named %q: its tenants file has no such entry",
			p.Name)
	case !configured[i].Everyone && !slices.Contains(configured[i].Users, p.User):
		return "", fmt.Errorf("user %d may not be the tenant named %q: the mount's tenants file does not list that user", p.User, p.Name)
	}
	return id, nil
}

// Tenant is the configuration of a tenant.
type Tenant struct {
	ID ID
	// Weight is the tenant's weight among others, for its share. It is positive.
	Weight float64
	// Guaranteed is how many bytes of each device others leave to the tenant, and Most how many it may own. 0 means
	// none and all, respectively.
	Guaranteed, Most int64
	// MostPinned is how many bytes of pinned host memory it may own, for all devices together. 0 means all.
	MostPinned int64
	// Users are the users whose processes may name this tenant; Everyone lets all users. They apply to Named tenants.
	Users    []uint32
	Everyone bool
}

// Check returns an error if a list of tenants is invalid.
func Check(list []Tenant) error {
	seen := make(map[ID]bool)
	for _, t := range list {
		switch {
		case t.ID == "":
			return fmt.Errorf("a tenant needs a name")
		case seen[t.ID]:
			return fmt.Errorf("there are two tenants %q", t.ID)
		case !(t.Weight > 0) || math.IsInf(t.Weight, 0):
			return fmt.Errorf("tenant %q: the weight %v is not positive; a tenant that always gives way gets a small weight", t.ID, t.Weight)
		case t.Guaranteed < 0 || t.Most < 0 || t.MostPinned < 0:
			return fmt.Errorf("tenant %q: the guarantee and the maximum must not be negative", t.ID)
		case t.Most > 0 && t.Guaranteed > t.Most:
			return fmt.Errorf("tenant %q: more is guaranteed to it than it may own", t.ID)
		}
		seen[t.ID] = true
	}
	return nil
}

// OfPinned returns a list for the Ledger of pinned host memory.
func OfPinned(list []Tenant) []Tenant {
	of := slices.Clone(list)
	for i := range of {
		of[i].Guaranteed, of[i].Most = 0, of[i].MostPinned
	}
	return of
}

// Ledger is the account of one device's memory, or of pinned memory.
type Ledger struct {
	total      int64
	configured map[ID]Tenant
	owned      map[ID]int64
}

// New returns the account of so many bytes. It fails if CheckFor does.
func New(total int64, list []Tenant) (*Ledger, error) {
	l := &Ledger{total: total, owned: make(map[ID]int64)}
	if err := CheckFor(total, list); err != nil {
		return nil, err
	}
	l.Configure(list)
	return l, nil
}

// CheckFor is Check for a device of so many bytes. It also fails if the guarantees exceed them.
func CheckFor(total int64, list []Tenant) error {
	if err := Check(list); err != nil {
		return err
	}
	guaranteed := int64(0)
	for _, t := range list {
		if guaranteed += t.Guaranteed; guaranteed > total || guaranteed < 0 {
			return fmt.Errorf("more is guaranteed to tenants than its budget of %s", humanize.IBytes(uint64(total)))
		}
	}
	return nil
}

// Configure replaces the configuration. A tenant over its new maximum gives up the excess when it asks for more.
func (l *Ledger) Configure(list []Tenant) {
	l.configured = make(map[ID]Tenant)
	for _, t := range list {
		l.configured[t.ID] = t
	}
}

// Most returns how many bytes a tenant may own; 0 means all.
func (l *Ledger) Most(id ID) int64 { return l.tenant(id).Most }

// Guaranteed returns the sum of all guarantees.
func (l *Ledger) Guaranteed() (n int64) {
	for _, t := range l.configured {
		n += t.Guaranteed
	}
	return n
}

// Resize changes the size of the device.
func (l *Ledger) Resize(total int64) { l.total = total }

// tenant returns the configuration of a tenant, or the default.
func (l *Ledger) tenant(id ID) Tenant {
	if t, ok := l.configured[id]; ok {
		return t
	}
	return Tenant{ID: id, Weight: 1}
}

// Add adds n bytes to what a tenant owns or asks for. n may be negative.
func (l *Ledger) Add(id ID, n int64) {
	if l.owned[id] += n; l.owned[id] == 0 {
		delete(l.owned, id)
	}
}

// Owned returns the bytes that a tenant owns or asks for.
func (l *Ledger) Owned(id ID) int64 { return l.owned[id] }

// Over reports whether a tenant owns more than its maximum.
func (l *Ledger) Over(id ID) bool {
	most := l.tenant(id).Most
	return most > 0 && l.owned[id] > most
}

// Limits reports whether there may be bytes that a tenant may not own: it has a maximum, or others have guarantees.
func (l *Ledger) Limits(id ID) bool {
	t := l.tenant(id)
	return t.Most > 0 || l.Guaranteed() > t.Guaranteed
}

// Reserved reports whether a tenant owns no more than is guaranteed to it.
func (l *Ledger) Reserved(id ID) bool { return l.owned[id] <= l.tenant(id).Guaranteed }

// Crowds reports whether a tenant owns more than is guaranteed to it, and so much that the rest of others' guarantees
// has no room. used is how many bytes are used and asked for, with those that nobody owns.
func (l *Ledger) Crowds(id ID, used int64) bool {
	if l.Reserved(id) {
		return false
	}
	owned := int64(0)
	for _, n := range l.owned {
		owned += n
	}
	unused := l.Unused(id)
	return unused > 0 && max(owned, used)+unused > l.total
}

// May reports whether a tenant may own n more bytes.
func (l *Ledger) May(id ID, n int64) bool {
	l.Add(id, n)
	defer l.Add(id, -n)
	return !l.Over(id) && !l.Crowds(id, 0)
}

// Reach returns the most bytes that a tenant can ever own.
func (l *Ledger) Reach(id ID) int64 {
	t := l.tenant(id)
	reach := l.total - (l.Guaranteed() - t.Guaranteed)
	if t.Most > 0 {
		return min(reach, t.Most)
	}
	return reach
}

// Unused returns the bytes that are guaranteed to tenants other than id and that these do not own.
func (l *Ledger) Unused(id ID) (n int64) {
	for _, t := range l.configured {
		if t.ID != id {
			n += max(t.Guaranteed-l.owned[t.ID], 0)
		}
	}
	return n
}

// Share returns a tenant's share in bytes, among all tenants that own something.
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

// Victims returns the tenants that may have to give up an extent, the one that exceeds its share by most first. asks is
// the tenant that asks for memory, which is counted already. Tenants that own no more than their guarantee are
// excluded, except asks. If asks owns more than its maximum, it is the only victim.
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

// Account is a tenant's line in the ledger.
type Account struct {
	Tenant ID    `json:"tenant"`
	Owned  int64 `json:"bytes"`
	Share  int64 `json:"share_bytes"`
	// Most is how many bytes the tenant may own; 0 means all.
	Most int64 `json:"maximum_bytes,omitempty"`
}

// Accounts returns the lines of all who own something, by name.
func (l *Ledger) Accounts() []Account {
	all := make([]Account, 0, len(l.owned))
	for id, n := range l.owned {
		all = append(all, Account{id, n, l.Share(id), l.Most(id)})
	}
	slices.SortFunc(all, func(a, b Account) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all
}
