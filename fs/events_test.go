package fs

import (
	"encoding/binary"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/hungfs"
)

var eventKinds = []string{EventsFanotify, EventsInotify}

// watched is a file in SOURCE whose events are reported.
type watched struct {
	*os.File
	key     inodeKey
	witness *witness
	events  *events
	mark    *mark
	noticed chan inodeKey
}

func newWatched(t *testing.T, kind string) *watched {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "file"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(root) })
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	w := &watched{File: f, key: inodeKey{st.Dev, st.Ino}, witness: new(witness), noticed: make(chan inodeKey, 1000)}
	log := slog.New(slog.DiscardHandler)
	w.events = newEvents(kind, inodeKey{dev: st.Dev}, root, log, func(k inodeKey) { w.noticed <- k })
	t.Cleanup(w.events.close)
	if w.events.kind != kind {
		t.Skipf("this kernel, user or filesystem has no %s", kind)
	}
	w.mark = w.events.watch(int(f.Fd()), w.key, w.witness)
	if kind != EventsOff {
		require.NotNil(t, w.mark)
	}
	return w
}

// count returns how many files are watched.
func (e *events) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return max(len(e.marks), len(e.named))
}

// look returns how many changes were noticed so far.
func (w *watched) look(t *testing.T) uint64 {
	t.Helper()
	n, err := w.witness.look(int(w.Fd()))
	require.NoError(t, err)
	return n
}

// append makes another process append to the file.
func (w *watched) append(t *testing.T) {
	t.Helper()
	out, err := exec.Command("sh", "-c", `printf x >> "$1"`, "sh", w.Name()).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// mustNotice waits until notice is called for the file.
func (w *watched) mustNotice(t *testing.T) {
	t.Helper()
	select {
	case k := <-w.noticed:
		require.Equal(t, w.key, k)
	case <-time.After(eventually):
		t.Fatal("notice was not called")
	}
}

// TestEventsTellWhoChanged changes a file while the mount is changing it: by another process, and as the mount does.
func TestEventsTellWhoChanged(t *testing.T) {
	for kind, want := range map[string]uint64{EventsFanotify: 1, EventsInotify: 0, EventsOff: 0} {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			before := w.look(t)
			w.witness.begin(int(w.Fd()))
			_, err := w.WriteString("own")
			require.NoError(t, err)
			require.Equal(t, before, w.look(t), "the mount's own write was taken for a foreign one")
			w.append(t)
			require.Equal(t, before+want, w.look(t))
			w.witness.end(int(w.Fd()), anySize)
			require.Equal(t, before+want, w.look(t))

			w.witness.begin(int(w.Fd()))
			w.append(t)
			changes, err := w.witness.lookAndBegin(int(w.Fd()))
			require.NoError(t, err)
			require.Equal(t, before+2*want, changes, "right before writes of home")
			w.witness.end(int(w.Fd()), anySize)
			w.witness.end(int(w.Fd()), anySize)
		})
	}
}

// TestManyEventsAreAllRead: a look sees the last of more events than one read of them returns.
func TestManyEventsAreAllRead(t *testing.T) {
	const files = 600
	w := newWatched(t, EventsFanotify)
	dir := filepath.Dir(w.Name())
	for i := range files {
		f, err := os.Create(filepath.Join(dir, strconv.Itoa(i)))
		require.NoError(t, err)
		defer f.Close()
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(int(f.Fd()), &st))
		mark := w.events.watch(int(f.Fd()), inodeKey{st.Dev, st.Ino}, new(witness))
		require.NotNil(t, mark)
		defer w.events.unwatch(mark, int(f.Fd()))
	}
	before := w.look(t)
	w.witness.begin(int(w.Fd())) // attributes do not tell
	w.events.reading.Lock()      // nobody else reads
	w.witness.blurred.Store(true)
	out, err := exec.Command("sh", "-c", `i=0; while [ $i -lt 600 ]; do printf x >> "$1/$i"; i=$((i+1)); done
		printf x >> "$2"`, "sh", dir, w.Name()).CombinedOutput()
	w.events.reading.Unlock()
	require.NoError(t, err, "%s", out)
	require.Equal(t, before+1, w.look(t))
	w.witness.end(int(w.Fd()), anySize)
}

// TestEventsCallNotice changes a file while no witness looks.
func TestEventsCallNotice(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			w.append(t)
			w.mustNotice(t)
		})
	}
}

