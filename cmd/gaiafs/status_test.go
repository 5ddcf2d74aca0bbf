package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// TestStatusNamesNoFilesOfOthers: users who neither mounted nor map a file see its size, but not its name.
func TestStatusNamesNoFilesOfOthers(t *testing.T) {
	id := pagecache.FileID{Dev: 0x803, Ino: 12}
	loss := &pagecache.Loss{Device: 1, ID: id, File: "private/diary", Pages: 3}
	views := []pagecache.ViewStatus{{User: 7, Bytes: 1, Segments: 3, HostBytes: 5}, {User: 8, Bytes: 2, Segments: 4}}
	status := func() statusDocument {
		return statusDocument{Status: pagecache.Status{
			Files:   []pagecache.FileStatus{{ID: id, Name: "private/diary", Mappings: 2, Views: views}},
			Losses:  []*pagecache.Loss{loss},
			Devices: []pagecache.DeviceStatus{{Users: []pagecache.UserPins{{User: 7, Bytes: 1}, {User: 8, Bytes: 2}}}},
		}, Programs: []control.Program{{Process: 1, User: 7}, {Process: 2, User: 8}}}
	}
	all := status().shownTo(control.Viewer{All: true})
	require.Equal(t, status(), all)

	shown := status().shownTo(control.Viewer{User: 8})
	require.Equal(t, "[803:12]", shown.Files[0].Name)
	require.Equal(t, 2, shown.Files[0].Mappings)
	require.Equal(t, "[803:12]", shown.Losses[0].File)
	require.EqualValues(t, 3, shown.Losses[0].Pages)
	require.Equal(t, []pagecache.UserPins{{User: 8, Bytes: 2}}, shown.Devices[0].Users)
	require.Equal(t, []pagecache.ViewStatus{{User: stranger.User, Bytes: 1}, {User: 8, Bytes: 2, Segments: 4}},
		shown.Files[0].Views)
	require.Equal(t, []control.Program{{Process: 2, User: 8}}, shown.Programs)
	require.EqualValues(t, 7, views[0].User, "the cache's own copy is unchanged")
	require.Equal(t, "private/diary", loss.File, "the cache's own copy is unchanged")
}

// TestStatusAlignsFiles: a file's views are rows of the table, and a remark on a file does not end its columns.
func TestStatusAlignsFiles(t *testing.T) {
	s := statusDocument{Status: pagecache.Status{Files: []pagecache.FileStatus{
		{Name: "weights", SizeBytes: 1 << 20, Mappings: 1, BusySeconds: 2, Error: "no space",
			Holders: []pagecache.HoldingStatus{{Device: 10, Resident: 12345, Dirty: 3}},
			Views: []pagecache.ViewStatus{{Device: 1, Mappings: 3, Resident: 9, Stale: 8},
				{Mappings: 1, Resident: 7}}},
		{Name: "a longer name", SizeBytes: 5, Pinned: "host"},
	}}}
	var b strings.Builder
	require.NoError(t, s.print(&b, false))
	require.Contains(t, b.String(), `
  file           size     mappings  where      resident  stale  dirty  bases  overlaps
  weights        1.0 MiB  5         gpu10      12345     0      3      0      0 B
                                    gpu1 view  9         8      0
                                    gpu0 view  7         0      0
    has not answered for 2.0 s; this is its last known state
    0 B wait to be written back: no space
  a longer name  5 B      0         -          0         0      0      0      0 B

`)
}

// TestStatusOfManyFiles: status lists 50 idle files, counts the others, and leaves out no file that is in use or fails.
func TestStatusOfManyFiles(t *testing.T) {
	var s statusDocument
	for i := range 60 {
		s.Files = append(s.Files, pagecache.FileStatus{Name: fmt.Sprintf("idle%d", i)})
	}
	s.Files = append(s.Files, pagecache.FileStatus{Name: "mapped", Mappings: 1}, pagecache.FileStatus{Name: "failing",
		Error: "no space"}, pagecache.FileStatus{Name: "waiting", WaitingBytes: 1})
	var few, all strings.Builder
	require.NoError(t, s.print(&few, false))
	require.Equal(t, 50, strings.Count(few.String(), "  idle"))
	require.Contains(t, few.String(), "\n  10 files more that no program maps: --all lists all\n")
	for _, name := range []string{"mapped", "failing", "waiting"} {
		require.Contains(t, few.String(), "\n  "+name+" ")
	}
	require.NoError(t, s.print(&all, true))
	require.Equal(t, 60, strings.Count(all.String(), "  idle"))
	require.NotContains(t, all.String(), "more that no program maps")
}

// TestStatusNamesEvictions: a row of evictions has a heading that says which column is the reason and which the rule.
func TestStatusNamesEvictions(t *testing.T) {
	var s statusDocument
	require.NoError(t, json.Unmarshal([]byte(
		`{"devices": [{"evicted": [{"why": "maximum", "rule": "lru", "extents": 6, "bytes": 12582912}]}]}`), &s))
	var b strings.Builder
	require.NoError(t, s.print(&b, false))
	require.Contains(t, b.String(), `
        from    why      rule  size    extents
  gpu0  device  maximum  lru   12 MiB  6
`)
}

// TestViewText: a view is described with its files and, to users who may know, with its user.
func TestViewText(t *testing.T) {
	v := pagecache.ViewStatus{Device: 1, User: 1000, Bytes: 3 << 20, DeviceBytes: 4 << 20, Segments: 7, Files: 1,
		Mappings: 3, FileBytes: 3 << 20, Resident: 768, Clean: 768}
	require.Equal(t, "on gpu1: 3.0 MiB in 7 segments, for user 1000, 3 mappings; 4.0 MiB of device memory", viewText(v))
	v.Files, v.FileBytes, v.Resident, v.Clean, v.Stale = 2, 1<<20, 256, 128, 128
	require.Equal(t, "on gpu1: 3.0 MiB in 7 segments of 2 files, 1.0 MiB of them of this one, 512 KiB stale, "+
		"for user 1000, 3 mappings; 4.0 MiB of device memory", viewText(v))
	v = viewsFor([]pagecache.ViewStatus{v}, control.Viewer{User: 1001})[0]
	require.Equal(t, "on gpu1: 3.0 MiB, 512 KiB stale, for another user, 3 mappings; 4.0 MiB of device memory",
		viewText(v))
}

// TestCommandSourceEvents tries each kind of events, and none.
func TestCommandSourceEvents(t *testing.T) {
	for _, word := range []string{fs.EventsAuto, fs.EventsAll, fs.EventsFanotify, fs.EventsInotify, fs.EventsOff} {
		t.Run(word, func(t *testing.T) {
			s := mountForeground(t, "--gpus=none", "--source-events="+word)
			r := gaiafsCommand(t, "status", "--json", s.mountpoint)
			require.Equal(t, exitOK, r.code)
			var document statusDocument
			require.NoError(t, json.Unmarshal([]byte(r.out), &document))
			s.signal(t, syscall.SIGTERM)
			require.Equal(t, exitOK, s.end(t))
			want := []string{word}
			if word != fs.EventsOff { // the kernel may support fewer kinds
				want = []string{fs.EventsOff, word}
			}
			if word == fs.EventsAuto || word == fs.EventsAll { // files pass through if they can
				want = []string{fs.EventsAll, fs.EventsFanotify, fs.EventsInotify, fs.EventsOff}
			}
			require.Contains(t, want, document.Mount.Events)
		})
	}
}
