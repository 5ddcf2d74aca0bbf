package control

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// watchRequest is the body of WATCH: a token for the mount, and a live.Filter as JSON.
type watchRequest struct {
	token  [tokenSize]byte
	filter live.Filter
	wrong  error // the filter's error
}

// mostFilter bounds the JSON of a filter, in bytes.
const mostFilter = 2 << 10

func (v version) decodeWatch(body []byte) (r watchRequest, err error) {
	if len(body) < tokenSize || len(body) > tokenSize+mostFilter {
		return r, fmt.Errorf("a WATCH cannot have %d bytes", len(body))
	}
	copy(r.token[:], body)
	if r.wrong = json.Unmarshal(body[tokenSize:], &r.filter); r.wrong == nil {
		r.wrong = r.filter.Check()
	}
	return r, nil
}

// serveWatch sends events as they come, one JSON document per line, until the client closes the connection. Root and
// the user who mounted see all events. Others see their own programs' events, with the names of files that they map.
func (s *session) serveWatch(id requestID, r watchRequest) {
	switch feed := s.server.opts.Live; {
	case !s.redeemMount(r.token):
		s.finish(id, errToken)
	case feed == nil:
		s.finish(id, failure(syscall.ENOTSUP, "this server reports no events"))
	case r.wrong != nil:
		s.finish(id, failure(syscall.EINVAL, "the filter cannot be read: %v", r.wrong))
	case s.ordinary && r.filter.Path != "":
		// Whether events come would tell whether the file exists.
		s.finish(id, failure(syscall.EPERM, "only root and the user who mounted may watch paths"))
	case !s.server.countWatch(s, 1):
		s.finish(id, failure(syscall.EAGAIN, "this user already has %d watches, which are all that one user may have",
			mostWatches))
	default:
		defer s.server.countWatch(s, -1)
		s.watch(id, feed.Watch(r.filter))
	}
}

// mostWatches is how many watches an ordinary user may have, because events wait in each.
const mostWatches = 16

// countWatch counts a watch of a session's user, or with -1 its end. It reports false if the user may have no further
// one.
func (s *Server) countWatch(of *session, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > 0 && of.ordinary && of.user.watches >= mostWatches {
		return false
	}
	of.user.watches += n
	return true
}

func (s *session) watch(id requestID, w *live.Watch) {
	defer w.Stop()
	defer s.forget(id)
	if s.sendDocument(id, flagMore, nil) != nil { // says that it has begun
		return
	}
	const most = maxFrame - headerSize
	for s.ctx.Err() == nil {
		viewer := s.viewer()
		var lines []byte
		for _, e := range w.Next(s.ctx) {
			if !viewer.shows(&e) {
				continue
			}
			line, err := json.Marshal(e)
			if err != nil || len(line) >= most {
				continue // its path is too long for a frame
			}
			if len(lines)+len(line)+1 > most {
				if s.sendDocument(id, flagMore, lines) != nil {
					return
				}
				lines = lines[:0]
			}
			lines = append(append(lines, line...), '\n')
		}
		if len(lines) > 0 && s.sendDocument(id, flagMore, lines) != nil {
			return
		}
	}
}

// shows reports whether the viewer may see an event. It removes from the event what the viewer may not know.
func (v Viewer) shows(e *live.Event) bool {
	if v.All {
		return true
	}
	if e.Process == 0 || e.User != v.User {
		return false
	}
	e.Lost = 0 // counts others' events, too
	if e.File != "" && !v.Knows(pagecache.FileID(e.ID)) {
		e.File = "[" + pagecache.FileID(e.ID).String() + "]"
	}
	return true
}

// watchedNames names the requests that watchers see.
var watchedNames = map[frameType]string{
	typeMap: "map", typeMapView: "map-view", typeAcquire: "acquire", typeRelease: "release", typeSync: "sync",
	typeAdvise: "advise",
	typeUnmap:  "unmap", typeUse: "use", typeStatus: "status", typeRecord: "record", typeEnd: "end", typeFile: "file",
	typeProfile: "profile", typeBeginGroup: "begin-group", typeReleaseGroup: "release-group",
	typeAbortGroup: "abort-group",
	typeAcquireAll: "acquire-all",
}

// WatchedKinds names the requests that watchers see, in no order.
func WatchedKinds() []string { return slices.Collect(maps.Values(watchedNames)) }

// watched is what a request is about, for watchers.
type watched struct {
	seen     bool // somebody was watching when the request came
	files    []watchedFiles
	off, len int64
	device   string
}