// TestEventsFromBeforeTheWait: an event that came before the wait began is not missed.
func TestEventsFromBeforeTheWait(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			late := &events{kind: kind, fd: -1, wake: make(chan struct{}, 1), stop: make(chan struct{})}
			root, err := os.Open(filepath.Dir(w.Name()))
			require.NoError(t, err)
			defer root.Close()
			require.NoError(t, late.open(kind, int(root.Fd())))
			defer late.close()
			id, err := late.identify(int(w.Fd()))
			require.NoError(t, err)
			_, err = late.begin(int(w.Fd()), id)
			require.NoError(t, err)
			w.append(t)
			time.Sleep(20 * time.Millisecond) // by then, Go's poller has reported it
			late.ended.Go(late.wait)
			select {
			case <-late.wake:
			case <-time.After(eventually):
				t.Fatal("run was not woken")
			}
		})
	}
}

// TestEventsEndWithTheLastUser watches a file twice, and stops watching it twice.
func TestEventsEndWithTheLastUser(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			again := w.events.watch(int(w.Fd()), w.key, w.witness)
			require.Same(t, w.mark, again)
			w.events.unwatch(again, int(w.Fd()))
			w.append(t)
			w.mustNotice(t)
			w.events.unwatch(w.mark, int(w.Fd()))
			require.Zero(t, w.events.count())
		})
	}
}

// TestWatchesComeAndGo makes many users start and stop watching a file at once. The remaining users still learn of
// changes.
func TestWatchesComeAndGo(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			w.events.unwatch(w.mark, int(w.Fd()))
			for range 20 {
				var users sync.WaitGroup
				for range 4 {
					users.Go(func() {
						for range 50 {
							w.events.unwatch(w.events.watch(int(w.Fd()), w.key, w.witness), int(w.Fd()))
						}
					})
				}
				last := w.events.watch(int(w.Fd()), w.key, w.witness)
				users.Wait()
				w.append(t)
				w.mustNotice(t)
				w.events.unwatch(last, int(w.Fd()))
				require.Zero(t, w.events.count())
				for len(w.noticed) > 0 {
					<-w.noticed
				}
			}
		})
	}
}

// TestDroppedEvents: if the kernel drops events, every watched file counts as changed.
func TestDroppedEvents(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			before := w.look(t)
			said := make([]byte, unix.FAN_EVENT_METADATA_LEN) // longer than inotify's; the rest is empty
			binary.NativeEndian.PutUint32(said, unix.FAN_EVENT_METADATA_LEN)
			binary.NativeEndian.PutUint16(said[6:], unix.FAN_EVENT_METADATA_LEN)
			binary.NativeEndian.PutUint64(said[8:], unix.FAN_Q_OVERFLOW)
			if kind == EventsInotify {
				said = make([]byte, unix.SizeofInotifyEvent)
				binary.NativeEndian.PutUint32(said[4:], unix.IN_Q_OVERFLOW)
			}
			w.events.reading.Lock()
			w.events.take(said)
			w.events.reading.Unlock()
			require.Equal(t, before+1, w.look(t))
			require.Equal(t, before+1, w.look(t))
			require.EqualValues(t, 1, w.events.overflows.Load())
			w.events.drain()
			w.mustNotice(t)
		})
	}
}

// TestTooManyWatches: files beyond the limit are not watched. Their changes are noticed by attributes.
func TestTooManyWatches(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			w.events.most = 1
			other, err := os.Create(w.Name() + "2")
			require.NoError(t, err)
			defer other.Close()
			k := w.key
			k.ino++
			more := new(witness)
			mark := w.events.watch(int(other.Fd()), k, more)
			require.Nil(t, mark)
			before, err := more.look(int(other.Fd()))
			require.NoError(t, err)
			_, err = other.WriteString("changed")
			require.NoError(t, err)
			after, err := more.look(int(other.Fd()))
			require.NoError(t, err)
			require.Equal(t, before+1, after)
			w.events.unwatch(mark, int(other.Fd()))
			w.append(t)
			w.mustNotice(t)
		})
	}
}

// TestLostWatch: if the kernel removes a watch, only what events add is lost.
func TestLostWatch(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			w := newWatched(t, kind)
			w.events.cease(int(w.Fd()), w.mark.id)
			before := w.look(t)
			w.append(t)
			require.Equal(t, before+1, w.look(t))
			w.events.unwatch(w.mark, int(w.Fd()))
			require.Zero(t, w.events.count())
		})
	}
}

// TestOddEvents: malformed events do no harm.
func TestOddEvents(t *testing.T) {
	for n := range 64 {
		for fill := range 256 {
			b := make([]byte, n)
			for i := range b {
				b[i] = byte(fill * (i + 1))
			}
			for range parseFanotify(b) {
			}
			for range parseInotify(b) {
			}
		}
	}
}

