package kernel

// Pages is the kernel's page cache of a file's inode.
type Pages interface {
	// Invalidate writes the dirty pages of the n bytes at off home and drops every page of the range, and the inode's
	// cached attributes. The dirty pages arrive as ordinary write requests before it returns. A negative n means to the
	// end of file. It blocks, and must be called without any lock that a FUSE request handler takes.
	Invalidate(off, n int64) error
	// Push gives the kernel p, whole pages of home at off, and reports whether it took them. It does nothing if a
	// program may change home through the mount, if the kernel thinks that the file is shorter, or if current returns
	// false. Invalidate waits for a Push that called current before. Push blocks as Invalidate does.
	Push(off int64, p []byte, current func() bool) bool
}

// TimedPages are the Pages of a kernel that keeps times of its own.
type TimedPages interface {
	Pages
	// Modified tells the kernel that the file was modified just now. It blocks as Invalidate does.
	Modified()
}

// GrowingPages are the Pages of a kernel that may know a file to be longer than home.
type GrowingPages interface {
	Pages
	// SendFrom makes the kernel send what it has of the file from off on. It blocks like Invalidate.
	SendFrom(off int64) error
}

// Modified tells the kernel that the file was modified just now, if it keeps times. The caller holds no lock.
func Modified(p Pages) {
	if timed, ok := p.(TimedPages); ok {
		timed.Modified()
	}
}
