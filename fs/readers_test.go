package fs

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestReadersHaveRun looks at a running thread, a sleeping one, an ended one and an unknown one.
func TestReadersHaveRun(t *testing.T) {
	has := func(thread uint32, rounds int) bool {
		r := readers{waiting: map[uint32]int64{thread: -1}}
		for range rounds {
			if r.haveRun() {
				return true
			}
		}
		return false
	}
	sleeper, wake := make(chan uint32), make(chan struct{})
	defer close(wake)
	go func() {
		runtime.LockOSThread()
		sleeper <- uint32(unix.Gettid())
		<-wake
	}()
	thread := <-sleeper
	assert.Eventually(t, func() bool { return has(thread, 1) }, eventually, tick, "a thread that sleeps")

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self := uint32(unix.Gettid())
	_, runnable := threadTime(self)
	assert.True(t, runnable)
	r := readers{waiting: map[uint32]int64{self: -1}}
	require.False(t, r.haveRun(), "it may have been waiting to run all the time")
	for !r.haveRun() { // the kernel accounts at its ticks, or when a thread stops running
		runtime.Gosched()
	}

	assert.True(t, has(1<<31-1, 1), "a thread that is no more")
	assert.False(t, has(unknownThread, unknownPatience))
	assert.True(t, has(unknownThread, unknownPatience+1))
}
