package main

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/pagecache"
)

// serveFile is control.Options.File.
func (s *service) serveFile(ctx context.Context, r control.FileRequest) (any, error) {
	switch r.Operation {
	case control.FileInspect:
		in := s.cache.Inspect(r.Source.ID())
		in.Name = r.Source.Name()
		if mount := s.inService.Load(); mount != nil {
			in.Inode = mount.Inode(in.ID)
		}
		return inspectionFor(in, r.Viewer), nil
	case control.FileWarm:
		pages, err := s.cache.Warm(ctx, r.Source, pagecache.MapRequest{Device: r.Device, Off: r.Off, Len: r.Len,
			Process: r.Process, User: r.Viewer.User, Limited: !r.Viewer.All, Cgroup: r.Cgroup, Tenant: r.Tenant})
		return warmed{pages}, err
	case control.FileVerify:
		return s.cache.Verify(ctx, r.Source, r.Device, r.Off, r.Len)
	case control.FileEvict:
		return s.cache.Evict(ctx, r.Source.ID(), r.Device)
	case control.FileLock:
		return struct{}{}, s.cache.LockHome(ctx, r.Source)
	}
	return nil, syscall.EINVAL
}

// warmed answers a FILE request that warms.
type warmed struct {
	// Pages is how many pages were not up to date on the device before.
	Pages int64 `json:"pages"`
}

// inspectionFor removes what the viewer may not see: mappings of other users, and the users of their views.
func inspectionFor(in pagecache.Inspection, v control.Viewer) pagecache.Inspection {
	if v.All {
		return in
	}
	all := len(in.MappedBy)
	in.MappedBy = slices.DeleteFunc(in.MappedBy, func(w pagecache.MappingInfo) bool { return w.User != v.User })
	in.Others = all - len(in.MappedBy)
	in.Views = viewsFor(in.Views, v)
	return in
}

// oneCPUProfile is held while a CPU profile is recorded: the runtime records only one at a time.
var oneCPUProfile sync.Mutex

// serveProfile is control.Options.Profile.
func serveProfile(ctx context.Context, kind control.ProfileKind, length time.Duration) ([]byte, error) {
	var b bytes.Buffer
	if kind == control.ProfileCPU {
		if !oneCPUProfile.TryLock() {
			return nil, fmt.Errorf("a CPU profile is already being recorded: %w", syscall.EBUSY)
		}
		defer oneCPUProfile.Unlock()
		if err := pprof.StartCPUProfile(&b); err != nil {
			return nil, err
		}
		select {
		case <-time.After(length):
		case <-ctx.Done():
		}
		pprof.StopCPUProfile()
		return b.Bytes(), ctx.Err()
	}
	names := map[control.ProfileKind]string{control.ProfileHeap: "heap", control.ProfileGoroutines: "goroutine",
		control.ProfileStacks: "goroutine", control.ProfileBlock: "block", control.ProfileMutex: "mutex"}
	name := names[kind]
	if name == "" {
		return nil, fmt.Errorf("there is no profile of kind %d: %w", kind, syscall.EINVAL)
	}
	debug := 0
	if kind == control.ProfileStacks {
		debug = 2 // the format of a crash
	}
	err := pprof.Lookup(name).WriteTo(&b, debug)
	return b.Bytes(), err
}
