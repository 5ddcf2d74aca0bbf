//go:build !amd64

package lrc

func mergeMany(dst, base []byte, versions [][]byte) int { return mergeWords(dst, base, versions) }
