//go:build race

package lrc

const underRace = true
