package residency

import (
	"context"
	"syscall"

	humanize "github.com/dustin/go-humanize"
)

// Pages of files in the host's page cache can be locked there, so that devices copy from them. They count as pinned
// memory, and nothing evicts them. Memory leaves if its file is no longer pinned, or if the owner of a FileMemory says
// so. It is in use until it is given back. But it is in nobody's way: what is asked for next waits for it.

// LockedFile is a file whose pages are locked.
type LockedFile interface {
	// PinnedOnHost reports whether the file's pages shall stay locked, and on whose account. It takes no lock, because
	// it is called with Pinned.mu held.
	PinnedOnHost() (by Tenant, pinned bool)
}

// FileMemory is pinned memory for locked pages of a file.
type FileMemory struct {
	p     *Pinned
	file  LockedFile
	bytes int64
	has   bool // bytes are part of Pinned.used; protected by p.mu
	left  bool // Leave was called; protected by p.mu
}

// staysLocked reports whether the memory does not leave, and on whose account. p.mu is held.
func (m *FileMemory) staysLocked() (by Tenant, stays bool) {
	by, pinned := m.file.PinnedOnHost()
	return by, pinned && !m.left
}

// SetShare changes the part of the pool that the locked pages of one limited user's files may take.
func (p *Pinned) SetShare(share float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.share = share
}

// CheckFile returns an error if n bytes of a user's file cannot be locked instead of what the file has: ENOSPC for more
// than the pool has for files, EDQUOT for more than the user's share.
func (p *Pinned) CheckFile(file LockedFile, by Tenant, n int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkFileLocked(file, by, n)
}

func (p *Pinned) checkFileLocked(file LockedFile, by Tenant, n int64) error {
	var others, own int64 // what stays of other files, and of other files of the user
	for m := range p.files {
		owner, stays := m.staysLocked()
		switch {
		case !stays:
		case m.file != file:
			others += m.bytes
			if owner.User == by.User {
				own += m.bytes
			}
		case owner.User == by.User && m.bytes >= n:
			return nil // it counts already
		}
	}
	switch left, share := max(p.limit-others, 0), int64(p.share*float64(p.limit)); {
	case n > left:
		return refuse(syscall.ENOSPC, "%s cannot be pinned on the host: of its %s of pinned memory, pinned files leave %s; unpin "+
			"something, or raise pinned-memory with 'gaiafs set'", humanize.IBytes(uint64(n)),
			humanize.IBytes(uint64(p.limit)), humanize.IBytes(uint64(left)))
	case by.Limited && own+n > share:
		return refuse(syscall.EDQUOT, "%s are more than user %d may pin on the host in addition to %s that are pinned already: no user may "+
			"have more than %s, except root and the one who mounted; unpin something, or raise user-share with 'gaiafs set'",
			humanize.IBytes(uint64(n)), by.User, humanize.IBytes(uint64(own)), humanize.IBytes(uint64(share)))
	}
	return nil
}

// CheckRoom returns an error if LockFile would fail now. It frees nothing, and does not block.
func (p *Pinned) CheckRoom(file LockedFile, n int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkRoomLocked(file, n)
}

func (p *Pinned) checkRoomLocked(file LockedFile, n int64) error {
	by, _ := file.PinnedOnHost()
	if err := p.checkFileLocked(file, by, n); err != nil || len(p.working) > 0 { // what becomes of spares is open
		return err
	}
	extents := p.used - p.filesLocked()
	for _, s := range p.spares {
		extents -= s.mem.Size()
	}
	files := p.stayingLocked()
	if n+files+extents <= p.limit {
		return nil
	}
	return refuse(syscall.ENOSPC, "%s cannot be pinned on the host now: of its %s of pinned memory, pinned files have %s, and extents "+
		"that did not fit on devices have %s; end programs that use these, evict with 'gaiafs evict' what no program maps, or raise "+
		"pinned-memory with 'gaiafs set'", humanize.IBytes(uint64(n)), humanize.IBytes(uint64(p.limit)),
		humanize.IBytes(uint64(files)), humanize.IBytes(uint64(extents)))
}

// LockFile returns memory for n bytes of a file that are about to be locked. If it needs that of spares, it frees them,
// which may block on a device. It waits for memory that leaves. It fails as CheckFile does, or with ENOSPC if extents
// use the memory.
func (p *Pinned) LockFile(ctx context.Context, file LockedFile, n int64) (*FileMemory, error) {
	for {
		m := &FileMemory{p: p, file: file, bytes: n}
		p.mu.Lock()
		err := p.checkRoomLocked(file, n)
		if err == nil {
			p.files[m] = struct{}{}
		}
		p.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if err = p.roomOnceLeft(ctx, n, m); err == nil {
			return m, nil
		}
		m.Free()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		} // otherwise extents took the memory meanwhile
	}
}

// Leave says that Free will be called as soon as nobody reads the pages.
func (m *FileMemory) Leave() {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	m.left = true
}

// Free gives the memory back. The pages are not locked any more.
func (m *FileMemory) Free() {
	m.p.mu.Lock()
	delete(m.p.files, m)
	if m.has {
		m.p.used -= m.bytes
	}
	m.p.mu.Unlock()
	m.p.notify()
}

// Files returns the bytes that locked files have.
func (p *Pinned) Files() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.filesLocked()
}

func (p *Pinned) filesLocked() (bytes int64) {
	for m := range p.files {
		if m.has {
			bytes += m.bytes
		}
	}
	return bytes
}

// stayingLocked returns the bytes that files have, or will have once others have left. p.mu is held.
func (p *Pinned) stayingLocked() (bytes int64) {
	for m := range p.files {
		if _, stays := m.staysLocked(); stays {
			bytes += m.bytes
		}
	}
	return bytes
}

// leaving returns how much leaves, and a channel that is closed when some has left.
func (p *Pinned) leaving() (bytes int64, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leavingLocked(), p.watchLocked()
}

func (p *Pinned) leavingLocked() (bytes int64) {
	for m := range p.files {
		if _, stays := m.staysLocked(); m.has && !stays {
			bytes += m.bytes
		}
	}
	return bytes
}

// WaitLeft waits until no more is in use than the limit, or until nothing leaves any more.
func (p *Pinned) WaitLeft(ctx context.Context) error {
	_ = p.roomOnceLeft(ctx, 0, nil) // fails if others exceed the limit
	return ctx.Err()
}

// roomOnceLeft is room, but also waits for what leaves.
func (p *Pinned) roomOnceLeft(ctx context.Context, size int64, m *FileMemory) error {
	for {
		leaving, changed := p.leaving()
		err := p.room(size, m)
		if err == nil || leaving == 0 {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// forExtents returns how many bytes extents may have: what locked pages of files leave.
func (p *Pinned) forExtents() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forExtentsLocked()
}

// forExtentsLocked is forExtents with mu held. After SetLimit, files may have more than the limit, until they are
// unlocked.
func (p *Pinned) forExtentsLocked() int64 { return max(p.limit-p.stayingLocked(), 0) }
