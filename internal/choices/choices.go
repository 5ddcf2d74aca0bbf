// Package choices is tables of things that people choose by name: what they are called, what is said of them, and the
// thing itself. It imports nothing of gaiafs.
package choices

import (
	"fmt"
	"strings"
)

// Choice is a row.
type Choice[T any] struct {
	Name string
	// About is one line.
	About string
	Of    T
}

// Table has its rows in the order in which people want to see them.
type Table[T any] []Choice[T]

// Names returns the names.
func (t Table[T]) Names() (names []string) {
	for _, c := range t {
		names = append(names, c.Name)
	}
	return names
}

// About says in one line what the choice of that name is; "" where there is none.
func (t Table[T]) About(name string) string {
	for _, c := range t {
		if c.Name == name {
			return c.About
		}
	}
	return ""
}

// Find returns what has the name. what says in the error what the table has.
func (t Table[T]) Find(name, what string) (of T, err error) {
	for _, c := range t {
		if c.Name == name {
			return c.Of, nil
		}
	}
	return of, fmt.Errorf("there is no %s; there are %s", fmt.Sprintf(what, name), strings.Join(t.Names(), ", "))
}
