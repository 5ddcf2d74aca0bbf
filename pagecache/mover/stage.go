package mover

import "context"

// Stage makes the device allocate the host memory that large Fills of a few files read into, and keep it for the first
// Fills. That takes tens of milliseconds if the memory is page-locked. It blocks, and ends with ctx.
func (d *Device) Stage(ctx context.Context) error {
	most := 2 * (Readers()*PieceBytes + senders*callBytes)
	for n := 0; n < most && ctx.Err() == nil; n += PieceBytes {
		_, giveBack, err := d.dev.HostBuffer(PieceBytes)
		if err != nil {
			return err
		}
		defer giveBack() // after the loop, so that each buffer is a new one
	}
	return ctx.Err()
}
