// Package loopback serves go-fuse's loopback filesystem as something to compare with: mounted as go-fuse's own example
// does it, but with the kernel's passthrough off. With passthrough, which go-fuse uses when it is root, reads and writes
// never reach the daemon and one would measure the backing filesystem.
//
// It owns nothing but the mount, and knows nothing of gaiafs.
package loopback

import (
	"fmt"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// Mount shows source at mountpoint and returns once it can be used. maxWrite is the largest read or write request in bytes;
// 0 stands for go-fuse's default, 128 KiB. The caller ends it with Unmount.
func Mount(source, mountpoint string, maxWrite int) (*fuse.Server, error) {
	root, err := fs.NewLoopbackRoot(source)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be shown: %w", source, err)
	}
	second := time.Second
	return fs.Mount(mountpoint, root, &fs.Options{
		AttrTimeout:     &second,
		EntryTimeout:    &second,
		NullPermissions: true,
		MountOptions: fuse.MountOptions{
			FsName:               source,
			Name:                 "loopback",
			MaxWrite:             maxWrite,
			DirectMount:          true,
			DisabledCapabilities: fuse.CAP_PASSTHROUGH,
		},
	})
}
