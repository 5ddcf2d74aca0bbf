package residency

import (
	"context"
	"syscall"

	humanize "github.com/dustin/go-humanize"
)

// Pages of files in the host's page cache can be locked there, so that devices copy from them. They count as pinned
// memory, and nothing evicts them. Their memory is retired once the file is no longer pinned, or once Retire is called.
// Retired memory is used until Free, because devices may still copy from it. But nobody is charged for it, and whoever
// needs it waits for it.
//
// Hot files have memory apart from the pool, at most half of its limit. LockHot fails at once if that is full. Nobody
// is charged for it. A pin makes it part of the pool.

// LockedFile is a file whose pages are locked.
type LockedFile interface {
	// PinnedOnHost reports whether the file's pages shall stay locked, and who is charged. It takes no lock, because it
	// is called with Pinned.mu held.
	PinnedOnHost() (by Tenant, pinned bool)
}

// FileMemory is page-locked memory of a file.
type FileMemory struct {
	p       *Pinned
	file    LockedFile
	bytes   int64
	used    bool // bytes are part of Pinned.used; protected by p.mu
	retired bool // Retire was called; protected by p.mu
	hot     bool // bytes are part of Pinned.hot, and nothing else counts them; protected by p.mu
}

// charged reports who is charged for the memory, unless it is retired. p.mu is held.
func (m *FileMemory) charged() (by Tenant, is bool) {
	by, pinned := m.file.PinnedOnHost()
	return by, pinned && !m.retired
}

// SetShare changes the part of the pool that the locked pages of one limited user's files may take.
func (p *Pinned) SetShare(share float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.share = share
}

// CheckFile returns an error if n bytes of a user's file cannot be locked in place of those that the file has locked:
// ENOSPC for more than the pool has for files, EDQUOT for more than the user's share.
func (p *Pinned) CheckFile(file LockedFile, by Tenant, n int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkFileLocked(file, by, n)
}

func (p *Pinned) checkFileLocked(file LockedFile, by Tenant, n int64) error {
	var others, own int64 // what is charged for other files: to anybody, and to the user
	for m := range p.files {
		owner, charged := m.charged()
		switch {
		case !charged:
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
		return refuse(syscall.ENOSPC, "%s cannot be pinned on the host: of its %s of pinned memory, pinned files leave "+
			"%s; unpin something, or raise pinned-memory with 'gaiafs set'", humanize.IBytes(uint64(n)),
			humanize.IBytes(uint64(p.limit)), humanize.IBytes(uint64(left)))
	case by.Limited && own+n > share:
		return refuse(syscall.EDQUOT, "%s are more than user %d may pin on the host in addition to %s that are pinned "+
			"already: no user may have more than %s, except root and the one who mounted; unpin something, or raise "+
			"user-share with 'gaiafs set'",
			humanize.IBytes(uint64(n)), by.User, humanize.IBytes(uint64(own)), humanize.IBytes(uint64(share)))
	}
	return nil
}

// CheckRoom returns an error if LockFile would fail now. While spares are being made or freed, LockFile may still fail
// later. CheckRoom frees nothing, and does not block.
func (p *Pinned) CheckRoom(file LockedFile, n int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkRoomLocked(file, n)
}

func (p *Pinned) checkRoomLocked(file LockedFile, n int64) error {
	by, _ := file.PinnedOnHost()
	if err := p.checkFileLocked(file, by, n); err != nil || len(p.working) > 0 {
		return err
	}
	files, extents := p.chargedLocked(), p.used-p.filesLocked()-p.sparesLocked()
	if n+files+extents <= p.limit {
		return nil
	}
	return refuse(syscall.ENOSPC, "%s cannot be pinned on the host now: of its %s of pinned memory, pinned files have "+
		"%s, and extents that did not fit on devices have %s; end programs that use these, evict with 'gaiafs evict' "+
		"what no program maps, or raise pinned-memory with 'gaiafs set'",
		humanize.IBytes(uint64(n)), humanize.IBytes(uint64(p.limit)),
		humanize.IBytes(uint64(files)), humanize.IBytes(uint64(extents)))
}

// LockFile returns memory for n bytes of a file that are about to be locked. If need be, it frees spares, which may
// block on a device, and waits for retired memory. It fails as CheckFile does, or with ENOSPC if extents use the
// memory.
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
		if err = p.waitRoom(ctx, n, m); err == nil {
			return m, nil
		}
		m.Free()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		} // otherwise extents took the memory meanwhile
	}
}

