package gaiafs

import "syscall"

// movingCUDA is memory of a GPU that moves: an address range into which MOVEs map extents. The driver can map only a
// whole handle, and extents may reach past both ends of the mapping. So the range has room for extents of up to
// largestExtent at both ends.
type movingCUDA struct {
	cudaMemory
	length int64
	parts  []cudaPart // what is mapped now, in no order
}

// cudaPart is size bytes at offset at of the range.
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

// move unmaps whatever overlaps the extent's place, and maps the new memory there. The driver does not wait for running
// kernels, and need not: no bracket uses the extent, so no kernel does.
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

// unmap unmaps everything that overlaps a part of the range. The GPU's context is current.
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

// drop waits for the work that was started, as cudaMemory.drop does, by freeing the block. Then it undoes finish and
// move.
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
		return first // addresses that still have memory cannot be freed
	}
	if err := c.cudaMemory.drop(); first == nil {
		first = err
	}
	return first
}
