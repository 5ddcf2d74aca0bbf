package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
	"github.com/gaiafs/gaiafs/pagecache"
)

// ready returns the line that is printed when the mount is usable.
func (s *service) ready() string {
	devices := s.cache.Devices()
	text := fmt.Sprintf("%s shows %s", pagecache.Printable(s.mount.Mountpoint()), pagecache.Printable(s.plan.source))
	switch {
	case len(devices) == 0:
		return text + ", without devices (--gpus none)"
	case s.noGPU != nil:
		why := strings.TrimPrefix(s.noGPU.Error(), cuda.ErrUnavailable.Error()+": ")
		text += fmt.Sprintf("; no GPU: %s; using emulated devices", why)
	case !slices.ContainsFunc(devices, isGPU):
		text += "; emulated devices, as --gpus says"
	}
	return text + ": " + describeDevices(devices)
}

func isGPU(d gpubackend.Info) bool { return d.Kind != gpubackend.KindEmulated }

// describeDevices names the first few devices and their budgets, and counts the rest.
func describeDevices(devices []gpubackend.Info) string {
	const most = 8
	var texts []string
	for _, d := range devices[:min(len(devices), most)] {
		name := d.Name
		if !isGPU(d) {
			name = "host memory"
		}
		texts = append(texts, fmt.Sprintf("gpu%d (%s, %s)", d.Ordinal, name, bytesText(d.Memory)))
	}
	if left := len(devices) - most; left > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", left))
	}
	return strings.Join(texts, ", ")
}
