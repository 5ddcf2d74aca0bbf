package lrc

import (
	"testing"

	"golang.org/x/sys/cpu"
)

func mergeWays() []mergeWay {
	use := func(wide bool) func(testing.TB) {
		return func(t testing.TB) {
			was := wideMerge
			wideMerge = wide
			t.Cleanup(func() { wideMerge = was })
		}
	}
	ways := []mergeWay{{"words", use(false)}}
	if cpu.X86.HasAVX2 && cpu.X86.HasPOPCNT {
		ways = append(ways, mergeWay{"avx2", use(true)})
	}
	return ways
}
