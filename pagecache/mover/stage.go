package mover

import "context"

// Stage makes the device allocate the host memory that so many large Fills read into, and keep it for the first Fills.
// Page-locked memory takes about a millisecond for 2 MiB. It blocks, and ends with ctx.
func (d *Device) Stage(ctx context.Context, fills int) error {
	most := fills * (goroutinesOf(fills)*PieceBytes + senders*callBytes)
	for n := 0; n < most && ctx.Err() == nil; n += PieceBytes {
		_, giveBack, err := d.dev.HostBuffer(PieceBytes)
		if err != nil {
			return err
		}
		defer giveBack() // after the loop, so that each buffer is a new one
	}
	return ctx.Err()
}
