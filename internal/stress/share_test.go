package stress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestShared lets programs of all kinds write the same pages for some seconds. Every byte of theirs is in the file afterwards.
func TestShared(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	bothModes(t, func(t *testing.T, o testmount.Options) {
		o.Devices = 2
		o.WriteBackInterval = 200 * time.Millisecond
		m := testmount.Start(t, o)
		c := startCrew(t, m.Path("shared"), seed, 0)
		<-time.After(3 * time.Second)
		c.stop()
		content := mustRead(t, m.Path("shared"))
		kept, _ := c.verify(t, content, nil)
		t.Logf("%d promises kept", kept)
		require.Positive(t, kept)
		sameEverywhere(t, m, "shared", content)
		for _, f := range status(t, m).Files {
			require.Zero(t, f.Counters["overlapping_bytes"], "nobody stored into the slots of others")
			require.Zero(t, f.Counters["home_replacements"], "nobody changed SOURCE")
		}
	})
}
