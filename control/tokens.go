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

// Limits of grants that wait to be redeemed. A client redeems a grant within milliseconds. So a user who reaches a
// limit keeps asking without redeeming, and loses the oldest grants.
const (
	userTokens = 1 << 15 // per user; root and the user who mounted count as one. A view takes one for each file
	maxTokens  = 1 << 16 // of all other users together; beyond it, the user with the most grants loses the oldest
)

// privilegedUser stands for root and the user who mounted.
const privilegedUser = -1

// grantee is what a token gives access to: a file or, with a nil source, the status.
type grantee struct {
	source  pagecache.Source
	user    int64
	expires time.Time
}

// tokens is the table of grants that are not yet redeemed.
type tokens struct {
	life time.Duration // immutable

	mu      sync.Mutex
	waiting map[[tokenSize]byte]grantee // guarded by mu
	// orders has the tokens given to each user, oldest first. Redeemed tokens stay until they reach the front. Guarded
	// by mu.
	orders map[int64][][tokenSize]byte
	// ordinary is the total length of all orders except privilegedUser's. Guarded by mu.
	ordinary int
	timer    *time.Timer // guarded by mu; armed while orders is not empty
	closed   bool        // guarded by mu
}

func newTokens(life time.Duration) *tokens {
	return &tokens{life: life, waiting: make(map[[tokenSize]byte]grantee), orders: make(map[int64][][tokenSize]byte)}
}

// give makes a token for src, on behalf of a user. ESHUTDOWN after close.
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

// mostLocked returns the ordinary user with the most tokens.
func (t *tokens) mostLocked() (user int64) {
	most := 0
	for u, order := range t.orders {
		if u != privilegedUser && len(order) > most {
			user, most = u, len(order)
		}
	}
	return user
}

// redeem removes the token from the table. ok is false if the token was never given, was redeemed before, has expired,
// or its descriptor is closed. Neither the caller nor a client can tell which.
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

// peek returns the source of a token that can be redeemed, or nil. The token can still be redeemed.
func (t *tokens) peek(token [tokenSize]byte) pagecache.Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.waiting[token].source
}

// sweepLocked drops a user's oldest tokens that have expired or were redeemed.
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

// armLocked sets the timer, so that an idle server drops sources when their grants have expired.
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

// count returns the number of tokens not redeemed; it may include expired ones.
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
