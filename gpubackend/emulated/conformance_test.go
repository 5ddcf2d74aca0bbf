package emulated_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/conformance"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

func TestMain(m *testing.M) { os.Exit(conformance.Main(m, conformance.MapShared)) }

func TestConformance(t *testing.T) {
	for name, o := range map[string]emulated.Options{
		"Plain":        {Memory: 64 << 20},
		"Poison":       {Memory: 64 << 20, Poison: true},
		"SmallExtents": {Memory: 32<<20 + 5, Granularity: 64 << 10, Ordinal: 3},
	} {
		t.Run(name, func(t *testing.T) {
			conformance.Run(t, func(t *testing.T) gpubackend.Device {
				d, err := emulated.New(o)
				require.NoError(t, err)
				return d
			})
		})
	}
}
