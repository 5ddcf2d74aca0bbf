package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// emulatedBackend makes devices out of host memory.
var emulatedBackend = gpuBackend{
	kind: gpubackend.KindEmulated, example: "emulated:2", parse: parseCount, open: openEmulated,
	found: func(*slog.Logger) ([]int, error) { return anyOf(1), nil },
}

// maxEmulated is the largest number of emulated devices.
const maxEmulated = 160

// parseCount reads a number such as "4"; "" means one.
func parseCount(argument string) ([]int, error) {
	n := 1
	if argument != "" {
		var err error
		if n, err = strconv.Atoi(argument); err != nil || n < 1 || n > maxEmulated {
			return nil, fmt.Errorf("the number of emulated devices is from 1 to %d", maxEmulated)
		}
	}
	return anyOf(n), nil
}

// takenVariable names a file with a size: how many bytes of each emulated device other programs are taken to use. It
// shows without a GPU how a mount reacts to that. Such a device has a third more memory than the mount's initial
// budget, like a GPU that nobody else uses.
const takenVariable = "GAIAFS_EMULATED_TAKEN"

// takenByOthers returns a function that reads that file, or nil if none is named. A missing file, or one without a
// size, means 0.
func takenByOthers() func() int64 {
	file := os.Getenv(takenVariable)
	if file == "" {
		return nil
	}
	return func() int64 {
		text, err := os.ReadFile(file)
		var bytes size
		if err != nil || bytes.Set(strings.TrimSpace(string(text))) != nil {
			return 0
		}
		return int64(bytes)
	}
}

// openEmulated makes emulated devices. Their memory is the host's, allocated on demand.
func openEmulated(wanted []numbered, memory int64) ([]gpubackend.Device, error) {
	switch host := hostMemory(cgroupLimit); {
	case memory == 0:
		memory = emulatedMemory(availableMemory(), len(wanted))
	case memory > host:
		text := fmt.Sprintf("%s for an emulated device is more than the host's memory of %s: change --gpu-memory, or "+
			"leave it out", bytesText(memory), bytesText(host))
		return nil, reworded{text, gpubackend.ErrNoMemory}
	}
	taken := takenByOthers()
	var devices []gpubackend.Device
	for _, w := range wanted {
		d, err := emulated.New(emulated.Options{Ordinal: w.number, Memory: memory, Taken: taken, Total: memory / 3 * 4})
		if err != nil {
			return nil, errors.Join(err, closeDevices(devices))
		}
		devices = append(devices, d)
	}
	return devices, nil
}
