package ratchet

import (
	"bufio"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "lower the rows of the table to what is measured")

const tablePath = "testdata/table.txt"

// row is how much of something the table allows, and the goal, 0 for none.
type row struct{ allowed, goal int }

// What a type may have without rows.
const (
	smallFields  = 20
	smallMethods = 40
)

// small returns what is allowed without a row. Lines of a new package need one.
func small(k key) (n int, ok bool) {
	switch k.what {
	case "fields":
		return smallFields, true
	case "methods":
		return smallMethods, true
	}
	return 0, false
}

// slack returns how far a figure may be below its row.
func slack(k key, allowed int) int {
	switch {
	case k == total:
		return 2000
	case k.what == "lines":
		return 200
	}
	return max(1, allowed/50)
}

func TestNothingGrows(t *testing.T) {
	measured, err := measureAll()
	require.NoError(t, err)
	table, err := readTable(tablePath)
	require.NoError(t, err)
	if *update {
		lowered, refused := lower(table, measured)
		require.NoError(t, writeTable(tablePath, lowered))
		for _, r := range refused {
			t.Error(r)
		}
		return
	}
	for _, c := range compare(table, measured) {
		t.Error(c)
	}
}

// keysOf returns the keys of both in order.
func keysOf(table map[key]row, measured map[key]int) []key {
	all := make(map[key]bool)
	for k := range table {
		all[k] = true
	}
	for k := range measured {
		all[k] = true
	}
	return slices.SortedFunc(maps.Keys(all), func(a, b key) int {
		return cmp.Or(strings.Compare(a.what, b.what), strings.Compare(a.of, b.of))
	})
}

// compare returns what is wrong: figures above their rows, or clearly below.
func compare(table map[key]row, measured map[key]int) (wrong []string) {
	for _, k := range keysOf(table, measured) {
		r, has := table[k]
		n, there := measured[k]
		limit, free := small(k)
		switch {
		case !has && n > limit:
			wrong = append(wrong, tooMany(k, n, limit))
		case has && (!there || free && n <= limit):
			wrong = append(wrong, fmt.Sprintf("%s %s needs no row any more. %s", k.what, k.of, tighten))
		case k.what == "lines" && k != total && max(n-r.allowed, r.allowed-n) > slack(k, r.allowed):
			wrong = append(wrong, fmt.Sprintf("%s has %d lines, the table %d. %s", k.of, n, r.allowed, tighten))
		case has && k.what == "lines" && k != total:
		case has && n > r.allowed:
			wrong = append(wrong, tooMany(k, n, r.allowed))
		case has && r.allowed-n > slack(k, r.allowed):
			wrong = append(wrong, fmt.Sprintf("%s of %s: only %d, the table allows %d. %s", k.what, k.of, n, r.allowed,
				tighten))
		}
	}
	return wrong
}

const tighten = "Run: go test ./internal/ratchet -update"

// tooMany says what grew, and what to do instead.
func tooMany(k key, n, allowed int) string {
	switch k.what {
	case "fields", "methods":
		return fmt.Sprintf("%s has %d %s, the table allows %d: give the new work a type of its own", k.of, n, k.what,
			allowed)
	case "lines":
		if k != total {
			return fmt.Sprintf("the table has no row for %s. %s", k.of, tighten)
		}
		return fmt.Sprintf("the product has %d lines, the table allows %d: let a concept go", n, allowed)
	case "settings":
		return fmt.Sprintf("gaiafs mount has %d settings, the table allows %d: derive the new one, or let one go", n,
			allowed)
	case "up":
		return fmt.Sprintf("in %s, %d references run up, the table allows %d. With -v, TestReferences lists them", k.of, n,
			allowed)
	}
	return fmt.Sprintf("%s of %s: %d", k.what, k.of, n)
}

// lower returns the table with lower rows where less is measured, and what it refuses to raise.
func lower(table map[key]row, measured map[key]int) (lowered map[key]row, refused []string) {
	lowered = make(map[key]row)
	for _, k := range keysOf(table, measured) {
		r, has := table[k]
		n, there := measured[k]
		limit, free := small(k)
		switch {
		case !there || free && n <= limit:
			continue
		case k == total:
			if r.allowed-n > slack(k, r.allowed) {
				r.allowed = (n + 499) / 500 * 500
			}
		case k.what == "lines":
			if !has || max(n-r.allowed, r.allowed-n) > slack(k, r.allowed) {
				r.allowed = (n + 50) / 100 * 100
			}
		case !has:
			refused = append(refused, tooMany(k, n, limit))
			continue
		default:
			r.allowed = min(r.allowed, n)
		}
		if n > r.allowed && (k == total || k.what != "lines") {
			refused = append(refused, tooMany(k, n, r.allowed))
		}
		lowered[k] = r
	}
	return lowered, refused
}

// readTable reads a row per line: what, of what, how much is allowed, and the goal or "-".
func readTable(path string) (map[key]row, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	table := make(map[key]row)
	s := bufio.NewScanner(f)
	for s.Scan() {
		c := strings.Fields(s.Text())
		if len(c) == 0 || c[0] == "#" {
			continue
		}
		if len(c) != 4 {
			return nil, fmt.Errorf("%s: not four columns: %q", path, s.Text())
		}
		allowed, err := strconv.Atoi(c[2])
		goal, err2 := strconv.Atoi(strings.Replace(c[3], "-", "0", 1))
		if err := errors.Join(err, err2); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		k := key{c[0], c[1]}
		if _, twice := table[k]; twice {
			return nil, fmt.Errorf("%s has two rows for %s of %s", path, k.what, k.of)
		}
		table[k] = row{allowed, goal}
	}
	return table, s.Err()
}

func writeTable(path string, table map[key]row) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Only goes downwards. doc.go says what is measured. Lower it with: go test ./internal/ratchet -update\n")
	fmt.Fprintf(&b, "# %-8s %-38s %7s %6s\n", "what", "of", "allowed", "goal")
	for _, k := range keysOf(table, nil) {
		goal := "-"
		if g := table[k].goal; g > 0 {
			goal = strconv.Itoa(g)
		}
		fmt.Fprintf(&b, "%-10s %-38s %7d %6s\n", k.what, k.of, table[k].allowed, goal)
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

// TestReferences shows, with -v, the references that run up.
func TestReferences(t *testing.T) {
	for _, folder := range layered {
		up, all, err := references(folder)
		require.NoError(t, err)
		t.Logf("%s: %d of %d references run up", folder, len(up), len(all))
		for _, p := range up {
			t.Logf("%s: %s", folder, p)
		}
	}
}
