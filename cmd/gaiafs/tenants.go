package main

import (
	"errors"
	"fmt"
	osuser "os/user"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"github.com/gaiafs/gaiafs/pagecache"
)

// tenantTable is an entry of a file of tenants, which docs/tenants.md describes.
type tenantTable struct {
	User       any      `toml:"user"` // a name or a number
	Cgroup     string   `toml:"cgroup"`
	Directory  string   `toml:"directory"` // below the mountpoint
	Name       string   `toml:"name"`
	Users      []any    `toml:"users"` // names or numbers, or "*"
	Weight     *float64 `toml:"weight"`
	Guaranteed string   `toml:"guaranteed"`
	Maximum    string   `toml:"maximum"`
	MostPinned string   `toml:"maximum-pinned"`
}

// parseTenants reads the file's text.
func parseTenants(text string) (list []pagecache.Tenant, err error) {
	var file struct {
		Tenant []tenantTable `toml:"tenant"`
	}
	if err := decodeTOML(text, &file, "a [[tenant]] has user, cgroup, directory, or name and users; weight, "+
		"guaranteed, maximum and maximum-pinned"); err != nil {
		return nil, err
	}
	for i, table := range file.Tenant {
		t, err := table.tenant()
		if err != nil {
			return nil, fmt.Errorf("tenant %d: %w", i+1, err)
		}
		list = append(list, t)
	}
	return list, pagecache.CheckTenants(list)
}

// tenant converts a table to a tenant.
func (t tenantTable) tenant() (of pagecache.Tenant, err error) {
	of.Weight = 1
	if t.Weight != nil {
		of.Weight = *t.Weight
	}
	for _, s := range []struct {
		name, text string
		into       *int64
	}{{"guaranteed", t.Guaranteed, &of.Guaranteed}, {"maximum", t.Maximum, &of.Most},
		{"maximum-pinned", t.MostPinned, &of.MostPinned}} {
		if s.text == "" {
			continue
		}
		var bytes size
		if err := bytes.Set(s.text); err != nil {
			return of, fmt.Errorf("%s: %w", s.name, err)
		}
		if bytes == 0 {
			return of, fmt.Errorf("%s: 0 is not possible; leave it out for none", s.name)
		}
		*s.into = int64(bytes)
	}
	return of, t.whose(&of)
}

// whose fills in the tenant's ID and the users who may name it.
func (t tenantTable) whose(of *pagecache.Tenant) (err error) {
	kinds := 0
	for _, is := range []bool{t.User != nil, t.Cgroup != "", t.Directory != "", t.Name != ""} {
		if is {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return errors.New("it needs either a user, or a cgroup, or a directory, or a name")
	case t.Name == "" && t.Users != nil:
		return errors.New("users are for a tenant with a name")
	case t.Name != "":
		return t.named(of)
	case t.Directory != "" && (path.Clean(t.Directory) != t.Directory || !filepath.IsLocal(t.Directory) ||
		t.Directory == "."):
		return fmt.Errorf("the directory %q is not a path relative to the mountpoint, such as \"models/large\"", t.Directory)
	case t.Directory != "":
		of.ID = pagecache.DirectoryTenant(t.Directory)
		return nil
	case t.Cgroup != "" && (!strings.HasPrefix(t.Cgroup, "/") || path.Clean(t.Cgroup) != t.Cgroup):
		return fmt.Errorf("the cgroup %q is not a path as in /proc/PID/cgroup, which begins with /", t.Cgroup)
	case t.Cgroup != "":
		of.ID = pagecache.CgroupTenant(t.Cgroup)
		return nil
	}
	uid, err := userNumber(t.User)
	of.ID = pagecache.UserTenant(uid)
	return err
}

// mostTenantName is the longest name of a tenant in bytes. The protocol allows no longer one.
const mostTenantName = 255

// named is whose for a tenant with a name.
func (t tenantTable) named(of *pagecache.Tenant) error {
	if len(t.Name) > mostTenantName || strings.ContainsFunc(t.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("the name %q is longer than %d bytes, or cannot be printed", t.Name, mostTenantName)
	}
	if len(t.Users) == 0 {
		return fmt.Errorf("the name %q needs users who may use it: a list of names and numbers, or [\"*\"] for everyone", t.Name)
	}
	of.ID = pagecache.NamedTenant(t.Name)
	for _, u := range t.Users {
		if u == "*" {
			of.Everyone = true
			continue
		}
		uid, err := userNumber(u)
		if err != nil {
			return err
		}
		of.Users = append(of.Users, uid)
	}
	return nil
}

// userNumber returns the number of a user by name or number.
func userNumber(of any) (uint32, error) {
	text := fmt.Sprint(of)
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		return uint32(n), nil
	}
	known, err := osuser.Lookup(text)
	if err != nil {
		return 0, fmt.Errorf("there is no user %q; for users unknown to this machine, write the number", text)
	}
	n, err := strconv.ParseUint(known.Uid, 10, 32)
	return uint32(n), err
}
