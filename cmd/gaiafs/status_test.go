package main

import (
	"encoding/json"
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
	views := []pagecache.ViewStatus{{User: 7, Bytes: 1}, {User: 8, Bytes: 2}}
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
	require.Equal(t, []pagecache.ViewStatus{{User: 8, Bytes: 2}}, shown.Files[0].Views)
	require.Equal(t, []control.Program{{Process: 2, User: 8}}, shown.Programs)
	require.EqualValues(t, 8, views[1].User, "the cache's own copy is unchanged")
	require.Equal(t, "private/diary", loss.File, "the cache's own copy is unchanged")
}

// TestStatusShowsViews: the text form names the views of a file.
func TestStatusShowsViews(t *testing.T) {
	s := statusDocument{Status: pagecache.Status{Files: []pagecache.FileStatus{{Name: "weights",
		Views: []pagecache.ViewStatus{
			{Device: 1, User: 1000, Bytes: 3 << 20, DeviceBytes: 4 << 20, Segments: 7, Files: 2, Mappings: 3},
			{Bytes: 1 << 20, DeviceBytes: 2 << 20, Segments: 1, Files: 1, Mappings: 1},
		}}}}}
	var b strings.Builder
	require.NoError(t, s.print(&b, false))
	require.Contains(t, b.String(),
		"view on gpu1: 3.0 MiB in 7 segments of 2 files, for user 1000, 3 mappings; 4.0 MiB of device memory\n")
	require.Contains(t, b.String(),
		"view on gpu0: 1.0 MiB in 1 segment, for user 0, 1 mapping; 2.0 MiB of device memory\n")
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
