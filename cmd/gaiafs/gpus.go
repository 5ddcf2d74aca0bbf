package main

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// gpuBackend is a way to get devices. A new one is one more entry in gpuBackends.
type gpuBackend struct {
	name string
	// parse checks what follows the colon of --gpus; "" where nothing does. It returns the ordinals asked for.
	parse func(argument string) (ordinals []int, err error)
	// found returns the ordinals that auto takes, or says why there are none. It tells log of those that cannot be
	// used.
	found func(log *slog.Logger) ([]int, error)
	// open makes the devices, each with that much memory, 0 for a choice of its own.
	open func(ordinals []int, memory int64) ([]gpubackend.Device, error)
}

// gpuBackends are in the order in which auto tries them.
var gpuBackends = []gpuBackend{
	{name: "cuda", parse: parseOrdinals, found: foundCUDA, open: openCUDA},
	{name: "emulated", parse: parseCount, found: func(*slog.Logger) ([]int, error) { return []int{0}, nil },
		open: openEmulated},
}

// maxEmulated is the largest number of emulated devices.
const maxEmulated = 160

// gpuChoice is the value of --gpus.
type gpuChoice struct {
	backend  string // "auto", "none" or the name of one
	argument string
}

func (g *gpuChoice) Set(text string) error {
	name, argument, colon := strings.Cut(strings.ToLower(strings.TrimSpace(text)), ":")
	if name == "auto" || name == "none" {
		if colon {
			return fmt.Errorf("%q: nothing follows %s", text, name)
		}
		*g = gpuChoice{backend: name}
		return nil
	}
	i := slices.IndexFunc(gpuBackends, func(b gpuBackend) bool { return b.name == name })
	if i < 0 || colon && argument == "" {
		return fmt.Errorf("%q is none of auto, none, emulated:N and cuda:0,1", text)
	}
	if _, err := gpuBackends[i].parse(argument); err != nil {
		return fmt.Errorf("%q: %w", text, err)
	}
	*g = gpuChoice{name, argument}
	return nil
}

func (g *gpuChoice) String() string {
	if g.argument != "" {
		return g.backend + ":" + g.argument
	}
	return g.backend
}

func (g *gpuChoice) Type() string { return "DEVICES" }

// parseOrdinals reads "0,1"; nothing means the first device.
func parseOrdinals(argument string) ([]int, error) {
	if argument == "" {
		return []int{0}, nil
	}
	var ordinals []int
	for _, field := range strings.Split(argument, ",") {
		n, err := strconv.Atoi(field)
		if err != nil || n < 0 || n > 254 {
			return nil, fmt.Errorf("%q is no device number from 0 to 254", field)
		}
		if slices.Contains(ordinals, n) {
			return nil, fmt.Errorf("device %d is named twice", n)
		}
		ordinals = append(ordinals, n)
	}
	return ordinals, nil
}

// parseCount reads "4"; nothing means one.
func parseCount(argument string) ([]int, error) {
	n := 1
	if argument != "" {
		var err error
		if n, err = strconv.Atoi(argument); err != nil || n < 1 || n > maxEmulated {
			return nil, fmt.Errorf("the number of emulated devices is from 1 to %d", maxEmulated)
		}
	}
	ordinals := make([]int, n)
	for i := range ordinals {
		ordinals[i] = i
	}
	return ordinals, nil
}

// open makes the devices that were chosen, each with that much memory, 0 for a choice of gaiafs. The caller closes
// them. noGPU says why emulated ones stand in for GPUs that nobody found.
func (g *gpuChoice) open(memory int64, log *slog.Logger) (devices []gpubackend.Device, noGPU, err error) {
	switch g.backend {
	case "none":
		return nil, nil, nil
	case "auto":
		devices, noGPU, err = openFound(memory, log)
	default:
		i := slices.IndexFunc(gpuBackends, func(b gpuBackend) bool { return b.name == g.backend })
		var ordinals []int
		if ordinals, err = gpuBackends[i].parse(g.argument); err != nil { // Set let only those pass
			return nil, nil, err
		}
		devices, err = gpuBackends[i].open(ordinals, memory)
	}
	if memory != 0 && errors.Is(err, gpubackend.ErrNoMemory) { // the devices are there
		return nil, nil, fmt.Errorf("--gpus %s: %w", g, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--gpus %s cannot be had: %w; --gpus emulated:1 works everywhere", g, err)
	}
	for _, d := range devices {
		info := d.Info()
		what := []any{"number", info.Ordinal, "kind", info.Kind.String(), "name", info.Name, "memory", info.Memory}
		if uuid := info.UUID.String(); uuid != "" {
			what = append(what, "uuid", uuid)
		}
		log.Info("device", what...)
	}
	return devices, noGPU, nil
}

// openFound makes all devices of the first kind that has any. A device that cannot be opened is left out, unless that
// is because it lacks the memory that was asked for. passed says why the kinds before were passed over.
func openFound(memory int64, log *slog.Logger) (devices []gpubackend.Device, passed, err error) {
	for _, b := range gpuBackends {
		var ordinals []int
		ordinals, err = b.found(log)
		for _, o := range ordinals {
			var opened []gpubackend.Device
			opened, err = b.open([]int{o}, memory)
			if memory != 0 && errors.Is(err, gpubackend.ErrNoMemory) {
				return nil, nil, errors.Join(err, closeDevices(devices))
			}
			if err != nil {
				log.Warn("a device is not used", "kind", b.name, "number", o, "reason", err)
			}
			devices = append(devices, opened...)
		}
		if len(devices) > 0 {
			return devices, passed, nil
		}
		log.Info("devices of a kind are not used", "kind", b.name, "reason", err)
		passed = cmp.Or(passed, err)
	}
	return nil, passed, err
}

// openEmulated makes emulated devices. Their memory is the host's, taken as it is used.
func openEmulated(ordinals []int, memory int64) ([]gpubackend.Device, error) {
	switch host := hostMemory(cgroupLimit); {
	case memory == 0:
		memory = emulatedMemory(availableMemory(), len(ordinals))
	case memory > host:
		return nil, fmt.Errorf("%w: %s for an emulated device is more than the host's memory, of which there are %s: "+
			"change --gpu-memory, or leave it out", gpubackend.ErrNoMemory, bytesText(memory), bytesText(host))
	}
	var devices []gpubackend.Device
	for _, o := range ordinals {
		d, err := emulated.New(emulated.Options{Ordinal: o, Memory: memory})
		if err != nil {
			return nil, errors.Join(err, closeDevices(devices))
		}
		devices = append(devices, d)
	}
	return devices, nil
}

func closeDevices(devices []gpubackend.Device) error {
	var errs []error
	for _, d := range devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}
