package pagecache

import (
	"bytes"
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// duringRelease stores a byte, releases it, and calls do while the kernel drops its page. do runs in a goroutine of its
// own, and the kernel continues when do waits. duringRelease returns when all of this has ended.
func duringRelease(t *testing.T, m *machine, src *source, do func()) {
	t.Helper()
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	done := make(chan struct{})
	src.read(t, 0, 1) // gives the kernel something to drop
	src.kernel.hook = func(int64, int64) {
		src.kernel.hook = nil
		go func() {
			defer close(done)
			do()
		}()
		synctest.Wait()
	}
	assert.EqualValues(t, 1, p.release())
	<-done
	p.unmap()
}

func TestSyncWaitsForReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(page.Size)
		duringRelease(t, m, src, func() {
			assert.NoError(t, src.attached.Sync(context.Background(), func() error {
				assert.Equal(t, []byte{1}, src.home.bytes(0, 1), "fsync overtook a release that was under way")
				return nil
			}))
		})
	})
}

func TestReleaseWaitsForReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(page.Size)
		other := m.run(src, 0, 0, page.Size, true)
		duringRelease(t, m, src, func() {
			_, err := other.Release(context.Background(), 0, page.Size)
			require.NoError(t, err)
			src.attached.mu.Lock()
			defer src.attached.mu.Unlock()
			assert.Empty(t, src.attached.kernel.Ends(page.From(0).Pages()),
				"a release returned while the kernel may still have old bytes of its pages")
		})
		other.unmap()
	})
}

// TestGroupWaitsForReleases: a group's release returns once the kernel has dropped its pages, also if the release of
// another device makes the kernel drop them.
func TestGroupWaitsForReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 2)
		src := m.file(page.Size)
		p := m.run(src, 1, 0, page.Size, true)
		g := m.group(p.whole())
		p.store(1, 2)
		duringRelease(t, m, src, func() {
			m.releaseGroup(g)
			src.attached.mu.Lock()
			defer src.attached.mu.Unlock()
			assert.Empty(t, src.attached.kernel.Ends(page.From(0).Pages()),
				"a group's release returned while the kernel may still have old bytes of its pages")
		})
		assert.Equal(t, []byte{1, 2}, src.read(t, 0, 2))
		p.unmap()
	})
}

// TestGroupBeginsAfterReleases: what was released of a group's pages is home when the group begins, also if the kernel
// was still dropping its copies. Otherwise it would come home later, with stores of the open group.
func TestGroupBeginsAfterReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(page.Size)
		p := m.run(src, 0, 0, page.Size, true)
		duringRelease(t, m, src, func() {
			m.group(p.whole())
			assert.Equal(t, []byte{1}, src.home.bytes(0, 1))
		})
		p.unmap()
	})
}

// TestReleaseWaitsForPagesThatDrainAgain: a program writes a whole page while a release makes the kernel drop it, so it
// is dropped again. Another release of the page, which waits for the first one, returns only after that: later writes
// by the CPU must count as later than both.
func TestReleaseWaitsForPagesThatDrainAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(page.Size)
		p, other := m.run(src, 0, 0, page.Size, true), m.run(src, 0, 0, page.Size, true)
		p.store(0, 1)
		src.read(t, 0, 1)
		var returned atomic.Bool
		done, again := make(chan struct{}), false
		src.kernel.hook = func(int64, int64) {
			src.kernel.hook = func(int64, int64) {
				src.kernel.hook = nil
				again = true
				synctest.Wait()
				assert.False(t, returned.Load(), "a release returned while its page drained again")
			}
			go func() {
				defer close(done)
				_, err := other.Release(context.Background(), 0, page.Size)
				assert.NoError(t, err)
				returned.Store(true)
			}()
			synctest.Wait()
			src.write(t, 0, bytes.Repeat([]byte{2}, page.Size))
		}
		p.release()
		<-done
		require.True(t, again)
		p.unmap()
		other.unmap()
	})
}

