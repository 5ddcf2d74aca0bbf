// Package loopback serves go-fuse's loopback filesystem as something to compare with: mounted as go-fuse's own example
// does it, but with the kernel's passthrough off. With passthrough, which go-fuse uses when it is root, reads and
// writes never reach the daemon and one would measure the backing filesystem.
//
// It owns nothing but the mount, and knows nothing of gaiafs.
package loopback

import (
	"fmt"
	"os"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Options are what mounts differ in.
type Options struct {
	// MaxWrite is the largest read or write request in bytes; 0 stands for go-fuse's default, 128 KiB.
	MaxWrite int
	// ReadOnly has the kernel refuse every change.
	ReadOnly bool
	// SlowWrites is what each write takes longer, as on a slow disk.
	SlowWrites time.Duration
}

// slow is a filesystem of which writes are slow.
type slow struct {
	fuse.RawFileSystem
	by time.Duration
}

func (s slow) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	time.Sleep(s.by)
	return s.RawFileSystem.Write(cancel, in, data)
}

// Mount shows source at mountpoint and returns once it can be used. The caller ends it with Unmount.
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