// LockHot returns memory for n bytes of a hot file that are about to be locked. ENOSPC if hot files have too much. It
// does not block.
func (p *Pinned) LockHot(file LockedFile, n int64) (*FileMemory, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hot+n > p.limit/hotShare {
		return nil, refuse(syscall.ENOSPC, "hot files have %s of %s, too much for another %s",
			humanize.IBytes(uint64(p.hot)), humanize.IBytes(uint64(p.limit/hotShare)), humanize.IBytes(uint64(n)))
	}
	p.hot += n
	return &FileMemory{p: p, file: file, bytes: n, hot: true}, nil
}

// hotShare says how much memory hot files may have: the limit of the pool divided by it.
const hotShare = 2

// Hot returns the bytes that hot files have.
func (p *Pinned) Hot() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hot
}

// HotOver reports whether hot files have more than they may, apart from retired memory.
func (p *Pinned) HotOver() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hot-p.hotRetired > p.limit/hotShare
}

// IsHot reports whether the memory is that of a hot file.
func (m *FileMemory) IsHot() bool {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	return m.hot
}

// Pin makes the memory of a hot file part of the pool, now that the file is pinned, and reports whether it is. It is
// not if LockFile would fail, or wait. Pin does not block.
func (m *FileMemory) Pin() bool {
	p := m.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if !m.hot {
		return true
	}
	if m.retired || p.checkRoomLocked(m.file, m.bytes) != nil || p.used+m.bytes > p.limit {
		return false
	}
	p.hot, p.used = p.hot-m.bytes, p.used+m.bytes
	m.hot, m.used = false, true
	p.files[m] = struct{}{}
	p.notifyLocked()
	return true
}

// Retire says that Free will be called as soon as nobody reads the pages.
func (m *FileMemory) Retire() {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	if m.hot && !m.retired {
		m.p.hotRetired += m.bytes
	}
	m.retired = true
}

// PinsChanged says that PinnedOnHost of a file returns something else now. Memory that was about to leave may stay.
func (p *Pinned) PinsChanged() { p.notify() }

// Free gives the memory back. The pages are not locked any more.
func (m *FileMemory) Free() {
	m.p.mu.Lock()
	delete(m.p.files, m)
	if m.used {
		m.p.used -= m.bytes
	}
	if m.hot {
		m.p.hot -= m.bytes
		if m.retired {
			m.p.hotRetired -= m.bytes
		}
	}
	m.p.mu.Unlock()
	m.p.notify()
}

// Files returns the bytes that locked files use.
func (p *Pinned) Files() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.filesLocked()
}

func (p *Pinned) filesLocked() int64 {
	return p.sumLocked(func(m *FileMemory) bool { return m.used })
}

// chargedLocked returns the bytes that files use or wait for, and that are not retired. p.mu is held.
func (p *Pinned) chargedLocked() int64 {
	return p.sumLocked(func(m *FileMemory) bool { _, charged := m.charged(); return charged })
}

// retiredLocked returns the retired bytes that are still used. p.mu is held.
func (p *Pinned) retiredLocked() int64 {
	return p.sumLocked(func(m *FileMemory) bool { _, charged := m.charged(); return m.used && !charged })
}

func (p *Pinned) sumLocked(counts func(m *FileMemory) bool) (bytes int64) {
	for m := range p.files {
		if counts(m) {
			bytes += m.bytes
		}
	}
	return bytes
}

// WaitRetired waits until no more is used than the limit, or until no memory is retired, and until hot files have no
// more than they may.
func (p *Pinned) WaitRetired(ctx context.Context) error {
	_ = p.waitRoom(ctx, 0, nil) // fails if what is not retired exceeds the limit
	for ctx.Err() == nil {
		p.mu.Lock()
		over, changed := p.hot > p.limit/hotShare, p.watchLocked()
		p.mu.Unlock()
		if !over {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// waitRoom is room, but also waits for retired memory.
func (p *Pinned) waitRoom(ctx context.Context, size int64, m *FileMemory) error {
	for {
		p.mu.Lock()
		retired, changed := p.retiredLocked(), p.watchLocked()
		p.mu.Unlock()
		err := p.room(size, m)
		if err == nil || retired == 0 {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// forExtents returns how many bytes extents may have: those for which no file is charged.
func (p *Pinned) forExtents() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forExtentsLocked()
}

// forExtentsLocked is forExtents with mu held. After SetLimit, files may have more than the limit, until they are
// unlocked.
func (p *Pinned) forExtentsLocked() int64 { return max(p.limit-p.chargedLocked(), 0) }
