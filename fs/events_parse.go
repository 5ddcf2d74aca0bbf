package fs

import (
	"encoding/binary"
	"iter"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// event is a change of a file. With overflow, the changed files are unknown.
type event struct {
	id       string
	own      bool // this process made it
	overflow bool // events were dropped
}

var ownPID = int32(os.Getpid())

// parseFanotify returns the events in a buffer that was read from fanotify(7).
func parseFanotify(b []byte) iter.Seq[event] {
	return func(yield func(event) bool) {
		for le := binary.NativeEndian; len(b) >= unix.FAN_EVENT_METADATA_LEN; {
			size, from := int(le.Uint32(b)), int(le.Uint16(b[6:]))
			if size < unix.FAN_EVENT_METADATA_LEN || size > len(b) || from > size {
				return
			}
			ev := event{overflow: le.Uint64(b[8:])&unix.FAN_Q_OVERFLOW != 0, own: int32(le.Uint32(b[20:])) == ownPID}
			ev.id, b = handleIn(b[from:size]), b[size:]
			if !yield(ev) {
				return
			}
		}
	}
}

// handleIn returns the id of the file in the record after an event, "" if there is none.
func handleIn(info []byte) string {
	const header, handle = 4, 16 // bytes before the fsid, and from the fsid to the bytes of the handle
	if len(info) < header+handle || info[0] != unix.FAN_EVENT_INFO_TYPE_FID {
		return ""
	}
	info = info[header:]
	if end := handle + int64(binary.NativeEndian.Uint32(info[8:])); end <= int64(len(info)) {
		return string(info[:end])
	}
	return ""
}

// parseInotify returns the events in a buffer that was read from inotify(7). They do not say who made a change.
func parseInotify(b []byte) iter.Seq[event] {
	return func(yield func(event) bool) {
		for le := binary.NativeEndian; len(b) >= unix.SizeofInotifyEvent; {
			mask, size := le.Uint32(b[4:]), unix.SizeofInotifyEvent+int64(le.Uint32(b[12:]))
			ev := event{overflow: mask&unix.IN_Q_OVERFLOW != 0}
			if mask&unix.IN_MODIFY != 0 {
				ev.id = strconv.Itoa(int(int32(le.Uint32(b))))
			}
			b = b[min(size, int64(len(b))):]
			if !yield(ev) {
				return
			}
		}
	}
}
