package residency

import (
	"syscall"

	humanize "github.com/dustin/go-humanize"
)

// Pages of files in the host's page cache can be locked there, so that devices copy from them. They count as pinned
// memory, and nothing evicts them.

// SetShare changes the part of the pool that the locked pages of one limited user's files may take.
func (p *Pinned) SetShare(share float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.share = share
}

// CheckFile returns an error if n more bytes of a user's files cannot be locked: ENOSPC for more than the pool has for
// files, EDQUOT for more than the user's share.
func (p *Pinned) CheckFile(by Tenant, n int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkFileLocked(by, n)
}

func (p *Pinned) checkFileLocked(by Tenant, n int64) error {
	own, share := p.files[by.User], int64(p.share*float64(p.limit))
	switch left := p.forExtentsLocked(); {
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

// LockFile counts n bytes of a user's file that are about to be locked. It frees spares for them, which may block on a
// device. It fails as CheckFile does, or with ENOSPC if extents use the memory. UnlockFile gives the bytes back.
func (p *Pinned) LockFile(by Tenant, n int64) error {
	p.mu.Lock()
	err := p.checkFileLocked(by, n)
	if err == nil {
		p.files[by.User] += n
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if p.room(n) != nil {
		p.uncountFile(by, n)
		return refuse(syscall.ENOSPC, "%s cannot be pinned on the host now: programs' mappings use the pinned memory; try again later, or "+
			"raise pinned-memory with 'gaiafs set'", humanize.IBytes(uint64(n)))
	}
	return nil
}

// UnlockFile undoes LockFile, with the same arguments, once the pages are unlocked.
func (p *Pinned) UnlockFile(by Tenant, n int64) {
	p.uncountFile(by, n)
	p.unused(n)
}

func (p *Pinned) uncountFile(by Tenant, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.files[by.User] -= n; p.files[by.User] == 0 {
		delete(p.files, by.User)
	}
}

// Files returns the bytes that locked files count for.
func (p *Pinned) Files() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.filesLocked()
}

func (p *Pinned) filesLocked() (bytes int64) {
	for _, n := range p.files {
		bytes += n
	}
	return bytes
}

// forExtents returns how many bytes extents may have: what locked pages of files leave.
func (p *Pinned) forExtents() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forExtentsLocked()
}

// forExtentsLocked is forExtents with mu held. After SetLimit, files may have more than the limit, until they are
// unlocked.
func (p *Pinned) forExtentsLocked() int64 { return max(p.limit-p.filesLocked(), 0) }