// TestReadsWhileTheDiskIsFull reads a page that a CPU program wrote and a device released. Home cannot take the
// release, so the read returns merged bytes, and the kernel must not keep them. The log does not blame a program.
func TestReadsWhileTheDiskIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &logbook{}
		m := newMachine(t, 1, logTo(log))
		src := m.file(page.Size)
		p := m.run(src, 0, 0, page.Size, true)
		p.store(0, 1)
		src.write(t, 5, []byte("c"))
		src.home.fail(syscall.ENOSPC)
		p.release()
		src.kernel.take()
		got := src.read(t, 0, 6)
		assert.Equal(t, []byte{1, 0, 0, 0, 0, 'c'}, got)
		synctest.Wait()
		assert.Equal(t, []page.Range{{Start: 0, End: 1}}, src.kernel.take(), "what the kernel was told to drop")
		assert.NotContains(t, log.String(), "keep writing")
		src.home.fail(nil)
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		assert.Equal(t, got, src.home.bytes(0, 6))
		p.unmap()
	})
}

// lastOfPage is a byte that a home which takes nothing does not take. It takes half of what is written.
const lastOfPage = page.Size - 1

// whileMergedPageIsDropped lets a device release the last byte of a page while home is full, and a program read it. It
// calls do while the kernel drops the page that the read gave it. In the end, the byte is want.
func whileMergedPageIsDropped(t *testing.T, want byte, do func(src *source)) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(page.Size)
		p := m.run(src, 0, 0, page.Size, true)
		p.store(lastOfPage, 1)
		src.home.fail(syscall.ENOSPC)
		p.release()
		done := false
		src.kernel.hook = func(int64, int64) {
			src.kernel.hook = nil
			do(src)
			done = true
		}
		require.EqualValues(t, 1, src.read(t, 0, page.Size)[lastOfPage])
		synctest.Wait()
		require.True(t, done)
		src.home.fail(nil)
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		require.Equal(t, []byte{want}, src.home.bytes(lastOfPage, 1))
		p.unmap()
	})
}

// TestReadsPastTheCacheWhileTheDiskIsFull: a read past the kernel's page cache sees bytes whose release has returned,
// also while the kernel drops their page.
func TestReadsPastTheCacheWhileTheDiskIsFull(t *testing.T) {
	whileMergedPageIsDropped(t, 1, func(src *source) {
		got := make([]byte, 1)
		n, fromHome, err := src.attached.Read(context.Background(), got, lastOfPage, true, nil)
		assert.NoError(t, err)
		assert.False(t, fromHome)
		assert.Equal(t, []byte{1}, got[:n])
	})
}

// TestWritesWhenTheDiskHasRoomAgain: a write by the CPU is later than a release that returned before it, also while the
// kernel drops their page.
func TestWritesWhenTheDiskHasRoomAgain(t *testing.T) {
	whileMergedPageIsDropped(t, 9, func(src *source) {
		src.home.fail(nil)
		assert.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Off: lastOfPage, Len: 1}, []byte{9}))
	})
}

// TestRangesWhenTheDiskHasRoomAgain: whoever reads home by other means sees bytes whose release returned before, also
// while the kernel drops their page.
func TestRangesWhenTheDiskHasRoomAgain(t *testing.T) {
	whileMergedPageIsDropped(t, 1, func(src *source) {
		src.home.fail(nil)
		assert.NoError(t, src.attached.ReadRange(context.Background(), page.Span(0, page.Size)))
		assert.Equal(t, []byte{1}, src.home.bytes(lastOfPage, 1))
	})
}

// TestReadsPastTheCacheDuringASecondRelease: the kernel caches writes, and home takes nothing. While a second release
// of a page is under way, a read past the kernel's page cache still sees the first one.
func TestReadsPastTheCacheDuringASecondRelease(t *testing.T) {
	m := newMachine(t, 1, func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(lastOfPage, 1)
	p.release()
	src.home.fail(syscall.ENOSPC)
	p.store(9, 2)
	asked := false
	src.kernel.hook = func(int64, int64) {
		asked = true
		got := make([]byte, 1)
		n, _, err := src.attached.Read(context.Background(), got, lastOfPage, true, nil)
		assert.NoError(t, err)
		assert.Equal(t, []byte{1}, got[:n])
	}
	p.release()
	require.True(t, asked)
	src.kernel.hook = nil
	src.home.fail(nil)
}

// TestStoresIntoMergedPages: while the kernel drops a page that a read got merged, a device releases it once more, or
// only stores into it, and home takes bytes again. Then the kernel writes back its copy, into which a program stored.
// The copy lacks the device's new byte, and does not undo it.
func TestStoresIntoMergedPages(t *testing.T) {
	for name, early := range map[string]bool{"released": true, "stored": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { storeIntoMergedPage(t, early) })
		})
	}
}

