package control

import (
	"crypto/rand"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
)

// tokenSize is the number of bytes in a token.
const tokenSize = 16

// maxTokens bounds the grants that wait to be redeemed. Beyond it the oldest goes: a client redeems within
// milliseconds, and a program that asks for grants without end pushes out mostly its own.
const maxTokens = 1 << 16

// grantee is what a token stands for. A nil source is access to the status.
type grantee struct {
	source  pagecache.Source
	expires time.Time
}

// tokens is the table of grants that were given and not yet redeemed.
type tokens struct {
	life time.Duration // immutable

	mu      sync.Mutex
	waiting map[[tokenSize]byte]grantee // guarded by mu
	// order has the tokens given, oldest first; those redeemed stay until they reach the front. Guarded by mu.
	order  [][tokenSize]byte
	timer  *time.Timer // guarded by mu; armed while order is not empty
	closed bool        // guarded by mu
}

func newTokens(life time.Duration) *tokens {
	return &tokens{life: life, waiting: make(map[[tokenSize]byte]grantee)}
}

// give makes a token for src. ESHUTDOWN after close.
func (t *tokens) give(src pagecache.Source) ([tokenSize]byte, error) {
	var token [tokenSize]byte
	rand.Read(token[:]) // never fails: crypto/rand ends the program instead
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return token, syscall.ESHUTDOWN
	}
	now := time.Now()
	t.sweepLocked(now)
	if len(t.order) >= maxTokens {
		t.dropFrontLocked()
	}
	t.waiting[token] = grantee{src, now.Add(t.life)}
	t.order = append(t.order, token)
	t.armLocked(now)
	return token, nil
}

// redeem takes the token out of the table. ok is false for a token that was never given, was redeemed before, has
// expired, or whose descriptor was closed: the caller cannot tell which, and neither can a client.
func (t *tokens) redeem(token [tokenSize]byte) (src pagecache.Source, ok bool) {
	t.mu.Lock()
	g, found := t.waiting[token]
	delete(t.waiting, token)
	t.mu.Unlock()
	if !found || !time.Now().Before(g.expires) {
		return nil, false
	}
	if g.source != nil && !g.source.Open() {
		return nil, false
	}
	return g.source, true
}

// sweepLocked drops the tokens at the front that have expired or were redeemed.
func (t *tokens) sweepLocked(now time.Time) {
	for len(t.order) > 0 {
		g, found := t.waiting[t.order[0]]
		if found && now.Before(g.expires) {
			return
		}
		t.dropFrontLocked()
	}
}

func (t *tokens) dropFrontLocked() {
	delete(t.waiting, t.order[0])
	t.order = t.order[1:]
	if len(t.order) == 0 {
		t.order = nil // gives the array back
	}
}

// armLocked sets the timer for the expiry of the oldest token, so that an idle server forgets its sources.
func (t *tokens) armLocked(now time.Time) {
	if len(t.order) == 0 || t.timer != nil {
		return
	}
	wait := t.life
	if g, found := t.waiting[t.order[0]]; found {
		wait = g.expires.Sub(now)
	}
	t.timer = time.AfterFunc(wait, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.closed {
			return
		}
		t.timer = nil
		now := time.Now()
		t.sweepLocked(now)
		t.armLocked(now)
	})
}

// count returns the number of tokens not redeemed, expired ones perhaps included.
func (t *tokens) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.waiting)
}

// close forgets every token.
func (t *tokens) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.waiting, t.order = nil, nil
	if t.timer != nil {
		t.timer.Stop()
	}
}
