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

// Limits of the grants that wait to be redeemed. A client redeems within milliseconds, so a user who reaches one asks
// for grants without end, and loses the oldest.
const (
	userTokens = 1 << 15 // of a user; root and the user who mounted count as one. A view takes one for each file
	maxTokens  = 1 << 16 // of all other users together; beyond it whoever has most loses the oldest
)

// privilegedUser stands for root and the user who mounted.
const privilegedUser = -1

// grantee is what a token stands for. A nil source is access to the status.
type grantee struct {
	source  pagecache.Source
	user    int64
	expires time.Time
}

// tokens is the table of grants that were given and not yet redeemed.
type tokens struct {
	life time.Duration // immutable

	mu      sync.Mutex
	waiting map[[tokenSize]byte]grantee // guarded by mu
	// orders has the tokens given to each user, oldest first; those redeemed stay until they reach the front. Guarded
	// by mu.
	orders map[int64][][tokenSize]byte
	// ordinary is the length of all orders but that of privilegedUser. Guarded by mu.
	ordinary int
	timer    *time.Timer // guarded by mu; armed while orders is not empty
	closed   bool        // guarded by mu
}

func newTokens(life time.Duration) *tokens {
	return &tokens{life: life, waiting: make(map[[tokenSize]byte]grantee), orders: make(map[int64][][tokenSize]byte)}
}

// give makes a token for src, which a user asked for. ESHUTDOWN after close.
func (t *tokens) give(src pagecache.Source, user int64) ([tokenSize]byte, error) {
	var token [tokenSize]byte
	rand.Read(token[:]) // never fails: crypto/rand ends the program instead
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return token, syscall.ESHUTDOWN
	}
	now := time.Now()
	t.sweepLocked(user, now)
	if len(t.orders[user]) >= userTokens {
		t.dropFrontLocked(user)
	}
	if user != privilegedUser && t.ordinary >= maxTokens {
		t.dropFrontLocked(t.mostLocked())
	}
	t.waiting[token] = grantee{src, user, now.Add(t.life)}
	t.orders[user] = append(t.orders[user], token)
	if user != privilegedUser {
		t.ordinary++
	}
	t.armLocked()
	return token, nil
}

// mostLocked returns the ordinary user who has most tokens.
func (t *tokens) mostLocked() (user int64) {
	most := 0
	for u, order := range t.orders {
		if u != privilegedUser && len(order) > most {
			user, most = u, len(order)
		}
	}
	return user
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

// sweepLocked drops those of a user's oldest tokens that have expired or were redeemed.
func (t *tokens) sweepLocked(user int64, now time.Time) {
	for len(t.orders[user]) > 0 {
		g, found := t.waiting[t.orders[user][0]]
		if found && now.Before(g.expires) {
			return
		}
		t.dropFrontLocked(user)
	}
}

func (t *tokens) dropFrontLocked(user int64) {
	order := t.orders[user]
	delete(t.waiting, order[0])
	if t.orders[user] = order[1:]; len(order) == 1 {
		delete(t.orders, user) // gives the array back
	}
	if user != privilegedUser {
		t.ordinary--
	}
}

// armLocked sets the timer, so that an idle server forgets its sources once they have expired.
func (t *tokens) armLocked() {
	if len(t.orders) == 0 || t.timer != nil {
		return
	}
	t.timer = time.AfterFunc(t.life, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.closed {
			return
		}
		t.timer = nil
		now := time.Now()
		for user := range t.orders {
			t.sweepLocked(user, now)
		}
		t.armLocked()
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
	t.waiting, t.orders = nil, nil
	if t.timer != nil {
		t.timer.Stop()
	}
}
