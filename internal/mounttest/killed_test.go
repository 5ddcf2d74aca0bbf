package mounttest

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestKilledWhileViewsAreFilled kills programs while their views of the same segments are being filled, each view
// waiting for another. Nothing of them may remain, and other programs get the file's bytes.
func TestKilledWhileViewsAreFilled(t *testing.T) {
	x := newSystem(t, layoutOf(false), testmount.Options{WriteBackInterval: time.Hour})
	x.mapped, x.viewed = make(map[model.Client]bool), make(map[model.Client]bool)
	want := make([]byte, 5<<20)
	_, err := rand.Read(want)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(x.mount.Source, "large"), want, 0o600))
	begin := func() *process {
		p, err := startProcess(x.env...)
		require.NoError(t, err)
		_, err = p.do(order{Open: x.mount.Path("large")})
		require.NoError(t, err)
		return p
	}
	view := model.Step{Op: model.View, Len: int64(len(want))}
	look := model.Step{Op: model.Look}
	for round := range 8 {
		var processes []*process
		for device := range x.layout.Devices {
			p := begin()
			require.NoError(t, p.orders.Encode(order{Device: device, Step: view}))
			processes = append(processes, p)
		}
		for range round {
			_, err := x.status() // takes a while
			require.NoError(t, err)
		}
		for _, p := range processes {
			require.NoError(t, p.kill())
		}
		last := begin()
		device := round % x.layout.Devices
		_, err := last.do(order{Device: device, Step: view})
		require.NoError(t, err)
		got, err := last.do(order{Device: device, Step: look})
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "round %d", round)
		require.NoError(t, last.end())
		require.NoError(t, x.settled())
	}
}
