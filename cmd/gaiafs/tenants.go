package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	osuser "os/user"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/gaiafs/gaiafs/pagecache"
)

// tenantFile is the value of --tenants: the file, and what it says. docs/tenants.md describes the file.
type tenantFile struct {
	path string
	list []pagecache.Tenant
}

// tenantTable is an entry of the file.
type tenantTable struct {
	User       any      `toml:"user"` // a name or a number
	Cgroup     string   `toml:"cgroup"`
	Weight     *float64 `toml:"weight"`
	Guaranteed string   `toml:"guaranteed"`
	Maximum    string   `toml:"maximum"`
}

// Set reads the file; "none" stands for no file, and equal shares.
func (f *tenantFile) Set(text string) error {
	if text == "" || text == "none" {
		*f = tenantFile{}
		return nil
	}
	at, err := filepath.Abs(text)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(at)
	if err != nil {
		return fmt.Errorf("the file of tenants cannot be read: %w", err)
	}
	list, err := parseTenants(string(content))
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	*f = tenantFile{at, list}
	return nil
}

func (f *tenantFile) String() string { return cmp.Or(f.path, "none") }
func (f *tenantFile) Type() string   { return "FILE" }

// parseTenants reads the file's text.
func parseTenants(text string) (list []pagecache.Tenant, err error) {
	var file struct {
		Tenant []tenantTable `toml:"tenant"`
	}
	known, err := toml.Decode(text, &file)
	if err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return nil, fmt.Errorf("line %d: %s", parse.Position.Line, parse.Message)
		}
		return nil, err
	}
	if unknown := known.Undecoded(); len(unknown) > 0 {
		return nil, fmt.Errorf("there is no %q; a [[tenant]] has user or cgroup, weight, guaranteed and maximum", unknown[0].String())
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

// tenant returns what a table means.
func (t tenantTable) tenant() (of pagecache.Tenant, err error) {
	of.Weight = 1
	if t.Weight != nil {
		of.Weight = *t.Weight
	}
	for _, s := range []struct {
		name, text string
		into       *int64
	}{{"guaranteed", t.Guaranteed, &of.Guaranteed}, {"maximum", t.Maximum, &of.Most}} {
		if s.text == "" {
			continue
		}
		var bytes size
		if err := bytes.Set(s.text); err != nil {
			return of, fmt.Errorf("%s: %w", s.name, err)
		}
		*s.into = int64(bytes)
	}
	switch {
	case (t.User != nil) == (t.Cgroup != ""):
		return of, errors.New("it needs either a user or a cgroup")
	case t.Cgroup != "" && (!strings.HasPrefix(t.Cgroup, "/") || path.Clean(t.Cgroup) != t.Cgroup):
		return of, fmt.Errorf("the cgroup %q is no path as /proc/PID/cgroup has it, which begins with /", t.Cgroup)
	case t.Cgroup != "":
		of.ID = pagecache.CgroupTenant(t.Cgroup)
		return of, nil
	}
	uid, err := userNumber(t.User)
	of.ID = pagecache.UserTenant(uid)
	return of, err
}

// userNumber returns the number of a user by name or number.
func userNumber(of any) (uint32, error) {
	text := fmt.Sprint(of)
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		return uint32(n), nil
	}
	known, err := osuser.Lookup(text)
	if err != nil {
		return 0, fmt.Errorf("there is no user %q; write the number of one that this machine does not know", text)
	}
	n, err := strconv.ParseUint(known.Uid, 10, 32)
	return uint32(n), err
}
