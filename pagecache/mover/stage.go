package mover

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Stage makes the device allocate the host memory that so many large Fills at once read into, each with so many relays,
// and keep it for the first Fills. Page-locking 2 MiB takes about a millisecond. Stage blocks, and ends with ctx.
func (d *Device) Stage(ctx context.Context, fills, relays int) error {
	most := fills * buffered(goroutinesWith(goroutinesOf(fills), relays), relays)
	for n := 0; n < most && ctx.Err() == nil; n += PieceBytes {
		_, giveBack, err := d.dev.HostBuffer(PieceBytes)
		if err != nil {
			return err
		}
		defer giveBack() // after the loop, so that each buffer is a new one
	}
	return ctx.Err()
}

// OpenPath fills mem with arbitrary bytes from another device's memory, so that the driver has opened the path before
// somebody waits for a copy. The copy takes no turn and is not counted.
func (d *Device) OpenPath(ctx context.Context, mem, from gpubackend.Memory) error {
	return d.dev.CopyPeer(ctx, []gpubackend.PeerCopy{{Mem: mem, From: from, N: mem.Size()}})
}