func storeIntoMergedPage(t *testing.T, early bool) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(lastOfPage, 1)
	src.home.fail(syscall.ENOSPC)
	p.release()
	dirty := make([]byte, page.Size)
	arrived, released := make(chan struct{}), make(chan struct{})
	src.kernel.hook = func(int64, int64) {
		src.kernel.hook = func(int64, int64) { <-arrived } // the kernel drops the page once it is written back
		p.store(9, 2)
		go func() {
			defer close(released)
			if !early {
				<-arrived
			}
			p.release()
		}()
		synctest.Wait()
		src.home.fail(nil)
		assert.NoError(t, src.attached.BringHome(context.Background()))
		for _, b := range []byte{3, 4} { // the kernel writes the page back twice, and in between SOURCE is changed
			dirty[b] = b
			assert.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Len: page.Size, WriteBack: true}, dirty))
			if b == 3 {
				src.home.editAt(3, []byte{5})
			}
		}
		close(arrived)
	}
	copy(dirty, src.read(t, 0, page.Size))
	<-released
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	got := src.home.bytes(0, page.Size)
	assert.Equal(t, []byte{5, 4, 2, 1}, []byte{got[3], got[4], got[9], got[lastOfPage]})
	assert.False(t, src.attached.kernel.HasMerged(), "pages that the kernel dropped")
	p.unmap()
}

// TestWritesWhileReleasedPagesDrain: a read sees what a release publishes while the kernel still drops its pages, and
// home takes nothing. A write after that is later than the release, although home takes bytes again.
func TestWritesWhileReleasedPagesDrain(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	src.read(t, 0, page.Size)
	p.store(lastOfPage, 1)
	src.home.fail(syscall.ENOSPC)
	src.kernel.hook = func(int64, int64) {
		src.kernel.hook = nil
		assert.EqualValues(t, 1, src.read(t, 0, page.Size)[lastOfPage])
		src.home.fail(nil)
		src.write(t, lastOfPage, []byte{9})
	}
	p.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.Equal(t, []byte{9}, src.home.bytes(lastOfPage, 1))
	p.unmap()
}

// TestAcquireDuringASecondRelease: the kernel caches writes, and home takes nothing. A second release of a page is
// under way, and home takes bytes again. Another device still gets the first release, and a direct write is later.
func TestAcquireDuringASecondRelease(t *testing.T) {
	m := newMachine(t, 2, func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(page.Size)
	p, other := m.run(src, 0, 0, page.Size, true), m.run(src, 1, 0, page.Size, true)
	p.store(lastOfPage, 1)
	src.home.fail(syscall.ENOSPC)
	p.release()
	p.store(9, 2)
	asked := false
	src.kernel.hook = func(int64, int64) {
		asked = true
		src.home.fail(nil)
		other.acquire()
		assert.EqualValues(t, 1, other.byteAt(lastOfPage))
		src.write(t, lastOfPage, []byte{7})
	}
	p.release()
	require.True(t, asked)
	src.kernel.hook = nil
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	got := src.home.bytes(0, page.Size)
	require.Equal(t, []byte{2, 7}, []byte{got[9], got[lastOfPage]})
	p.unmap()
	other.unmap()
}

// besideMergedPage lets a device release the last byte of a page while home is full, and a program read the page and
// the next one. While the kernel drops them, home takes bytes again, and do gets the first page as the kernel has it.
// In the end, the page's bytes at offsets are want.
func besideMergedPage(t *testing.T, do func(m *machine, src *source, p *program, kernel []byte),
	offsets []int, want ...byte) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src := m.file(3 * page.Size)
		src.reader = &openHome{Home: src.home}
		p := m.run(src, 0, 0, 2*page.Size, true)
		p.store(lastOfPage, 1)
		p.store(2*page.Size-1, 1)
		src.home.fail(syscall.ENOSPC)
		p.release()
		var kernel []byte
		answered, done := make(chan struct{}), make(chan struct{})
		src.kernel.hook = func(int64, int64) {
			src.kernel.hook = nil
			<-answered
			src.home.fail(nil)
			do(m, src, p, kernel)
			close(done)
		}
		kernel = src.read(t, 0, 2*page.Size)[:page.Size]
		close(answered)
		<-done
		synctest.Wait()
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		page, got := src.home.bytes(0, page.Size), make([]byte, len(offsets))
		for i, at := range offsets {
			got[i] = page[at]
		}
		require.Equal(t, want, got)
		p.unmap()
	})
}

