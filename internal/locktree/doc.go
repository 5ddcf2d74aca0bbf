// Package locktree holds the test that compares the tree of locks in docs/dev/locks.md with the source. It has no code.
package locktree
