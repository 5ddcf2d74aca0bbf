package gaiafs

import (
	"io"
	"syscall"
)

var (
	_ io.ReaderAt = (*Mapping)(nil)
	_ io.WriterAt = (*Mapping)(nil)
)

// ReadAt copies the mapping's bytes from off on out of the device's memory, whatever its kind. Past Len there is
// nothing: then n is less than len(p) and the error io.EOF. On a GPU the driver copies, after what the process has
// queued in the default stream of the GPU's primary context; kernels of other streams and contexts are waited for by
// who launched them. Errors: EINVAL (off), EBADF after Close, and EIO with the driver's words.
//
// ReadAt is no Acquire: the bytes are those that the device has.
func (m *Mapping) ReadAt(p []byte, off int64) (n int, err error) {
	n, err = m.copyAt(p, off, memory.read)
	if err == io.EOF {
		return n, io.EOF // plain, as an io.ReaderAt has to say it
	}
	return n, during("read", err)
}

// WriteAt stores p into the device's memory from off on, as ReadAt reads it. It returns when the bytes are there, for
// others to see after Release. A p that goes past Len is stored up to it, and the error is ENOSPC. Other errors: EACCES
// for a mapping without ProtWrite, and those of ReadAt.
func (m *Mapping) WriteAt(p []byte, off int64) (n int, err error) {
	if m.prot&ProtWrite == 0 {
		return 0, during("write", failed(syscall.EACCES, "the mapping is only read"))
	}
	n, err = m.copyAt(p, off, memory.write)
	if err == io.EOF {
		err = failed(syscall.ENOSPC, "the mapping has %d bytes", m.length)
	}
	return n, during("write", err)
}

// copyAt does a copy of what of p lies in the mapping. io.EOF where that is not all.
func (m *Mapping) copyAt(p []byte, off int64, do func(mem memory, p []byte, off int64) error) (int, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case m.conn == nil:
		return 0, failed(syscall.EBADF, "the mapping is closed")
	case off < 0:
		return 0, failed(syscall.EINVAL, "the offset %d is negative", off)
	}
	n := int(min(int64(len(p)), max(m.length-off, 0)))
	if n > 0 {
		copied := func(p []byte, off int64) error { return do(m.assembly.memory, p, off) }
		if err := m.within(p[:n], off, copied); err != nil {
			return 0, err
		}
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
