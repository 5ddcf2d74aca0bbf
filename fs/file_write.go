package fs

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// Write implements fuse.RawFileSystem. There are three kinds of requests: bytes that a program just wrote, bytes that
// it appends, and dirty pages of the kernel (WRITE_CACHE), from mappings or from the kernel's write-back cache. Dirty
// pages always go to their place.
func (fs *fileSystem) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	used, errno := fs.useFileToWrite(&in.InHeader, in.Fh)
	if errno != 0 {
		return 0, fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	of.usedByCPU()
	if of.appendOnly && (in.WriteFlags&fuse.WRITE_CACHE != 0 || used.kept != nil && in.Flags&unix.O_APPEND == 0) {
		return 0, fuse.EPERM
	}
	if in.WriteFlags&fuse.WRITE_KILL_SUIDGID != 0 {
		if errno := fs.killSetID(of.node, of.fd, &in.Caller); errno != 0 {
			return 0, fuse.Status(errno)
		}
	}
	w := homeWrite{
		of:        of,
		off:       int64(in.Offset),
		data:      data,
		thread:    in.Pid,
		writeBack: in.WriteFlags&fuse.WRITE_CACHE != 0,
		uid:       in.Caller.Uid,
	}
	if w.writeBack {
		w.uid = fs.storer(of) // the request names no caller
	}
	// With write-back caching, the kernel has placed the bytes, even if it sends them one by one.
	w.appends = in.Flags&unix.O_APPEND != 0 && !w.writeBack && !fs.writeBack
	if of.direct {
		w.flags = syncFlags(in.Flags)
	}
	// As for READ (passesPages): if the kernel cannot drop a page before a write with O_DIRECT, it writes to the page.
	w.direct = in.WriteFlags&fuse.WRITE_LOCKOWNER != 0
	var ctx context.Context = context.Background() // a write-back must finish: its bytes are sent only once
	if !w.writeBack {
		request := newRequest(cancel, &in.Caller)
		defer request.end()
		ctx = request
	}
	err := w.run(ctx, fs.withoutCure)
	fs.correct(of.node, w.again, w.by)
	if err != nil && w.writeBack {
		// The kernel ignores how much was written, and does not send these pages again. Only the first failure is
		// logged: there may be a request for each page.
		if !of.content.complained.Swap(true) {
			fs.log.Warn("pages that programs wrote could not be written to SOURCE: fsync and close report this once",
				"node", of.node.path(), "offset", in.Offset, "error", err)
		}
		return 0, toStatus(err)
	}
	if err != nil && w.written == 0 {
		return 0, toStatus(err)
	}
	if w.direct && of.content.filled.Load() {
		fs.dropBeside(of.node, w.off, int64(w.written))
	}
	if w.appends && w.off != int64(in.Offset) {
		// The file was made longer directly in SOURCE. The kernel's page has these bytes at the end that the kernel
		// knew.
		from := min(w.off, int64(in.Offset))
		fs.await(fs.apart(func() { _ = fs.invalidate(of.node, from, -1) }), func() bool { return true })
	}
	return uint32(w.written + w.past), fuse.OK
}

// syncFlags returns the flags of pwritev2 that make one write durable. It is for opens without kernel pages: after
// writes through these the kernel sends no FSYNC.
func syncFlags(flags uint32) int {
	switch {
	case flags&unix.O_SYNC == unix.O_SYNC:
		return unix.RWF_SYNC
	case flags&unix.O_DSYNC != 0:
		return unix.RWF_DSYNC
	}
	return 0
}

// dropBeside makes the kernel drop the pages of n bytes at off that it read during a direct write. The kernel itself
// drops such pages before the write, and after a synchronous one, but not after a write in the background (io_submit,
// io_uring): then a page read during the write would stay old. Call it without any lock, before the write is answered.
func (fs *fileSystem) dropBeside(node *node, off, n int64) {
	fs.aside(func() {
		if err := fs.invalidate(node, off, n); err != nil {
			fs.log.Warn("pages that were read during a direct write could not be dropped", "node", node.path(), "error",
				err)
		}
	})
}

// homeWrite writes bytes home.
type homeWrite struct {
	of        *openFile
	off       int64 // offset of the bytes; once they are written, where they went
	data      []byte
	thread    uint32 // the writer's
	writeBack bool
	appends   bool
	direct    bool  // does not go through the kernel's pages
	known     int64 // pagecache.Change.Known
	flags     int
	uid       uint32 // the user whose right to space counts

	written int
	// past is how many bytes leaveOutPast left out.
	past int
	// again is the ranges that the kernel must drop once more, by the threads that may be reading them.
	again []page.Bytes
	by    readers
}

