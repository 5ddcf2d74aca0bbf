package fs

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Filesystems may be mounted below SOURCE, and unmounted, while the mount exists. The daemon tells the kernel at once:
// no event reports this (tree.go), and the kernel may keep the name for a minute. The daemon keeps no descriptor on
// such a filesystem, except for open files and files that devices hold. Otherwise the filesystem could not be
// unmounted.

// followBelow makes the kernel look up again the names of mountpoints below SOURCE that appear or disappear, until ctx
// ends. It tells the kernel twice, as tree does.
func (fs *fileSystem) followBelow(ctx context.Context) {
	latest := make(chan []MountInfo, 1)
	fs.strict.follow(func(mounts []MountInfo) {
		select {
		case <-latest:
		default:
		}
		latest <- mounts // does not block: calls come one at a time
	})
	var known map[mountBelow]struct{}
	var again []changedBelow // oldest first
	for {
		var due <-chan time.Time
		if len(again) > 0 {
			due = time.After(time.Until(again[0].at))
		}
		select {
		case <-ctx.Done():
			return
		case <-due:
			fs.expirePaths(again[0].paths)
			again = again[1:]
		case mounts := <-latest:
			now := fs.mountsBelow(mounts)
			if changed := changedPaths(known, now); len(changed) > 0 {
				fs.expirePaths(changed)
				again = append(again, changedBelow{time.Now().Add(againAfter), changed})
			}
			known = now
		}
	}
}

// changedBelow are paths in SOURCE that the kernel is told of a second time.
type changedBelow struct {
	at    time.Time
	paths map[string]struct{}
}

// mountBelow is a mount below SOURCE.
type mountBelow struct {
	number uint64 // the kernel's mount number, which may be reused
	device string
	path   string // in SOURCE
}

// mountsBelow returns the mounts that are below SOURCE.
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
			found[mountBelow{m.number, m.Device, path}] = struct{}{}
		}
	}
	return found
}

// changedPaths returns the paths of mounts that are in only one of a and b.
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

// expirePaths makes the kernel look up some paths in SOURCE again. It finds them by their directories: a file that is
// mounted there may have been looked up last by another name.
func (fs *fileSystem) expirePaths(paths map[string]struct{}) {
	names := make(map[string][]string) // names, by the path of their directory
	bases := make(map[string]struct{}) // last elements of these directory paths
	for path := range paths {
		dir, name := filepath.Split(path)
		dir = strings.TrimSuffix(dir, "/")
		names[dir] = append(names[dir], name)
		bases[dir[strings.LastIndexByte(dir, '/')+1:]] = struct{}{}
	}
	for _, n := range fs.table.byID.all() {
		n.mu.Lock()
		base := n.where.name // empty for the root
		n.mu.Unlock()
		if _, may := bases[base]; !may || n.kind != unix.S_IFDIR {
			continue
		}
		for _, name := range names[n.path()] {
			fs.expire(n, name)
		}
	}
}
