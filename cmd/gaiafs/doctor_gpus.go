package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// measuredMemory is how much memory of each GPU doctor uses.
const measuredMemory = 64 << 20

// checkGPUs checks the driver, each GPU, and the links to and between them.
func checkGPUs() []check {
	found, err := probeCUDA()
	if err != nil {
		return []check{{"driver", checkWarn, err.Error() + "; emulated devices stand in",
			"install NVIDIA's driver for CUDA 11.0 or later, and see what nvidia-smi says"}}
	}
	all := []check{{"driver", checkOK, count(len(found), "GPU") + " found", ""}}
	var devices []gpubackend.Device
	defer func() { _ = closeDevices(devices) }()
	for _, f := range found {
		name := fmt.Sprintf("gpu%d", f.CUDA)
		text := fmt.Sprintf("%s, compute capability %d.%d, %s", f.Name, f.Major, f.Minor, bytesText(f.Memory))
		if f.Unusable != nil {
			all = append(all, check{name, checkWarn, text + ": " + f.Unusable.Error(),
				"leave it out with --gpus cuda:N"})
			continue
		}
		opened, err := openCUDA([]numbered{{f.CUDA, f.CUDA}}, measuredMemory)
		if err != nil {
			all = append(all, check{name, checkFail, text + ": " + err.Error(), "see what nvidia-smi says about it"})
			continue
		}
		devices = append(devices, opened...)
		all = append(all, check{name, checkOK, text, ""})
	}
	return append(all, checkLinks(devices)...)
}

// checkLinks measures copies between the host and devices, and between devices. It uses a quarter of measuredMemory on
// each.
func checkLinks(devices []gpubackend.Device) (all []check) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	memories := make([]gpubackend.Memory, len(devices))
	for i, d := range devices {
		name := fmt.Sprintf("gpu%d", d.Info().Ordinal)
		mem, err := d.Alloc(measuredMemory / 4)
		if err != nil {
			all = append(all, check{name, checkFail, "no memory: " + err.Error(), "end programs that use the GPU"})
			continue
		}
		defer func() { _ = mem.Free() }()
		memories[i] = mem
		in, out, err := hostLink(ctx, d, mem)
		if err != nil {
			all = append(all, check{name, checkFail, "copies fail: " + err.Error(),
				"see the kernel's log for Xid errors"})
			continue
		}
		all = append(all, check{name, checkOK, fmt.Sprintf("from the host %s/s, to the host %s/s", bytesText(in),
			bytesText(out)), ""})
	}
	for i, to := range devices {
		for j, from := range devices {
			if i == j || memories[i] == nil || memories[j] == nil {
				continue
			}
			all = append(all, peerLink(ctx, to, memories[i], from, memories[j]))
		}
	}
	return all
}

// hostLink returns the speeds of copies to and from a device in bytes per second.
func hostLink(ctx context.Context, d gpubackend.Device, mem gpubackend.Memory) (in, out int64, err error) {
	buf, release, err := d.HostBuffer(int(mem.Size()))
	if err != nil {
		return 0, 0, err
	}
	defer release()
	pieces := []gpubackend.Copy{{Mem: mem, Host: buf}}
	if in, err = timed(mem.Size(), func() error { return d.CopyIn(ctx, pieces) }); err != nil {
		return 0, 0, err
	}
	out, err = timed(mem.Size(), func() error { return d.CopyOut(ctx, pieces) })
	return in, out, err
}

func peerLink(ctx context.Context, to gpubackend.Device, mem gpubackend.Memory, from gpubackend.Device,
	source gpubackend.Memory) check {
	name := fmt.Sprintf("gpu%d→%d", from.Info().Ordinal, to.Info().Ordinal)
	rate, err := timed(mem.Size(), func() error {
		return to.CopyPeer(ctx, []gpubackend.PeerCopy{{Mem: mem, From: source, N: mem.Size()}})
	})
	switch {
	case errors.Is(err, gpubackend.ErrNoPeer):
		return check{name, checkWarn, "no direct path: copies between these GPUs go through the host",
			"a direct path needs NVLink or a common PCIe switch, and no IOMMU in between: see 'nvidia-smi topo -p2p r'"}
	case err != nil:
		return check{name, checkFail, "copies fail: " + err.Error(), "see the kernel's log for Xid errors"}
	}
	return check{name, checkOK, bytesText(rate) + "/s", ""}
}

// timed returns the best rate of a few copies in bytes per second. The first copies include set-up.
func timed(bytes int64, do func() error) (rate int64, err error) {
	const times = 4
	for range times {
		began := time.Now()
		if err := do(); err != nil {
			return 0, err
		}
		rate = max(rate, int64(float64(bytes)/max(time.Since(began).Seconds(), 1e-9)))
	}
	return rate, nil
}
