package main

import (
	"encoding/json"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// TestStatusNamesNoFilesOfOthers: who neither mounted nor maps a file is told what it takes, and not what it is called.
func TestStatusNamesNoFilesOfOthers(t *testing.T) {
	id := pagecache.FileID{Dev: 0x803, Ino: 12}
	loss := &pagecache.Loss{Device: 1, ID: id, File: "private/diary", Pages: 3}
	status := func() statusDocument {
		return statusDocument{Status: pagecache.Status{
			Files:   []pagecache.FileStatus{{ID: id, Name: "private/diary", Mappings: 2}},
			Losses:  []*pagecache.Loss{loss},
			Devices: []pagecache.DeviceStatus{{Users: []pagecache.UserPins{{User: 7, Bytes: 1}, {User: 8, Bytes: 2}}}},
		}}
	}
	all := status().shownTo(control.Viewer{All: true})
	require.Equal(t, status(), all)

	shown := status().shownTo(control.Viewer{User: 8})
	require.Equal(t, "[803:12]", shown.Files[0].Name)
	require.Equal(t, 2, shown.Files[0].Mappings)
	require.Equal(t, "[803:12]", shown.Losses[0].File)
	require.EqualValues(t, 3, shown.Losses[0].Pages)
	require.Equal(t, []pagecache.UserPins{{User: 8, Bytes: 2}}, shown.Devices[0].Users)
	require.Equal(t, "private/diary", loss.File, "the cache's own is left as it is")
}

// TestCommandSourceEvents asks for each kind of events, and for none.
func TestCommandSourceEvents(t *testing.T) {
	for _, word := range []string{fs.EventsAuto, fs.EventsFanotify, fs.EventsInotify, fs.EventsOff} {
		t.Run(word, func(t *testing.T) {
			s := mountForeground(t, "--gpus=none", "--source-events="+word)
			r := gaiafsCommand(t, "status", "--json", s.mountpoint)
			require.Equal(t, exitOK, r.code)
			var document statusDocument
			require.NoError(t, json.Unmarshal([]byte(r.out), &document))
			s.signal(t, syscall.SIGTERM)
			require.Equal(t, exitOK, s.end(t))
			want := []string{word}
			if word != fs.EventsOff { // the kernel may have less
				want = []string{fs.EventsOff, word}
			}
			if word == fs.EventsAuto {
				want = []string{fs.EventsFanotify, fs.EventsInotify, fs.EventsOff}
			}
			require.Contains(t, want, document.Mount.Events)
		})
	}
}
