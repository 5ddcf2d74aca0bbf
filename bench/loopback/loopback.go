// Package loopback serves go-fuse's loopback filesystem for comparison. It mounts as go-fuse's own example does, but
// without the kernel's passthrough. go-fuse uses passthrough if it is root; reads and writes would then never reach the
// daemon, and the bench would measure the backing filesystem.
//
// It owns only the mount, and knows nothing of gaiafs.
package loopback

import (
	"fmt"
	"os"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Options are what can differ between mounts.
type Options struct {
	// MaxWrite is the largest read or write request in bytes; 0 means go-fuse's default, 128 KiB.
	MaxWrite int
	// ReadOnly makes the kernel refuse all changes.
	ReadOnly bool
	// SlowWrites is added to the duration of each write, as on a slow disk.
	SlowWrites time.Duration
}

// slow is a filesystem with slow writes.
type slow struct {
	fuse.RawFileSystem
	by time.Duration
}

func (s slow) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	time.Sleep(s.by)
	return s.RawFileSystem.Write(cancel, in, data)
}

// Mount shows source at mountpoint and returns when the mount is usable. The caller ends it with Unmount.
func Mount(source, mountpoint string, o Options) (*fuse.Server, error) {
	root, err := fs.NewLoopbackRoot(source)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be shown: %w", source, err)
	}
	second := time.Second
	m := fuse.MountOptions{
		FsName:               source,
		Name:                 "loopback",
		MaxWrite:             o.MaxWrite,
		DirectMount:          true,
		DisabledCapabilities: fuse.CAP_PASSTHROUGH,
	}
	switch { // only fusermount3, which mounts for users, knows the word
	case o.ReadOnly && os.Geteuid() == 0:
		m.DirectMountFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_RDONLY
	case o.ReadOnly:
		m.Options = []string{"ro"}
	}
	raw := fs.NewNodeFS(root, &fs.Options{
		AttrTimeout:     &second,
		EntryTimeout:    &second,
		NullPermissions: true,
		MountOptions:    m,
	})
	if o.SlowWrites > 0 {
		raw = slow{raw, o.SlowWrites}
	}
	server, err := fuse.NewServer(raw, mountpoint, &m)
	if err != nil {
		return nil, err
	}
	go server.Serve()
	return server, server.WaitMount()
}
