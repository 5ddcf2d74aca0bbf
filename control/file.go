package control

import (
	"encoding/binary"
	"encoding/json"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
)

// FileOperation is the operation of a FILE request.
type FileOperation uint32

// The operations of FILE requests.
const (
	FileInspect FileOperation = 1
	FileWarm    FileOperation = 2
	FileVerify  FileOperation = 3
	FileEvict   FileOperation = 4
	// FileLock locks the pages of a file that is pinned on the host.
	FileLock FileOperation = 5
)

// allDevices in a FILE means every device. Only FileEvict allows it.
const allDevices = 1<<32 - 1

// FileRequest is a client's request about a file.
type FileRequest struct {
	Operation FileOperation
	Viewer    Viewer
	Source    pagecache.Source
	// Device is the mount's number of the device; -1 means all.
	Device   int
	Off, Len int64
	Process  uint32
	// Cgroup and Tenant are as in a pagecache.MapRequest.
	Cgroup func() (string, error)
	Tenant string
}

// fileRequest is the body of FILE.
type fileRequest struct {
	token     [tokenSize]byte
	operation FileOperation
	device    uint32
	off, len  int64
}

func (v version) decodeFile(body []byte) (r fileRequest, err error) {
	if err := v.wantBody(body, tokenSize+24); err != nil {
		return r, err
	}
	copy(r.token[:], body)
	body = body[tokenSize:]
	r.operation = FileOperation(binary.LittleEndian.Uint32(body))
	r.device = binary.LittleEndian.Uint32(body[4:])
	r.off = int64(binary.LittleEndian.Uint64(body[8:]))
	r.len = int64(binary.LittleEndian.Uint64(body[16:]))
	return r, nil
}

// profileRequest is the body of PROFILE.
type profileRequest struct {
	token [tokenSize]byte
	kind  ProfileKind
	ms    uint32
}

// ProfileKind is the kind of profile that a PROFILE asks for.
type ProfileKind uint32

// The kinds of profiles.
const (
	ProfileCPU        ProfileKind = 1
	ProfileHeap       ProfileKind = 2
	ProfileGoroutines ProfileKind = 3
	ProfileStacks     ProfileKind = 4 // of all goroutines, as text
	ProfileBlock      ProfileKind = 5
	ProfileMutex      ProfileKind = 6
)

// mostProfile bounds the length of a profile.
const mostProfile = 10 * time.Minute

func (v version) decodeProfile(body []byte) (r profileRequest, err error) {
	if err := v.wantBody(body, tokenSize+8); err != nil {
		return r, err
	}
	copy(r.token[:], body)
	r.kind = ProfileKind(binary.LittleEndian.Uint32(body[tokenSize:]))
	r.ms = binary.LittleEndian.Uint32(body[tokenSize+4:])
	return r, nil
}

// serveFile answers a FILE.
func (s *session) serveFile(id requestID, r fileRequest) {
	doc, err := s.askFile(r)
	s.finishDocument(id, doc, err)
}

// askFile lets Options.File answer, if the descriptor behind the token gives the right. A descriptor that is open for
// reading is enough to inspect the file and to bring it to a device, as for MAP. Only root and the user who mounted may
// evict it.
func (s *session) askFile(r fileRequest) ([]byte, error) {
	src, err := s.redeem(r.token)
	switch {
	case err != nil:
		return nil, err
	case s.server.opts.File == nil:
		return nil, failure(syscall.ENOTSUP, "this server does not answer requests about files")
	case !src.Readable():
		return nil, failure(syscall.EACCES, "%s is not open for reading", src.Name())
	case r.operation < FileInspect || r.operation > FileLock:
		return nil, failure(syscall.EINVAL, "operation %d on files is not known", r.operation)
	case r.operation == FileEvict && s.ordinary:
		return nil, failure(syscall.EPERM, "only root and the user who mounted may evict files")
	case r.off < 0 || r.len < 0 || !rangeWithin(r.off, r.len, mapEnd):
		return nil, failure(syscall.EINVAL, "%d bytes at %d are not in a file", uint64(r.len), uint64(r.off))
	case r.device == allDevices && r.operation != FileEvict, r.device != allDevices && r.device > 1<<16:
		return nil, failure(syscall.ENODEV, "there is no device %d", r.device)
	}
	q := FileRequest{Operation: r.operation, Viewer: s.viewer(), Source: src, Device: int(r.device), Off: r.off,
		Len:     r.len,
		Process: uint32(s.who.Pid), Cgroup: s.cgroup, Tenant: s.tenant}
	if r.device == allDevices {
		q.Device = -1
	}
	answer, err := s.server.opts.File(s.ctx, q)
	if err != nil {
		return nil, err
	}
	return json.Marshal(answer)
}

// serveProfile answers a PROFILE.
func (s *session) serveProfile(id requestID, r profileRequest) {
	var doc []byte
	var err error
	length := time.Duration(r.ms) * time.Millisecond
	switch {
	case !s.redeemMount(r.token):
		err = errToken
	case s.ordinary:
		err = failure(syscall.EPERM, "only root and the user who mounted may profile the daemon")
	case s.server.opts.Profile == nil:
		err = failure(syscall.ENOTSUP, "this server makes no profiles")
	case length > mostProfile:
		err = failure(syscall.EINVAL, "a profile takes %s at most", mostProfile)
	default:
		doc, err = s.server.opts.Profile(s.ctx, r.kind, length)
	}
	s.finishDocument(id, doc, err)
}

// finishDocument answers with a document in as many frames as it takes, or with an error.
func (s *session) finishDocument(id requestID, doc []byte, err error) {
	if err == nil {
		err = s.server.allowance.keep(s, id, int64(len(doc)))
	}
	if err != nil {
		s.finish(id, err)
		return
	}
	const most = maxFrame - headerSize
	for len(doc) > most {
		if s.sendDocument(id, flagMore, doc[:most]) != nil {
			s.forget(id)
			return
		}
		doc = doc[most:]
	}
	s.forget(id)
	_ = s.sendDocument(id, 0, doc) // a failed write closed the connection
}
