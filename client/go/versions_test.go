package gaiafs

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
)

// recorded makes the grants of this process lead to a daemon that replays recorded frames. It returns the daemon and an
// open file.
func recorded(t *testing.T, answers map[uint16][]string) (*controltest.Recorded, *os.File) {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	r, err := controltest.ListenRecorded(socket, answers, frameFiles...)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	old := requestGrant
	requestGrant = func(int) (grant, error) { return grant{socket: socket}, nil }
	t.Cleanup(func() { requestGrant = old })
	f, err := os.Create(filepath.Join(dir, "file"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return r, f
}

// A daemon of version 1 gets only what it knows.
func TestDaemonOfVersion1(t *testing.T) {
	r, f := recorded(t, controltest.Version1)
	m, err := Map(f, 0x200000, 0x400000, ProtRead|ProtWrite, 3, OnKind(KindEmulated))
	require.NoError(t, err)
	m.Bytes()[0x3fffff] = 1
	pages, err := m.Acquire(0, 4096)
	require.NoError(t, err)
	require.EqualValues(t, 0x1234567890, pages)
	_, err = m.Release(0, 4096)
	require.NoError(t, err)
	require.NoError(t, m.Sync(0, 1))
	require.NoError(t, m.Advise(0, 1, AdviceRandom))
	require.NoError(t, m.Close())
	require.Empty(t, r.Unexpected())
	require.Equal(t, helloBody(1, 2), r.First(1))
	require.Zero(t, r.First(2)[28], "the kind is reserved in version 1")
}

// A client ignores what a newer daemon appends to frames, and refuses a daemon that requires unknown features.
func TestLaterDaemon(t *testing.T) {
	answers := map[uint16][]string{1: {"welcome2"}, 2: {"mapped2-longer", "extents2-longer"}, 7: {"result"},
		13: {"result"}}
	_, f := recorded(t, answers)
	_, err := Map(f, 0x200000, 0x200000, ProtRead, 3, OnKind(KindEmulated))
	require.ErrorIs(t, err, syscall.ENOTSUP) // its second extent is of another kind
	require.ErrorContains(t, err, "beside kind 1")

	_, f = recorded(t, map[uint16][]string{1: {"welcome2-longer"}})
	_, err = Map(f, 0, 1, ProtRead, 0, OnKind(KindEmulated))
	require.ErrorIs(t, err, syscall.EPROTONOSUPPORT)
	require.ErrorContains(t, err, "requires features 0x4000000000000000")
}

// The client answers what the daemon sends first, even while the program does nothing.
func TestNoticesAreAnswered(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	m, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return d.server.Stats().Attentive == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, m.Close())
	require.Eventually(t, func() bool { return d.server.Stats().Sessions == 0 }, 10*time.Second, time.Millisecond)

	c := &conn{}
	c.moving.add(&assembly{reply: mapped{mapping: 7}})
	frames := loadFrames(t)
	for name, want := range map[string][]byte{
		"check": answerBody(0, 0),
		"move":  answerBody(uint32(syscall.EPERM), 5),
		// INVALIDATED wants no answer; to one with an id, the client says that it does not know it
		"invalidated": answerBody(uint32(syscall.ENOSYS), 0),
	} {
		h, body, err := decodeHeader(frames[name])
		require.NoError(t, err)
		require.Equal(t, want, c.answer(h, body, nil), name)
	}
	require.Equal(t, answerBody(uint32(syscall.EPROTO), 0), c.answer(header{typ: typeMove}, nil, nil))
}