// run carries out the write under the rules.
func (w *homeWrite) run(ctx context.Context, withoutCure bool) (err error) {
	c, n := w.of.content, w.of.node
	end := page.Span(w.off, int64(len(w.data))).End
	size := c.witness.begin(w.of.fd)
	told := n.told.Load()
	if !w.inside() {
		told = n.expectSize(end)
	}
	defer func() {
		reached := int64(0)
		if w.written > 0 {
			reached = w.off + int64(w.written)
		} else if err != nil {
			n.unexpectSize(end, told)
		}
		c.witness.end(w.of.fd, reached)
	}()
	if !w.writeBack {
		w.known = w.of.fs.knownSize(n, size, end)
	}
	zeros := w.of.fs.surpassed(n, told, size)
	c.gate.RLock()
	if zeros.Empty() && (!c.hazard.lasts() || withoutCure) {
		defer c.gate.RUnlock()
		if err := w.leaveOutPast(); err != nil || len(w.data) == 0 {
			return err
		}
		return w.change(ctx, nil)
	}
	c.gate.RUnlock()

	c.gate.Lock()
	defer c.gate.Unlock()
	if err := w.leaveOutPast(); err != nil || len(w.data) == 0 {
		return err
	}
	h := &c.hazard
	if w.writeBack {
		return w.change(ctx, func(off int64) (err error) {
			w.data, err = h.mergeSuspects(w.data, off, w.of.fd)
			return err
		})
	}
	again, by := h.overlap(w.off, int64(len(w.data)), w.thread)
	if !zeros.Empty() {
		again = append(again, zeros)
	}
	err = w.change(ctx, func(int64) error {
		h.suspectPages(again, w.of.fd, told)
		w.again, w.by = again, by
		return nil
	})
	if !w.direct {
		h.written()
	}
	return err
}

// inside reports whether w writes back mapped pages without write-back caching. They lie inside the file, because the
// kernel then makes a file longer only by requests.
func (w *homeWrite) inside() bool { return w.writeBack && !w.of.fs.writeBack }

// leaveOutPast removes from w what lies past the end of the file, if w writes back mapped pages. The kernel may have
// sent the pages before an open with O_TRUNC, which does not wait for such writes to be answered. They would bring back
// what was cut off. The caller holds the gate.
func (w *homeWrite) leaveOutPast() error {
	if !w.inside() {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(w.of.fd, &st); err != nil {
		return err
	}
	n := int(min(max(st.Size-w.off, 0), int64(len(w.data))))
	w.data, w.past = w.data[:n], len(w.data)-n
	return nil
}

// change changes home under the rules of the page cache. If prepare is not nil, it is called with the offset right
// before. The caller holds the gate.
func (w *homeWrite) change(ctx context.Context, prepare func(off int64) error) error {
	c := w.of.content
	change := pagecache.Change{Kind: pagecache.ChangeWrite, Off: w.off, Len: int64(len(w.data)),
		WriteBack: w.writeBack, Direct: w.direct, Bytes: &w.data, Known: w.known}
	if w.appends {
		change.Kind = pagecache.ChangeAppend
	}
	return c.changeHome(ctx, w.of.fs, w.of.fd, change, func(off, _ int64) error {
		if prepare != nil {
			if err := prepare(off); err != nil {
				return err
			}
		}
		if w.appends && c.live() == nil {
			return w.appendHome()
		}
		w.off = off
		return w.place(off)
	})
}

// place writes the bytes at off.
func (w *homeWrite) place(off int64) error {
	for w.written < len(w.data) {
		n, err := w.pwrite(off+int64(w.written), w.flags)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return err
		case n == 0:
			return syscall.EIO
		default:
			w.written += n
		}
	}
	return nil
}

// appendHome writes at the current end of the file, and finds out where that was.
func (w *homeWrite) appendHome() error {
	for w.written < len(w.data) {
		n, err := w.pwrite(0, w.flags|unix.RWF_APPEND)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EOPNOTSUPP && w.written == 0:
			return w.appendAtEnd()
		case err != nil:
			return err
		default:
			w.written += n
		}
	}
	// The kernel holds the inode's lock, so nothing else was appended through the mount in between.
	var st unix.Stat_t
	if err := unix.Fstat(w.of.fd, &st); err == nil && st.Size-int64(w.written) != w.off {
		w.off = max(0, st.Size-int64(w.written))
	}
	return nil
}

// appendAtEnd is for backing filesystems without RWF_APPEND. Only a write made directly in SOURCE could come in
// between.
func (w *homeWrite) appendAtEnd() error {
	var st unix.Stat_t
	if err := unix.Fstat(w.of.fd, &st); err != nil {
		return err
	}
	w.off = st.Size
	return w.place(st.Size)
}

// pwrite writes the bytes that are left.
func (w *homeWrite) pwrite(off int64, flags int) (n int, err error) {
	err = w.of.fs.spend(w.uid, func() (err error) {
		n, err = pwrite(w.of.fd, w.data[w.written:], off, flags)
		return err
	})
	return n, err
}

func pwrite(fd int, p []byte, off int64, flags int) (int, error) {
	if flags == 0 {
		return unix.Pwrite(fd, p, off)
	}
	return unix.Pwritev2(fd, [][]byte{p}, off, flags)
}
