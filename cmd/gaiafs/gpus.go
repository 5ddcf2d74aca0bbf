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
	"github.com/gaiafs/gaiafs/pagecache"
)

// gpuBackend opens devices of one kind. Each kind has a file with its row, and kinds.go lists them.
type gpuBackend struct {
	kind gpubackend.Kind
	// example is what to write in --gpus.
	example string
	// parse checks the text after the colon in --gpus, "" if there is none. It returns the ordinals asked for, or
	// anyOf(n) for n devices of a kind without ordinals.
	parse func(argument string) (ordinals []int, err error)
	// found returns the ordinals that auto uses, or says why there are none. It logs the devices that cannot be used.
	found func(log *slog.Logger) ([]int, error)
	// open makes the devices, each with that much memory; 0 lets the kind choose.
	open func(devices []numbered, memory int64) ([]gpubackend.Device, error)
}

// numbered is a requested device: its number in the mount, and the kind's own ordinal.
type numbered struct{ number, ordinal int }

// anyOf returns n devices without ordinals.
func anyOf(n int) []int { return slices.Repeat([]int{-1}, n) }

// wanted is the requested devices of one kind.
type wanted struct {
	*gpuBackend
	devices []numbered
}

// number gives each device a unique number in the mount, across all kinds: its own ordinal if that is free, or else the
// lowest free number. Kinds are numbered in the order of gpuBackends, whatever the order in --gpus.
func number(all map[*gpuBackend][]int) (choice []wanted, err error) {
	taken := make(map[int]bool)
	for _, b := range gpuBackends {
		w := wanted{gpuBackend: b}
		for _, ordinal := range all[b] {
			n := ordinal
			if n < 0 || taken[n] {
				for n = 0; taken[n]; n++ {
				}
			}
			if n > pagecache.HighestDevice {
				return nil, fmt.Errorf("a mount has no more than %d devices", pagecache.HighestDevice+1)
			}
			taken[n] = true
			w.devices = append(w.devices, numbered{n, ordinal})
		}
		if len(w.devices) > 0 {
			choice = append(choice, w)
		}
	}
	return choice, nil
}

// gpuChoice is the value of --gpus.
type gpuChoice struct{ text string }

func (g *gpuChoice) auto() bool { return g.text == "auto" }
func (g *gpuChoice) none() bool { return g.text == "none" }

func (g *gpuChoice) Set(text string) error {
	c := gpuChoice{strings.ToLower(strings.TrimSpace(text))}
	if !c.auto() && !c.none() {
		if _, err := c.wanted(); err != nil {
			return fmt.Errorf("%q: %w", text, err)
		}
	}
	*g = c
	return nil
}

// wanted returns the devices that were named, as in "cuda:0,1,emulated:2".
func (g *gpuChoice) wanted() ([]wanted, error) {
	all := make(map[*gpuBackend][]int)
	for rest, more := g.text, true; more; {
		var part string
		part, rest, more = cutKind(rest)
		name, argument, colon := strings.Cut(part, ":")
		i := slices.IndexFunc(gpuBackends, func(b *gpuBackend) bool { return b.kind.String() == name })
		if i < 0 || colon && argument == "" {
			return nil, fmt.Errorf("use auto, none, or one or several of %s", strings.Join(examples(), ", "))
		}
		b := gpuBackends[i]
		if all[b] != nil {
			return nil, fmt.Errorf("%s is named twice", name)
		}
		ordinals, err := b.parse(argument)
		if err != nil {
			return nil, err
		}
		all[b] = ordinals
	}
	return number(all)
}

// cutKind splits "cuda:0,1,emulated:2" where the next kind begins.
func cutKind(text string) (part, rest string, more bool) {
	for i := range text {
		if text[i] == ',' && i+1 < len(text) && text[i+1] >= 'a' && text[i+1] <= 'z' {
			return text[:i], text[i+1:], true
		}
	}
	return text, "", false
}

// examples returns an example for each kind.
func examples() (all []string) {
	for _, b := range gpuBackends {
		all = append(all, b.example)
	}
	return all
}

func (g *gpuChoice) String() string { return g.text }

func (g *gpuChoice) Type() string { return "DEVICES" }

