package ctest

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
)

// The numbers that testdata/moving.c relies on: the size of extents, and how many the file, the device and pinned
// memory have.
const (
	block        = controltest.MovingExtent
	fileBlocks   = 16
	deviceBlocks = 4
	pinnedBlocks = 2
)

// startMoving starts a daemon over a page cache, and makes the file.
func startMoving(t *testing.T, set ...func(*control.Options)) (d *daemon, cache *pagecache.Cache, path string) {
	t.Helper()
	dir := t.TempDir()
	d = &daemon{t: t, dir: dir, socket: filepath.Join(dir, "s")}
	d.server, cache = controltest.StartMoving(t, dir, deviceBlocks, pinnedBlocks, set...)
	content := make([]byte, fileBlocks*block)
	for i := range content {
		content[i] = byte(i / 7)
	}
	path = filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return d, cache, path
}

// waitIdle waits until no client has memory.
func waitIdle(t *testing.T, cache *pagecache.Cache) {
	t.Helper()
	require.Eventually(t, func() bool {
		s := cache.Status().Devices[0]
		return s.MappedBytes == 0 && s.Brackets == 0
	}, time.Minute, time.Millisecond)
}

func TestMoving(t *testing.T) {
	for build := range builds {
		client := compile(t, "moving", build)
		for _, scenario := range []string{"basic", "holes", "large", "order", "tells"} {
			t.Run(build+"/"+scenario, func(t *testing.T) {
				if build != "plain" && scenario == "holes" {
					t.Skip("sanitizers catch the faults that this one makes")
				}
				d, cache, path := startMoving(t)
				d.run(client, scenario, path)
				waitIdle(t, cache)
			})
		}
	}
}

// TestExplainFaults checks the messages of programs that a fault ends. They still end.
func TestExplainFaults(t *testing.T) {
	client := compile(t, "moving", "plain")
	for what, words := range map[string]string{
		"load": "^gaiafs: fault at 0x[0-9a-f]+, byte 65537 of a mapping of .*/file on device 0, " +
			"whose memory moves, and no bracket uses it: .*\n$",
		"store":     "^gaiafs: fault at .*, which is only read, by a store: map it for writing\n$",
		"elsewhere": "^$",
	} {
		t.Run(what, func(t *testing.T) {
			d, cache, path := startMoving(t)
			cmd := d.command(client, "explains", path, what)
			out, err := cmd.CombinedOutput()
			require.Error(t, err)
			require.Equal(t, syscall.SIGSEGV, cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(), "%s", out)
			require.Regexp(t, words, string(out))
			waitIdle(t, cache)
		})
	}
}

// TestMovingAmongMany makes threads of several processes use four times the device's memory. Every stored byte must be
// there.
func TestMovingAmongMany(t *testing.T) {
	const processes, threads, rounds = 3, 3, 4
	client := compile(t, "moving", "plain")
	d, cache, path := startMoving(t)
	var wg sync.WaitGroup
	for i := range processes {
		wg.Go(func() { d.run(client, "many", path, fmt.Sprint(i)) })
	}
	wg.Wait()
	waitIdle(t, cache)
	require.Eventually(t, func() bool {
		return len(cache.Status().Files) == 0 ||
			cache.Status().Files[0].WaitingBytes == 0
	},
		time.Minute, 10*time.Millisecond)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range fileBlocks {
		for k := range processes * threads {
			at := i*block + 16 + k
			require.Equal(t, byte(at/7)+rounds, got[at], "byte %d of block %d", 16+k, i)
		}
	}
	require.Positive(t, cache.Status().Counters["evictions"])
}

// TestMovingBesideOthers has a program need the device while a program that was stopped or killed holds it.
func TestMovingBesideOthers(t *testing.T) {
	client := compile(t, "moving", "plain")
	for _, where := range []string{"within", "between"} {
		t.Run("killed "+where, func(t *testing.T) {
			d, cache, path := startMoving(t)
			cmd, expect, _ := d.talk(client, where, path)
			expect("ready")
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
			d.run(client, "needs", path)
			waitIdle(t, cache)
		})
		t.Run("stopped "+where, func(t *testing.T) {
			d, cache, path := startMoving(t)
			cmd, expect, answer := d.talk(client, where, path)
			expect("ready")
			require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
			done := make(chan struct{})
			go func() {
				defer close(done)
				d.run(client, "needs", path)
			}()
			// The stopped program keeps its memory, and there is no room for the other one.
			require.Eventually(t, func() bool { return cache.Status().Devices[0].BracketsWaiting == 1 }, time.Minute,
				time.Millisecond)
			require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			expect("done")
			<-done
			_, err = answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
			waitIdle(t, cache)
		})
	}
}

// TestKeptBrackets makes a program use the same ranges repeatedly. It must ask for each only once. When another program
// needs the device, they go back, except for those in use.
func TestKeptBrackets(t *testing.T) {
	const several = 3 // the ranges of one more bracket, in two mappings
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "moving", build)
			d, cache, path := startMoving(t)
			cmd, expect, answer := d.talk(client, "keeps", path)
			expect("kept")
			require.EqualValues(t, deviceBlocks+several, cache.Status().Counters["brackets"])
			require.Equal(t, deviceBlocks+1, cache.Status().Devices[0].Brackets)
			d.run(client, "needs some", path)
			// The daemon may notice the other program's end a moment later.
			require.Eventually(t, func() bool { return cache.Status().Devices[0].Brackets == 1 }, time.Minute,
				time.Millisecond)
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
			waitIdle(t, cache)
		})
	}
}

// TestUsesOfKeptBrackets: under the rule lfu, brackets are kept, and the library says how often they were used.
func TestUsesOfKeptBrackets(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			d, cache, path := startMoving(t)
			require.NoError(t, cache.SetEviction("lfu"))
			d.run(compile(t, "moving", build), "counts", path)
			waitIdle(t, cache)
			require.Less(t, cache.Status().Counters["brackets"], int64(fileBlocks+deviceBlocks), "each use asked")
		})
	}
}

// TestEndWhileOthersWait fills the daemon's queue of a client with brackets that wait. The bracket that they wait for
// must still end, and its thread must still be able to release.
func TestEndWhileOthersWait(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "moving", build)
			d, cache, path := startMoving(t, func(o *control.Options) { o.MaxRequests = 2 })
			cmd, expect, answer := d.talk(client, "crowd", path)
			expect("crowd")
			require.Eventually(t, func() bool { return cache.Status().Devices[0].BracketsWaiting > 0 }, time.Minute,
				time.Millisecond)
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
			waitIdle(t, cache)
		})
	}
}
