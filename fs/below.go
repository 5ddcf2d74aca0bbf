package fs

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"time"
)

// Filesystems may be mounted below SOURCE, and unmounted, while the mount is there. The kernel is told at once, since
// no event tells of it (tree.go) and the kernel may keep the name for a minute. The daemon keeps no descriptor on such
// a filesystem but for what is open or devices hold, or it could not be unmounted.

// followBelow has the kernel drop the names of mountpoints below SOURCE that appear or go away, until ctx ends. As for
// other changes (tree), it tells the kernel twice.
func (fs *fileSystem) followBelow(ctx context.Context) {
	latest := make(chan []MountInfo, 1)
	fs.strict.follow(func(mounts []MountInfo) {
		select {
		case <-latest:
		default:
		}
		latest <- mounts // only one at a time is here
	})
	var known map[mountBelow]struct{}
	again := make(map[string]struct{})
	var later <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-later:
			fs.dropPaths(again)
			clear(again)
			later = nil
		case mounts := <-latest:
			now := fs.mountsBelow(mounts)
			if changed := changedPaths(known, now); len(changed) > 0 {
				fs.dropPaths(changed)
				maps.Copy(again, changed)
				later = time.After(againAfter)
			}
			known = now
		}
	}
}

// mountBelow is a mount below SOURCE.
type mountBelow struct {
	number uint64 // the kernel's
	path   string // in SOURCE
}

// mountsBelow returns those of mounts that are below SOURCE.
func (fs *fileSystem) mountsBelow(mounts []MountInfo) map[mountBelow]struct{} {
	found := make(map[mountBelow]struct{})
	source, err := os.Readlink(procPath(fs.root.fd))
	if err != nil {
		return found
	}
	for _, m := range mounts {
		if m.Mountpoint == source || !below(m.Mountpoint, source) {
			continue
		}
		if path, err := filepath.Rel(source, m.Mountpoint); err == nil {
			found[mountBelow{m.number, path}] = struct{}{}
		}
	}
	return found
}

// changedPaths returns where a mount is in one of a and b only.
func changedPaths(a, b map[mountBelow]struct{}) map[string]struct{} {
	changed := make(map[string]struct{})
	for _, pair := range [][2]map[mountBelow]struct{}{{a, b}, {b, a}} {
		for m := range pair[0] {
			if _, both := pair[1][m]; !both {
				changed[m.path] = struct{}{}
			}
		}
	}
	return changed
}

// dropPaths has the kernel drop the names that lead to some paths in SOURCE.
func (fs *fileSystem) dropPaths(paths map[string]struct{}) {
	bases := make(map[string]struct{}, len(paths))
	for path := range paths {
		bases[filepath.Base(path)] = struct{}{}
	}
	for _, n := range fs.table.byID.all() {
		n.mu.Lock()
		where := n.where
		n.mu.Unlock()
		if _, may := bases[where.name]; !may || where.parent == nil {
			continue
		}
		if _, is := paths[n.path()]; is {
			fs.dropName(where.parent, where.name)
		}
	}
}
