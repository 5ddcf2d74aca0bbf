package fs

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// heldPushes is a kernel that gets pushed pages when the test lets it.
type heldPushes struct {
	notifier
	begun, goOn, ended chan struct{}
}

func (k heldPushes) InodeNotifyStoreCache(node uint64, off int64, p []byte) fuse.Status {
	if len(p) == 1 { // not a push: stretch
		return k.notifier.InodeNotifyStoreCache(node, off, p)
	}
	k.begun <- struct{}{}
	<-k.goOn
	defer func() { k.ended <- struct{}{} }()
	return k.notifier.InodeNotifyStoreCache(node, off, p)
}

// TestPushedPagesDoNotUndoACut: a file that becomes shorter while pages are pushed stays short for programs that have
// seen the new size.
func TestPushedPagesDoNotUndoACut(t *testing.T) {
	const last = pushedSize - pushedChunk
	cuts := map[string]struct {
		size int64
		cut  func(t *testing.T, p *pushScene, size int64)
	}{
		"in SOURCE": {last + 2*page.Size + 100, func(t *testing.T, p *pushScene, size int64) {
			require.NoError(t, os.Truncate(filepath.Join(p.source, "f"), size))
		}},
		"by name": {last + 2*page.Size + 100, func(t *testing.T, p *pushScene, size int64) {
			require.NoError(t, os.Truncate(p.path, size))
		}},
		"by an open for reading": {0, func(t *testing.T, p *pushScene, _ int64) {
			f, err := os.OpenFile(p.path, os.O_RDONLY|os.O_TRUNC, 0)
			require.NoError(t, err)
			require.NoError(t, f.Close())
		}},
	}
	for name, c := range cuts {
		t.Run(name, func(t *testing.T) {
			p := newPushScene(t, false, unasked)
			k := heldPushes{p.fs.notify, make(chan struct{}, 100), make(chan struct{}), make(chan struct{}, 100)}
			f := p.reader(t)
			p.fs.notify = k
			for _, of := range p.fs.files.all() {
				of.content.awaitPushes() // pushes see the new notifier, as the race detector knows now
			}
			b := make([]byte, page.Size)
			for i := int64(0); len(k.begun) == 0; i++ {
				require.Less(t, i, int64(pushedChunk/page.Size), "nothing is pushed")
				_, err := f.ReadAt(b, last+i*page.Size)
				require.NoError(t, err)
				time.Sleep(10 * time.Millisecond)
			}
			time.AfterFunc(100*time.Millisecond, func() { close(k.goOn) })
			c.cut(t, p, c.size)
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			require.EqualValues(t, c.size, st.Size)
			<-k.ended
			n, err := f.ReadAt(b, last+2*page.Size)
			require.EqualValues(t, max(c.size-last-2*page.Size, 0), n, "%v", err)
			n, err = f.ReadAt(b, last+5*page.Size)
			require.Zero(t, n, "%v", err)
		})
	}
}

// TestPushedPagesDoNotChangeTheSize: a kernel that caches writes goes by its own size of a file, also if programs read
// a file that became longer in SOURCE.
func TestPushedPagesDoNotChangeTheSize(t *testing.T) {
	p := newPushScene(t, false, writeBack, unasked)
	const last = pushedSize - pushedChunk
	const size = last + 10*page.Size + 5
	require.NoError(t, os.Truncate(p.path, size))
	f := p.reader(t)
	source, err := os.OpenFile(filepath.Join(p.source, "f"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = source.Write(bytes.Repeat([]byte("x"), 5*page.Size))
	require.NoError(t, err)
	require.NoError(t, source.Close())
	_, err = p.window.Acquire(t.Context(), 0, pushedSize, true)
	require.NoError(t, err)
	b := make([]byte, page.Size)
	for range 3 {
		for i := range int64(9) {
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			require.EqualValues(t, size, st.Size, "pushed: %d", p.pushed())
			_, err := f.ReadAt(b, last+i*page.Size)
			require.NoError(t, err)
			time.Sleep(10 * time.Millisecond)
		}
		require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	}
}