// watchedFiles is the first of some files, and the names of them all.
type watchedFiles struct {
	first pagecache.FileID
	names func() []string
}

// about finds out what a request is about, if somebody is watching.
func (s *session) about(t frameType, body []byte) (w watched) {
	if !s.server.opts.Live.On() {
		return w
	}
	switch t {
	case typeAcquire, typeRelease, typeSync, typeAdvise:
		if r, err := s.version.decodeRange(body); err == nil {
			w.mapping(s, r.mapping)
			w.off, w.len = r.off, r.len
		}
	case typeUnmap:
		if m, err := s.version.decodeUnmap(body); err == nil {
			w.mapping(s, m)
		}
	case typeAcquireAll:
		if r, err := decodeAcquireAll(body); err == nil {
			w.ranges(s, r.ranges)
		}
	case typeBeginGroup:
		if ranges, err := decodeGroupRanges(body); err == nil {
			w.ranges(s, ranges)
		}
	case typeMap:
		if r, err := s.version.decodeMap(body); err == nil {
			w.token(s, r.token)
			w.place(r.device, r.uuid)
			w.off, w.len = r.off, r.len
		}
	case typeMapView:
		if r, err := s.version.decodeMapView(body); err == nil {
			for _, token := range r.tokens {
				w.token(s, token)
			}
			w.place(r.device, r.uuid)
		}
	case typeFile:
		if r, err := s.version.decodeFile(body); err == nil {
			w.token(s, r.token)
			w.off, w.len = r.off, r.len
		}
	}
	w.seen = true
	return w
}

// mapping adds the files of a mapping.
func (w *watched) mapping(s *session, id mappingID) {
	m, ok := s.use(id)
	if !ok {
		return
	}
	defer m.users.Done()
	w.device = fmt.Sprint("gpu", m.Device().Ordinal)
	if named, ok := m.Mapping.(interface{ Names() []string }); ok && len(m.files) > 0 {
		w.files = append(w.files, watchedFiles{m.files[0], named.Names})
	}
}

// ranges adds the files of mappings. The device is that of all of them, or none.
func (w *watched) ranges(s *session, ranges []groupRange) {
	seen := make(map[mappingID]bool)
	device := ""
	for _, r := range ranges {
		if !seen[r.mapping] {
			seen[r.mapping] = true
			if w.mapping(s, r.mapping); len(seen) > 1 && w.device != device {
				w.device = ""
			}
			device = w.device
		}
	}
}

// token adds the file that a token gives access to.
func (w *watched) token(s *session, token [tokenSize]byte) {
	if src := s.server.tokens.peek(token); src != nil {
		w.files = append(w.files, watchedFiles{src.ID(), func() []string { return []string{src.Name()} }})
	}
}

// place notes the device that a client names by its number.
func (w *watched) place(device uint32, uuid [uuidSize]byte) {
	if uuid == [uuidSize]byte{} {
		w.device = fmt.Sprint("gpu", device)
	}
}

// showMove shows a MOVE that the client answered to watchers.
func (s *session) showMove(off, n int64, to pagecache.Tier, began time.Time) {
	feed := s.server.opts.Live
	if !feed.On() {
		return
	}
	feed.Send(live.Event{At: began, Micros: float64(time.Since(began)) / 1e3, Kind: "move",
		Process: uint32(s.who.Pid), User: s.who.Uid, Offset: off, Bytes: n, Detail: tierWords[to]}, nil)
}

var tierWords = map[pagecache.Tier]string{
	pagecache.TierNone: "to nowhere", pagecache.TierDevice: "to the device", pagecache.TierHost: "to pinned memory",
}

// show shows a request that has ended to watchers. A request that came before anybody watched is skipped, because it is
// not known what it was about.
func (s *session) show(t frameType, of watched, began time.Time) {
	feed := s.server.opts.Live
	if !of.seen || !feed.On() || watchedNames[t] == "" {
		return
	}
	e := live.Event{At: began, Micros: float64(time.Since(began)) / 1e3, Kind: watchedNames[t],
		Process: uint32(s.who.Pid), User: s.who.Uid, Offset: of.off, Bytes: of.len, Device: of.device}
	if len(of.files) == 0 {
		feed.Send(e, nil)
		return
	}
	e.ID = live.FileID(of.files[0].first)
	feed.Send(e, func() (names []string) {
		seen := make(map[string]bool)
		for _, f := range of.files {
			for _, name := range f.names() {
				if !seen[name] {
					seen[name], names = true, append(names, name)
				}
			}
		}
		return names
	})
}
