package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// unnoticed makes the next read of home find bytes that were stored in SOURCE after the mount's last look.
func (h *memoryHome) unnoticed(off int, p []byte) {
	h.beforeRead = func(page.Bytes) {
		h.beforeRead = nil
		h.clock++
		copy(h.data[off:], p)
	}
}

// noticed looks at home as package fs does before a write.
func (h *memoryHome) noticed(t *testing.T) {
	_, err := h.Look()
	require.NoError(t, err)
}

// TestReplicasOfTwoMoments fills one device before a change in SOURCE and another one after it, before the change is
// noticed. One device's bytes must not count as stores of the other, and the old bytes must not survive.
func TestReplicasOfTwoMoments(t *testing.T) {
	for _, first := range []int{0, 1} {
		for _, writable := range [][2]bool{{true, true}, {false, true}, {true, false}, {false, false}} {
			for _, stores := range []bool{false, true} {
				t.Run(fmt.Sprintf("device %d first, %v, stores %v", first, writable, stores), func(t *testing.T) {
					m := newMachine(t, 2)
					src := m.noisyFile(page.Size)
					want := src.home.bytes(0, page.Size)
					old := m.run(src, first, 0, page.Size, writable[0])
					if stores && writable[0] {
						old.add(0)
						want[0]++
					}
					src.home.unnoticed(20, []byte{want[20] + 1})
					fresh := m.run(src, 1-first, 0, page.Size, writable[1])
					want[20]++
					if stores && writable[1] {
						fresh.add(8)
						want[8]++
					}
					src.home.noticed(t)
					src.write(t, 30, []byte{want[30] + 1})
					want[30]++
					src.write(t, 20, []byte{want[20] + 1})
					want[20]++
					old.acquire()
					fresh.acquire()
					for _, p := range []*program{old, fresh} {
						if p.writable {
							p.release()
						}
					}
					old.acquire()
					fresh.acquire()
					requireSame(t, want, old.all())
					requireSame(t, want, fresh.all())
					require.NoError(t, src.attached.Sync(context.Background(), nil))
					requireSame(t, want, src.home.bytes(0, page.Size))
					require.Zero(t, m.baseless())
				})
			}
		}
	}
}

// TestReplicasOfThreeMoments is TestReplicasOfTwoMoments with two unnoticed changes.
func TestReplicasOfThreeMoments(t *testing.T) {
	for _, stores := range []bool{false, true} {
		m := newMachine(t, 3)
		src := m.noisyFile(page.Size)
		want := src.home.bytes(0, page.Size)
		programs := []*program{m.run(src, 0, 0, page.Size, true)}
		for i := range 2 {
			src.home.unnoticed(20+i, []byte{want[20+i] + 1})
			want[20+i]++
			programs = append(programs, m.run(src, i+1, 0, page.Size, true))
		}
		src.home.editAt(40, []byte{want[40] + 1})
		want[40]++
		for i, p := range programs {
			if stores {
				p.add(i)
				want[i]++
			}
		}
		src.home.noticed(t)
		src.write(t, 20, []byte{want[20] + 1})
		want[20]++
		for range 2 {
			for _, p := range programs {
				p.acquire()
				p.release()
			}
		}
		for _, p := range programs {
			requireSame(t, want, p.all())
		}
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		requireSame(t, want, src.home.bytes(0, page.Size))
		require.Zero(t, m.baseless())
	}
}

// TestAcquiresAfterThreeMoments is TestReplicasOfThreeMoments without later changes: after its next acquire each
// program has home's bytes.
func TestAcquiresAfterThreeMoments(t *testing.T) {
	m := newMachine(t, 3)
	src := m.noisyFile(page.Size)
	want := src.home.bytes(0, page.Size)
	programs := []*program{m.run(src, 0, 0, page.Size, true)}
	for i := range 3 {
		src.home.unnoticed(20+i, []byte{want[20+i] + 1})
		want[20+i]++
		if i < 2 {
			programs = append(programs, m.run(src, i+1, 0, page.Size, true))
		}
	}
	src.home.mu.Lock()
	src.home.beforeRead(page.Bytes{})
	src.home.mu.Unlock()
	for _, p := range programs {
		p.acquire()
		requireSame(t, want, p.all())
	}
	require.Zero(t, m.baseless())
}

// TestLostBaseOfASecondReplica: two replicas were filled before and after a change in SOURCE. The base of the first one
// is known, that of the second one is lost. The page is counted.
func TestLostBaseOfASecondReplica(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(page.Size)
	old := m.run(src, 0, 0, page.Size, true)
	want := src.home.bytes(0, page.Size)
	src.home.unnoticed(20, []byte{want[20] + 1})
	fresh := m.run(src, 1, 0, page.Size, true)
	fresh.add(0)
	mine := bytes.Clone(fresh.all())
	for at := 30; at < page.Size; at += 50 {
		src.home.editAt(at, []byte{want[at] + 1})
	}
	old.acquire()
	require.EqualValues(t, 1, m.baseless())
	fresh.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	requireSame(t, mine, src.home.bytes(0, page.Size))
}

// TestSeveralPagesOfSeveralDevices changes adjacent pages in SOURCE in many places. For each page, one device has
// stores, and the others have the base.
func TestSeveralPagesOfSeveralDevices(t *testing.T) {
	const pages = 6
	for _, devices := range []int{2, 3} {
		m := newMachine(t, devices)
		src := m.noisyFile(pages * page.Size)
		want := src.home.bytes(0, pages*page.Size)
		var programs []*program
		for d := range devices {
			programs = append(programs, m.run(src, d, 0, pages*page.Size, true))
		}
		for i := range pages {
			at := i*page.Size + i
			programs[i%devices].add(at)
			want[at]++
			for off := 100; off < page.Size; off += 50 {
				at := i*page.Size + off
				want[at]++
				src.home.editAt(at, want[at:at+1])
			}
		}
		for _, p := range programs {
			p.acquire()
			p.release()
		}
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		requireSame(t, want, src.home.bytes(0, len(want)))
		for _, p := range programs {
			p.acquire()
			requireSame(t, want, p.all())
		}
		require.Zero(t, m.baseless())
	}
}
