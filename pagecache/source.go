package pagecache

// Source is an open file on the mount. The client has proved its right to it. Package fs implements Source.
type Source interface {
	ID() FileID
	// Name is the path below the mountpoint at the time of the call, for messages.
	Name() string
	// Readable and Writable report the access mode of the client's descriptor.
	Readable() bool
	Writable() bool
	// Open reports whether the client's descriptor, or a duplicate of it, is still open.
	Open() bool
	// OpenHome opens the backing file. EACCES or EROFS if writing is not possible.
	OpenHome(writable bool) (Home, error)
	// Kernel returns the kernel's pages of the file.
	Kernel() KernelPages
	// Attach makes every request for this inode consult f. When it returns, no request that did not consult f is still
	// changing home. It is called without any lock of this package.
	Attach(f *File)
}
