package mover

import "context"

// Stage has the device make the host memory that large Fills of a few files read into, which takes tens of milliseconds
// where it is to be page-locked, and keep it for the first ones. It blocks, and ends with ctx.
func (d *Device) Stage(ctx context.Context) error {
	most := 2 * (Readers()*PieceBytes + senders*callBytes)
	for n := 0; n < most && ctx.Err() == nil; n += PieceBytes {
		_, giveBack, err := d.dev.HostBuffer(PieceBytes)
		if err != nil {
			return err
		}
		defer giveBack() // not before the next one is made
	}
	return ctx.Err()
}
