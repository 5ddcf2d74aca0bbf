package gaiafs

import (
	"io"
	"syscall"
)

var (
	_ io.ReaderAt = (*Mapping)(nil)
	_ io.WriterAt = (*Mapping)(nil)
)

// ReadAt copies bytes of the mapping, from off on, out of the device's memory, whatever its kind. If fewer than len(p)
// bytes lie before Len, n is less than len(p) and the error is io.EOF. On a GPU the driver copies, after the work that
// this process has queued in the default stream of the GPU's primary context. The caller must wait for kernels of other
// streams and contexts. Errors: EINVAL (off), EBADF after Close, and EIO with the driver's text.
//
// ReadAt does not acquire: it reads what the device has.
func (m *Mapping) ReadAt(p []byte, off int64) (n int, err error) {
	n, err = m.copyAt(p, off, memory.read)
	if err == io.EOF {
		return n, io.EOF // unwrapped, as io.ReaderAt requires
	}
	return n, during("read", err)
}

// WriteAt stores p into the device's memory from off on. When it returns, the bytes are there; others see them after
// Release. If p goes past Len, WriteAt stores the bytes before Len and returns ENOSPC. Other errors: EACCES for a
// mapping without ProtWrite, and those of ReadAt. As with ReadAt, the caller must wait for kernels of other streams.
func (m *Mapping) WriteAt(p []byte, off int64) (n int, err error) {
	if m.prot&ProtWrite == 0 {
		return 0, during("write", failed(syscall.EACCES, "the mapping is read-only"))
	}
	n, err = m.copyAt(p, off, memory.write)
	if err == io.EOF {
		err = failed(syscall.ENOSPC, "the mapping has %d bytes", m.length)
	}
	return n, during("write", err)
}

// copyAt copies the part of p that lies within the mapping. It returns io.EOF if that is not all of p.
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