// publish makes what a device stored at off visible, while a merged page of it drains. The release returns later.
func publish(p *program, off int, b byte) {
	p.store(off, b)
	go p.release()
	synctest.Wait()
}

func (s *source) writeBack(t *testing.T, kernel []byte) {
	t.Helper()
	require.NoError(t, s.tryWrite(Change{Kind: ChangeWrite, Len: int64(len(kernel)), WriteBack: true}, kernel))
}

// TestStoresIntoPagesThatWereReadAgain: the kernel has dropped a page that it got merged, and still drops the next one.
// A program reads the page again, and stores a byte's former value.
func TestStoresIntoPagesThatWereReadAgain(t *testing.T) {
	for how, read := range map[string]func(m *machine, src *source){
		"alone": func(*machine, *source) {},
		"after reads of the region": func(_ *machine, src *source) {
			require.NoError(t, src.attached.BringHome(context.Background()))
			for range 3 { // the second one publishes that nothing of the region is pending
				src.read(t, 2*page.Size, page.Size)
			}
		},
		"after direct reads of it": func(m *machine, src *source) {
			m.cache.leastFlight = 1
			for range 2 { // the first one makes a flight, the second one shows it
				_, _, err := src.attached.Read(context.Background(), make([]byte, page.Size), 0, true, src.reader)
				require.NoError(t, err)
			}
		},
	} {
		t.Run(how, func(t *testing.T) {
			besideMergedPage(t, func(m *machine, src *source, p *program, kernel []byte) {
				require.NoError(t, src.attached.BringHome(context.Background()))
				publish(p, 9, 2)
				read(m, src)
				copy(kernel, src.read(t, 0, page.Size))
				require.EqualValues(t, 2, kernel[9])
				kernel[9] = 0
				src.writeBack(t, kernel)
			}, []int{9, lastOfPage}, 0, 1)
		})
	}
}

// TestDirectWritesIntoMergedPages: the kernel's copy lacks what a program wrote past it, and does not undo it.
func TestDirectWritesIntoMergedPages(t *testing.T) {
	besideMergedPage(t, func(_ *machine, src *source, _ *program, kernel []byte) {
		require.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Off: 5, Len: 1, Direct: true}, []byte{7}))
		kernel[4] = 3
		src.writeBack(t, kernel)
	}, []int{4, 5, lastOfPage}, 3, 7, 1)
}

// TestZerosInMergedPages: the kernel's copy has zeros where a program made a hole or cut the file. They do not undo
// what a device stores there later.
func TestZerosInMergedPages(t *testing.T) {
	for how, zero := range map[string]func(t *testing.T, src *source){
		"hole": func(t *testing.T, src *source) {
			t.Helper()
			require.NoError(t, src.attached.ChangeHome(context.Background(),
				Change{Kind: ChangeZero, Off: 100, Len: 3*page.Size - 100}, func(off, n int64) error {
					_, err := src.home.WriteAt(make([]byte, min(n, 2*page.Size-off)), off)
					return err
				}))
		},
		"truncation": func(t *testing.T, src *source) {
			t.Helper()
			src.truncate(t, 100)
			src.truncate(t, 3*page.Size)
		},
	} {
		t.Run(how, func(t *testing.T) {
			besideMergedPage(t, func(_ *machine, src *source, p *program, kernel []byte) {
				zero(t, src)
				clear(kernel[100:])
				publish(p, lastOfPage, 6)
				require.NoError(t, src.attached.BringHome(context.Background()))
				kernel[4] = 3
				src.writeBack(t, kernel)
			}, []int{4, lastOfPage}, 3, 6)
		})
	}
}
