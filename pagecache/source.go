package pagecache

// Source is an open file on the mount that a client proved its right to. Package fs implements it.
type Source interface {
	ID() FileID
	// Name is the path below the mountpoint at the time of the call, for people.
	Name() string
	// Readable and Writable tell the access mode of the client's descriptor.
	Readable() bool
	Writable() bool
	// Open reports whether the client's descriptor, or a duplicate of it, is still open.
	Open() bool
	// OpenHome opens the backing file. It fails with EACCES or EROFS where writing is not possible.
	OpenHome(writable bool) (Home, error)
	// Kernel returns the kernel's pages of the file.
	Kernel() KernelPages
	// Attach makes f the File that every request for this inode consults. When it returns, no request that did
	// not consult f is still changing home. It is called without any lock of this package.
	Attach(f *File)
}