// parseOrdinals reads a list such as "0,1"; "" means the first device. "-0,-1" names the devices that are not meant, and
// parseOrdinals only checks it.
func parseOrdinals(argument string) ([]int, error) {
	if argument == "" {
		return []int{0}, nil
	}
	var ordinals []int
	fields := strings.Split(argument, ",")
	but := strings.HasPrefix(argument, "-")
	for _, field := range fields {
		number, minus := strings.CutPrefix(field, "-")
		if minus != but {
			return nil, errors.New("name either devices, or with - before each number those that are not used")
		}
		n, err := strconv.Atoi(number)
		if err != nil || n < 0 || n > pagecache.HighestDevice {
			return nil, fmt.Errorf("%q is no device number from 0 to %d", field, pagecache.HighestDevice)
		}
		if slices.Contains(ordinals, n) {
			return nil, fmt.Errorf("device %d is named twice", n)
		}
		ordinals = append(ordinals, n)
	}
	return ordinals, nil
}

// open makes the chosen devices, each with that much memory; 0 lets gaiafs choose. The caller closes them. noGPU says
// why emulated devices are used instead of GPUs, if auto found none.
func (g *gpuChoice) open(memory int64, log *slog.Logger) (devices []gpubackend.Device, noGPU, err error) {
	switch {
	case g.none():
		return nil, nil, nil
	case g.auto():
		devices, noGPU, err = openFound(memory, log)
	default:
		devices, err = g.openWanted(memory, log)
	}
	if memory != 0 && errors.Is(err, gpubackend.ErrNoMemory) { // the devices exist
		return nil, nil, fmt.Errorf("--gpus %s: %w", g, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--gpus %s: the devices cannot be opened: %w; --gpus emulated:1 works everywhere", g, err)
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

// without returns the choice with the devices that are meant where it names those that are not, as in "cuda:-1".
func (g *gpuChoice) without(log *slog.Logger) (*gpuChoice, error) {
	var parts []string
	for rest, more := g.text, true; more; {
		var part string
		part, rest, more = cutKind(rest)
		name, argument, _ := strings.Cut(part, ":")
		if strings.HasPrefix(argument, "-") {
			i := slices.IndexFunc(gpuBackends, func(b *gpuBackend) bool { return b.kind.String() == name })
			all, err := gpuBackends[i].found(log)
			if err != nil {
				return nil, err
			}
			var left []string
			for _, n := range all {
				if !slices.Contains(strings.Split(argument, ","), fmt.Sprint("-", n)) {
					left = append(left, strconv.Itoa(n))
				}
			}
			if len(left) == 0 {
				return nil, errors.New("none is left that can be used")
			}
			part = name + ":" + strings.Join(left, ",")
		}
		parts = append(parts, part)
	}
	return &gpuChoice{strings.Join(parts, ",")}, nil
}

// openWanted makes all devices that were named, or none.
func (g *gpuChoice) openWanted(memory int64, log *slog.Logger) (devices []gpubackend.Device, err error) {
	named, err := g.without(log)
	if err != nil {
		return nil, err
	}
	choice, err := named.wanted()
	if err != nil { // Set accepts only what can be parsed
		return nil, err
	}
	for _, w := range choice {
		opened, err := w.open(w.devices, memory)
		if err != nil {
			return nil, errors.Join(err, closeDevices(devices))
		}
		devices = append(devices, opened...)
	}
	return devices, nil
}

// openFound makes all devices of the first kind that has any. It leaves out a device that cannot be opened, but fails
// if a device lacks the memory that was asked for. passed says why earlier kinds were passed over.
func openFound(memory int64, log *slog.Logger) (devices []gpubackend.Device, passed, err error) {
	for _, b := range gpuBackends {
		var ordinals []int
		ordinals, err = b.found(log)
		for _, o := range ordinals {
			var opened []gpubackend.Device
			opened, err = b.open([]numbered{{max(o, 0), o}}, memory)
			if memory != 0 && errors.Is(err, gpubackend.ErrNoMemory) {
				return nil, nil, errors.Join(err, closeDevices(devices))
			}
			if err != nil {
				log.Warn("a device is not used", "kind", b.kind.String(), "number", o, "reason", err)
			}
			devices = append(devices, opened...)
		}
		if len(devices) > 0 {
			return devices, passed, nil
		}
		log.Info("devices of a kind are not used", "kind", b.kind.String(), "reason", err)
		passed = cmp.Or(passed, err)
	}
	return nil, passed, err
}

func closeDevices(devices []gpubackend.Device) error {
	var errs []error
	for _, d := range devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}
