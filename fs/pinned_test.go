package fs

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Parameters of the program below. It reads blocks that are filled with their number.
const (
	pinnedBlock  = 2048
	pinnedBlocks = 1024
)

func init() { programs["read into a mapping"] = readIntoMapping }

// readIntoMapping is a program: path, file to read, open flags, reads. It maps a page of path, and reads blocks of the
// other file directly into the mapping. It prints how many completed reads it could not find there.
func readIntoMapping(args []string) error {
	flags, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	reads, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	from, err := unix.Open(args[1], flags, 0)
	if err != nil {
		return err
	}
	fd, err := unix.Open(args[0], unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	lost := 0
	for i := range reads {
		k := i % pinnedBlocks
		if n, err := unix.Pread(from, m[:pinnedBlock], int64(k)*pinnedBlock); err != nil || n != pinnedBlock {
			return fmt.Errorf("read %d of %d bytes: %w", n, pinnedBlock, err)
		}
		if !bytes.Equal(m[:pinnedBlock], blockOf(k)) {
			lost++
		}
	}
	fmt.Println(lost)
	return nil
}

// blockOf is block k.
func blockOf(k int) []byte {
	return bytes.Repeat(binary.NativeEndian.AppendUint64(nil, uint64(k)+1), pinnedBlock/8)
}

// TestDirectReadsIntoMappings shows what the kernel does to O_DIRECT reads into a mapping of a FUSE file. It fills
// pages that it pinned before the read, and drops these pages during the read if the daemon says so. go-fuse's loopback
// loses such reads as gaiafs does. Buffered reads are not lost, and neither is anything if the daemon stores bytes into
// the kernel's pages instead.
func TestDirectReadsIntoMappings(t *testing.T) {
	dir := t.TempDir()
	var data []byte
	for k := range pinnedBlocks {
		data = append(data, blockOf(k)...)
	}
	blocks := filepath.Join(dir, "blocks")
	require.NoError(t, os.WriteFile(blocks, data, 0o600))
	fd, err := unix.Open(blocks, unix.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Skipf("%s is on a filesystem without O_DIRECT: %v", dir, err)
	}
	require.NoError(t, unix.Close(fd))

	root, err := gofuse.NewLoopbackRoot(dir)
	require.NoError(t, err)
	mnt := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte{1}, 4096), 0o600))
	second := time.Second
	server, err := gofuse.Mount(mnt, root, &gofuse.Options{AttrTimeout: &second, EntryTimeout: &second,
		MountOptions: fuse.MountOptions{
			DirectMount: true, DisabledCapabilities: fuse.CAP_PASSTHROUGH, ExplicitDataCacheControl: true,
		}})
	require.NoError(t, err)
	defer func() { assert.NoError(t, server.Unmount()) }()
	path := filepath.Join(mnt, "file")
	_, err = os.Stat(path)
	require.NoError(t, err)
	inode := root.EmbeddedInode().GetChild("file")

	// lost runs the program while it calls notify repeatedly.
	lost := func(flags int, notify func(i int)) (n int) {
		p := program("read into a mapping", path, blocks, strconv.Itoa(flags), "5000")
		p.Stderr = os.Stderr
		ctx, cancel := context.WithCancel(t.Context())
		var notifying sync.WaitGroup
		notifying.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				notify(i)
			}
		})
		out, err := p.Output()
		cancel()
		notifying.Wait()
		require.NoError(t, err)
		n, err = strconv.Atoi(strings.TrimSpace(string(out)))
		require.NoError(t, err)
		return n
	}
	drop := func(int) { inode.NotifyContent(0, 4096) }
	store := func(i int) { inode.WriteCache(3000, []byte{byte(i)}) }
	assert.Zero(t, lost(unix.O_RDONLY, drop), "buffered reads, pages are dropped")
	assert.Zero(t, lost(unix.O_RDONLY|unix.O_DIRECT, store), "O_DIRECT, bytes are stored into the pages")
	for range 20 {
		if lost(unix.O_RDONLY|unix.O_DIRECT, drop) > 0 {
			return
		}
	}
	t.Error("this kernel keeps reads with O_DIRECT into pages that it drops: docs/consistency.md says that they are lost")
}
