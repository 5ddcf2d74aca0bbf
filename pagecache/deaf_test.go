package pagecache

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hoarder is a client of a limited user, who may map four of the device's eight extents. It has had six brackets, one
// after the other. beside is a client of another user.
type hoarder struct {
	*traveller
	beside *traveller
}

const hoards = 6

func newHoarder(t *testing.T) *hoarder {
	t.Helper()
	m := newMovingMachine(t, 1, 8, 0)
	require.NoError(t, m.cache.SetUserShare(0.5))
	c := m.travelAs(m.noisyFile(8*brick), 0, MapRequest{Len: 8 * brick, User: 7, Limited: true})
	for i := range hoards {
		c.use(i, i+1).Done()
	}
	h := &hoarder{c, m.travel(m.noisyFile(8*brick), 0, false)}
	require.Zero(t, h.charged(), "memory that can be taken back is charged to nobody")
	return h
}

// charged returns the number of extents that the hoarder's user is charged for.
func (h *hoarder) charged() int64 {
	users := h.m.cache.Status().Devices[0].Users
	if i := slices.IndexFunc(users, func(u UserPins) bool { return u.User == 7 }); i >= 0 {
		return users[i].Bytes / brick
	}
	return 0
}

// refused checks that the hoarder gets no further extent.
func (h *hoarder) refused() {
	h.t.Helper()
	_, err := h.try(7, 8)
	require.ErrorIs(h.t, err, syscall.ENOMEM)
	require.ErrorContains(h.t, err,
		"user 7 may map no more than 256 KiB of its 512 KiB and maps 384 KiB already")
	require.ErrorContains(h.t, err,
		"what the process used before counts until it answers MOVE on its service connection")
}

// answersAgain checks that everything is as it was before the client fell silent.
func (h *hoarder) answersAgain() {
	h.t.Helper()
	require.Eventually(h.t, func() bool { return h.charged() == 0 }, time.Minute, time.Millisecond)
	h.use(7, 8).Done()
	h.beside.use(0, 8).Done()
	require.Zero(h.t, h.mapped(), "all was taken back")
	h.use(0, 4).Done()
}

// TestUnansweredMovesAreCharged: a client that answers no MOVE keeps what it has, and its user is charged for all of
// it. It is asked once, others use the rest of the memory, and the charge ends when it answers.
func TestUnansweredMovesAreCharged(t *testing.T) {
	h := newHoarder(t)
	h.stopped.Lock()
	for i := range 4 {
		h.beside.use(i, i+1).Done()
	}
	require.EqualValues(t, hoards, h.charged())
	require.Empty(t, h.moves, "it is asked for one extent, and not for the others")
	h.refused()
	h.stopped.Unlock()
	h.answersAgain()
}

// TestClientsThatDoNotAttendAreCharged is the same for a client that the daemon knows not to listen. It is asked
// nothing. Memory of brackets that end in the meantime is charged too.
func TestClientsThatDoNotAttendAreCharged(t *testing.T) {
	h := newHoarder(t)
	late := h.use(hoards-1, hoards)
	had := h.moved
	h.silent.Store(true)
	late.Done()
	require.EqualValues(t, hoards, h.charged())
	for i := range 4 {
		h.beside.use(i, i+1).Done()
	}
	require.Equal(t, hoards, h.mapped())
	require.Equal(t, had, h.moved)
	h.refused()
	h.silent.Store(false)
	h.answersAgain()
}

// TestChargeEndsWithTheMapping: the charge for a client that does not answer ends with its mapping.
func TestChargeEndsWithTheMapping(t *testing.T) {
	h := newHoarder(t)
	h.silent.Store(true)
	h.beside.use(0, 2).Done()
	_, err := h.m.cache.Use(context.Background(), []Use{h.beside.over(0, 8)},
		UseOptions{Nested: true})
	require.ErrorIs(t, err, syscall.EDEADLK, "nobody waits for it")
	require.EqualValues(t, hoards, h.charged())
	h.end()
	require.Zero(t, h.charged())
	h.beside.use(0, 8).Done()
	require.Zero(t, h.m.cache.Status().Devices[0].MappedBytes)
}

// TestSilentClientsKeepNoMoreThanTheMaximum: a client of a user with a maximum has no more than that at its addresses,
// used or not, whenever it falls silent. Without a maximum it keeps everything.
func TestSilentClientsKeepNoMoreThanTheMaximum(t *testing.T) {
	const most = 3
	m := newMovingMachine(t, 1, 8, 0)
	require.NoError(t, m.cache.SetTenants([]Tenant{{ID: UserTenant(7), Weight: 1, Most: most * brick}}))
	c := m.travelAs(m.noisyFile(8*brick), 0, MapRequest{Len: 8 * brick, User: 7, Limited: true})
	beside := m.travel(m.noisyFile(8*brick), 0, false)
	for i := range 8 {
		c.use(i, i+1).Done()
		require.LessOrEqual(t, c.mapped(), most)
	}
	c.silent.Store(true)
	beside.use(0, 8-most).Done()
	require.Equal(t, most, c.mapped())
	_, err := c.try(0, 1)
	require.Error(t, err)
	require.Equal(t, most, c.mapped())
	beside.use(0, 8-most).Done()
}
