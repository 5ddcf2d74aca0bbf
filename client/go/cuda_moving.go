package gaiafs

import "syscall"

// movingCUDA is memory of a GPU that moves: addresses, into which MOVEs map extents. The driver maps a handle only
// whole, and extents may begin and end around the mapping's ends, so there are addresses for extents of up to
// largestExtent.
type movingCUDA struct {
	cudaMemory
	length int64
	parts  []cudaPart // what is mapped now; of no order
}

// cudaPart is so many bytes from at on in the range.
type cudaPart struct{ at, size uintptr }

const largestExtent = 1 << 30

func (c *movingCUDA) place(extentPlace, int) error {
	return failed(syscall.EPROTO, "an extent came for a mapping that moves, outside of a bracket")
}

func (c *movingCUDA) finish() error {
	c.first = c.off &^ (largestExtent - 1)
	c.size = uintptr((c.off+c.length+largestExtent-1)&^(largestExtent-1) - c.first)
	drv := c.gpu.drv
	return c.gpu.use(func() *Error {
		if drv.alloc(&c.block, 1) != 0 {
			c.block = 0
		}
		err := drv.check("cuMemAddressReserve", drv.addressReserve(&c.start, c.size, cudaGranularity, 0, 0))
		if err != nil {
			c.start = 0
		}
		return err
	})
}

// move unmaps what is in the place of an extent, and maps other memory there. No bracket uses it, so no kernel does;
// the driver does not wait for those that run.
func (c *movingCUDA) move(p extentPlace, fd int) error {
	if p.off < c.first || p.off-c.first > int64(c.size) || p.size > int64(c.size)-(p.off-c.first) ||
		p.size%cudaGranularity != 0 {
		return failed(syscall.ERANGE, "an extent is outside of the addresses of its mapping")
	}
	at, size := uintptr(p.off-c.first), uintptr(p.size)
	return c.gpu.use(func() *Error {
		if err := c.unmap(at, size); err != nil || fd < 0 {
			return err
		}
		drv := c.gpu.drv
		var h cudaHandle
		if err := drv.check("cuMemImportFromShareableHandle", drv.memImport(&h, uintptr(fd),
			cudaPOSIXHandle)); err != nil {
			return err
		}
		where := c.start + cudaAddress(at)
		err := drv.check("cuMemMap", drv.memMap(where, size, 0, h, 0))
		_ = drv.memRelease(h) // the mapping keeps the memory
		if err != nil {
			return err
		}
		access := cudaAccess{cudaOnDevice, int32(c.gpu.device), cudaRead}
		if c.prot&ProtWrite != 0 {
			access.flags = cudaReadWrite
		}
		if err := drv.check("cuMemSetAccess", drv.memSetAccess(where, size, &access, 1)); err != nil {
			_ = drv.memUnmap(where, size)
			return err
		}
		c.parts = append(c.parts, cudaPart{at, size})
		return nil
	})
}

// unmap takes away what is mapped in a part of the range. The GPU's context is current.
func (c *movingCUDA) unmap(at, size uintptr) *Error {
	for i := 0; i < len(c.parts); {
		p := c.parts[i]
		if p.at+p.size <= at || at+size <= p.at {
			i++
			continue
		}
		if err := c.gpu.drv.check("cuMemUnmap", c.gpu.drv.memUnmap(c.start+cudaAddress(p.at), p.size)); err != nil {
			return err
		}
		c.parts[i] = c.parts[len(c.parts)-1]
		c.parts = c.parts[:len(c.parts)-1]
	}
	return nil
}

// drop undoes what was done, after the work that was begun: freeing the block waits for it, as in cudaMemory.
func (c *movingCUDA) drop() error {
	drv := c.gpu.drv
	var first error
	if c.block != 0 || len(c.parts) > 0 {
		first = c.gpu.use(func() *Error {
			if c.block == 0 && drv.alloc(&c.block, 1) != 0 {
				return drv.check("cuCtxSynchronize", drv.contextSync())
			}
			block := c.block
			c.block = 0
			return drv.check("cuMemFree", drv.free(block))
		})
	}
	if err := c.gpu.use(func() *Error { return c.unmap(0, c.size) }); first == nil {
		first = err
	}
	if len(c.parts) > 0 {
		return first // addresses that have memory cannot be given back
	}
	if err := c.cudaMemory.drop(); first == nil {
		first = err
	}
	return first
}
