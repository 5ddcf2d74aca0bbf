//go:build !slowtwin

package lrc

// storage keeps the states of a File's pages.
type storage = runs