func withEvents(kind string) func(*Options) { return func(o *Options) { o.Events = kind } }

// waitWatched waits until a file of SOURCE is watched, and returns its content.
func (s *scene) waitWatched(t testing.TB, name string) (*content, *openFile) {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, name), &st))
	c := s.fs.table.byInode(inodeKey{st.Dev, st.Ino}).content()
	require.Eventually(t, func() bool { return c.witness.events.Load() != nil }, eventually, tick)
	return c, s.fs.openOf(s.fs.table.byInode(inodeKey{st.Dev, st.Ino}), c)
}

// TestForeignChangeDuringOwnChange: a process changes a file in SOURCE, but not its size, while the mount changes it.
// The next open sees that.
func TestForeignChangeDuringOwnChange(t *testing.T) {
	s := mount(t, withEvents(EventsFanotify))
	if s.Events() != EventsFanotify {
		t.Skip("this kernel, user or filesystem has no fanotify")
	}
	sh(t, s.mnt, "printf 'before' > f")
	f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	c, of := s.waitWatched(t, "f")
	defer of.mu.RUnlock()
	require.Equal(t, "before", sh(t, s.mnt, "cat f"))
	c.witness.begin(of.fd)
	sh(t, s.source, "printf 'after!' | dd of=f conv=notrunc 2>/dev/null")
	c.witness.end(of.fd, 0)
	require.Equal(t, "after!", sh(t, s.mnt, "cat f"))
	require.EqualValues(t, 1, s.fs.changed.Load())
	// The mount's own changes are not taken for foreign ones, however often events are read.
	sh(t, s.mnt, `for i in 1 2 3 4 5; do printf own > f; cat f; printf more >> f; cat f; chmod 60$i f; cat f
		truncate -s $i f; cat f; fallocate -l 5000 f; cat f; touch f; cat f; done`)
	require.EqualValues(t, 1, s.fs.changed.Load())
}

// TestGrowthIsToldByEvents: a program that follows a file by fstat sees bytes appended in SOURCE, for any attribute
// timeout.
func TestGrowthIsToldByEvents(t *testing.T) {
	for _, kind := range eventKinds {
		t.Run(kind, func(t *testing.T) {
			s := mount(t, withEvents(kind), func(o *Options) { o.AttrTimeout = time.Hour })
			if s.Events() != kind {
				t.Skip("this kernel, user or filesystem does not have it")
			}
			sh(t, s.mnt, "printf 'first' > f; cat f")
			follow := shell(s.mnt, `exec 3<f; cat <&3; while [ $(stat -Lc %s /proc/self/fd/3) = 5 ]; do :; done; cat <&3`)
			out, err := follow.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, follow.Start())
			got := make([]byte, 5)
			_, err = out.Read(got)
			require.NoError(t, err)
			_, of := s.waitWatched(t, "f")
			of.mu.RUnlock()
			sh(t, s.source, "printf 'second' >> f")
			rest := make([]byte, 100)
			n, err := out.Read(rest)
			require.NoError(t, err)
			require.Equal(t, "second", string(rest[:n]))
			require.NoError(t, follow.Wait())
		})
	}
}

// TestNothingThatMayHangIsWatched: events cause no request to a filesystem with a server, mounted below SOURCE or shown
// itself.
func TestNothingThatMayHangIsWatched(t *testing.T) {
	requireRoot(t)
	s := mount(t, withEvents(EventsAuto), unasked)
	if s.Events() == EventsOff {
		t.Skip("this kernel or filesystem has no events")
	}
	h := s.nest(t, "parent/nested")
	f, err := os.Open(filepath.Join(s.mnt, "parent/nested/f"))
	require.NoError(t, err)
	sh(t, s.mnt, "echo own > own")
	own, err := os.Open(filepath.Join(s.mnt, "own"))
	require.NoError(t, err)
	h.Hang("getattr", "lookup", "open", "read")
	_, of := s.waitWatched(t, "own") // it was opened after that file
	of.mu.RUnlock()
	require.Equal(t, 1, s.fs.events.count())
	s.goesOn(t, h, shell(s.mnt, "echo more >> own; cat own"))
	h.Kill()
	require.NoError(t, own.Close())
	_ = f.Close()
	shown, at := t.TempDir(), t.TempDir()
	hungfs.Mount(t, shown, at)
	whole := mount(t, withEvents(EventsAuto), func(o *Options) { o.Source = at })
	assert.Equal(t, EventsOff, whole.Events())
}
