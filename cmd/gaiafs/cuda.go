package main

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
)

// Access to the GPUs. Tests replace these.
var (
	probeCUDA = cuda.Probe
	openGPU   = cuda.Open
)

// cudaBackend opens NVIDIA GPUs as devices.
var cudaBackend = gpuBackend{
	kind: gpubackend.KindCUDA, example: "cuda:0,1", parse: parseOrdinals, found: foundCUDA, open: openCUDA,
}

// foundCUDA returns the CUDA ordinals of the usable GPUs in this process. If there are none, it returns the reason.
func foundCUDA(log *slog.Logger) (ordinals []int, err error) {
	all, err := probeCUDA()
	for _, f := range all {
		if f.Unusable == nil {
			ordinals = append(ordinals, f.CUDA)
			continue
		}
		log.Warn("a GPU is not used", "number", f.CUDA, "name", f.Name, "reason", f.Unusable)
		err = f.Unusable
	}
	if len(ordinals) > 0 {
		return ordinals, nil
	}
	return nil, err
}

// openCUDA opens GPUs as devices. Clients identify a device by its UUID; the ordinal is CUDA's in this process.
func openCUDA(wanted []numbered, memory int64) (devices []gpubackend.Device, err error) {
	all, err := probeCUDA()
	if err != nil {
		return nil, err
	}
	for _, w := range wanted {
		o := w.ordinal
		i := slices.IndexFunc(all, func(f cuda.Found) bool { return f.CUDA == o })
		if i < 0 {
			err = fmt.Errorf("there is no CUDA device %d: this machine has %s", o, describeGPUs(all))
		} else if err = all[i].Unusable; err == nil {
			var d gpubackend.Device
			if d, err = openGPU(cuda.Options{Ordinal: w.number, CUDA: o, Memory: memory}); err == nil {
				devices = append(devices, d)
				continue
			}
			if memory != 0 && errors.Is(err, gpubackend.ErrNoMemory) {
				err = fmt.Errorf("%w: change --gpu-memory, or leave it out to use three quarters of the free memory",
					err)
			}
		}
		return nil, errors.Join(err, closeDevices(devices))
	}
	return devices, nil
}

// describeGPUs lists GPUs by ordinal.
func describeGPUs(all []cuda.Found) string {
	words := make([]string, len(all))
	for i, f := range all {
		words[i] = fmt.Sprintf("%d (%s)", f.CUDA, f.Name)
		if f.Unusable != nil {
			words[i] = fmt.Sprintf("%d (%s, not usable: %v)", f.CUDA, f.Name, f.Unusable)
		}
	}
	return strings.Join(words, ", ")
}

// cudaSummary describes the GPUs of this machine in one line, or says why none can be used.
func cudaSummary() string {
	all, err := probeCUDA()
	if err != nil {
		return err.Error()
	}
	return describeGPUs(all)
}
