package mover

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Stage makes the device allocate the host memory that so many large Fills read into, each with so many Relays, and
// keep it for the first Fills. Page-locked memory takes about a millisecond for 2 MiB. It blocks, and ends with ctx.
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

// OpenPath copies arbitrary bytes from memory of another device, as much as mem has, so that the first copy that
// somebody waits for finds the path open. The copy takes no turn and is not counted.
func (d *Device) OpenPath(ctx context.Context, mem, from gpubackend.Memory) error {
	return d.dev.CopyPeer(ctx, []gpubackend.PeerCopy{{Mem: mem, From: from, N: mem.Size()}})
}
