package fs

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdisk"
)

// smallDisk mounts a new ext4 of 64 MiB, a fifth of which is reserved for root, and returns its path.
func smallDisk(t *testing.T) string {
	t.Helper()
	return newDisk(t, "ext4", 64<<20, "-m", "20")
}

// newDisk makes a filesystem of size bytes in a file, mounts it where all users may use it, and returns its path.
// Arguments are for mkfs.
func newDisk(t *testing.T, kind string, size int64, arguments ...string) string {
	t.Helper()
	image, missing := testdisk.Make(t, kind, size, arguments...)
	if missing != "" {
		t.Skip(missing)
	}
	dir, err := os.MkdirTemp("", testPrefix)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0755))
	disk := filepath.Join(dir, "disk")
	require.NoError(t, os.Mkdir(disk, 0755))
	if missing := testdisk.Attach(t, image, disk); missing != "" {
		t.Skip(missing)
	}
	require.NoError(t, os.Chmod(disk, 0777))
	return disk
}

// diskWithQuota mounts a new btrfs, and returns a subvolume with a quota. If this process can arrange it, processes
// with CAP_SYS_RESOURCE may exceed the quota, as they may exceed users' quotas on other filesystems. Otherwise no
// process may.
func diskWithQuota(t *testing.T) string {
	t.Helper()
	requireTool(t, "btrfs")
	random, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	require.NoError(t, err)
	id := strings.TrimSpace(string(random))
	disk := newDisk(t, "btrfs", 256<<20, "-U", id)
	override := filepath.Join("/sys/fs/btrfs", id, "quota_override")
	if err := os.WriteFile(override, []byte("1"), 0); err != nil {
		t.Logf("the quota holds for root, too: %v", err)
	}
	limited := filepath.Join(disk, "limited")
	for _, args := range [][]string{{"quota", "enable", disk}, {"subvolume", "create", limited},
		{"qgroup", "limit", "16M", limited}} {
		run(t, exec.Command("btrfs", args...))
	}
	require.NoError(t, os.Chmod(limited, 0777))
	return limited
}

// on makes a scene show source.
func on(source string) func(*Options) { return func(o *Options) { o.Source = source } }

// fillUp leaves no block of the disk to ordinary users.
func fillUp(t *testing.T, disk string) {
	t.Helper()
	run(t, user(program("fill up", filepath.Join(disk, "ballast")), alice, aliceOwn))
}

// requireReserve checks that the free blocks are reserved for root.
func requireReserve(t *testing.T, disk string) {
	t.Helper()
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(disk, &st))
	require.Zero(t, st.Bavail)
	require.Greater(t, st.Bfree, uint64(1000), "blocks for root")
}

func init() {
	// "fill up" writes a file until the disk is full.
	programs["fill up"] = func(args []string) error {
		f, err := os.Create(args[0])
		if err != nil {
			return err
		}
		defer f.Close()
		for size := 1 << 20; size >= 512; size /= 2 {
			for err == nil {
				if _, err = f.Write(make([]byte, size)); err == nil {
					err = f.Sync()
				}
			}
			if err != nil && !isFull(err) {
				return err
			}
			err = nil
		}
		return nil
	}
	// "take" tries to take space of the disk in the given way, and prints the result.
	programs["take"] = func(args []string) error {
		err := take(args[0], args[1])
		fmt.Print(err != nil && isFull(err))
		if isFull(err) {
			err = nil
		}
		return err
	}
}

func isFull(err error) bool {
	errno := toErrno(err)
	return err == nil || errno == syscall.ENOSPC || errno == syscall.EDQUOT
}

// take takes space of the disk in one of several ways.
func take(way, path string) error {
	const size = 256 << 10
	switch way {
	case "directories":
		for i := range size / page.Size {
			if err := os.Mkdir(path+strconv.Itoa(i), 0755); err != nil {
				return err
			}
		}
		return nil
	case "links":
		for i := range size / 200 {
			if err := os.Link(path, path+strconv.Itoa(i)+strings.Repeat("-", 200)); err != nil {
				return err
			}
		}
		return nil
	case "attributes":
		value := make([]byte, 3000)
		rand.Read(value) // ext4 shares equal attributes of several files
		return unix.Setxattr(path, "user.big", value, 0)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	switch way {
	case "write":
		_, err = f.Write(make([]byte, size))
	case "append":
		if _, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, unix.O_APPEND); err == nil {
			_, err = f.Write(make([]byte, size))
		}
	case "fallocate":
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	case "mmap":
		if err = f.Truncate(size); err != nil {
			return err
		}
		var m []byte
		if m, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
		for i := 0; i < size; i += page.Size {
			m[i] = 1
		}
		if err = unix.Msync(m, unix.MS_SYNC); err == nil {
			err = unix.Munmap(m)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	return err
}

// TestBlocksForRootAreForRoot fills a disk up to the blocks reserved for root. Through the mount, ordinary users get
// none of these, and root does, as on the disk itself.
func TestBlocksForRootAreForRoot(t *testing.T) {
	disk := smallDisk(t)
	asOnTheDisk(t, disk, func() { requireReserve(t, disk) })
}

// TestQuotasHold: no user gets more space through the mount than the disk's quota allows.
func TestQuotasHold(t *testing.T) { asOnTheDisk(t, diskWithQuota(t), func() {}) }

// asOnTheDisk fills a disk up. In all modes, and in all ways of taking space, ordinary users then get no more of it,
// and root gets what it gets without a mount.
func asOnTheDisk(t *testing.T, disk string, filled func()) {
	files := filepath.Join(disk, "dir")
	require.NoError(t, os.Mkdir(files, 0777))
	require.NoError(t, os.Chmod(files, 0777))
	modes := map[string]func(*Options){"write-through": func(*Options) {}, "write-back": writeBack,
		"passthrough": passThrough, "disk": nil}
	ways := []string{"write", "append", "fallocate", "mmap", "attributes", "directories", "links"}
	for mode := range modes {
		for _, way := range ways {
			dir := filepath.Join(files, mode+way)
			require.NoError(t, os.Mkdir(dir, 0777))
			require.NoError(t, os.Chmod(dir, 0777))
			for _, uid := range []int{alice, 0} {
				path := filepath.Join(dir, strconv.Itoa(uid))
				require.NoError(t, os.WriteFile(path, nil, 0666))
				require.NoError(t, os.Chown(path, uid, uid))
			}
		}
	}
	fillUp(t, disk)
	filled()
	full := make(map[string]string) // the result of each way on the disk itself
	byBoth := func(way, dir string, tell func(uid int, said string)) {
		for _, uid := range []int{alice, 0} {
			take := program("take", way, filepath.Join(dir, strconv.Itoa(uid)))
			if uid != 0 {
				take = user(take, alice, aliceOwn)
			}
			tell(uid, run(t, take))
		}
	}
	for _, way := range ways {
		if way == "mmap" { // SIGBUS
			continue
		}
		byBoth(way, filepath.Join(files, "disk"+way), func(uid int, said string) { full[fmt.Sprint(way, uid)] = said })
	}
	for _, uid := range []int{alice, 0} {
		full[fmt.Sprint("mmap", uid)] = full[fmt.Sprint("write", uid)]
	}
	require.Equal(t, "true", full[fmt.Sprint("write", alice)])
	delete(modes, "disk")
	for mode, change := range modes {
		t.Run(mode, func(t *testing.T) {
			s := mount(t, on(disk), change)
			if mode == "passthrough" && !s.Passthrough() {
				t.Skip("passthrough needs root and Linux 6.9")
			}
			for _, way := range ways {
				if mode == "passthrough" && way == "mmap" {
					continue // a fault in a mapping of the disk's own file: SIGBUS
				}
				path := filepath.Join(s.mnt, "dir", mode+way)
				byBoth(way, path, func(uid int, said string) {
					assert.Equal(t, full[fmt.Sprint(way, uid)], said, "%s by %d", way, uid)
				})
			}
		})
	}
}

// TestBlocksForRootAreNotForDevices: bytes that an ordinary user's program released go home with that user's right to
// space.
func TestBlocksForRootAreNotForDevices(t *testing.T) {
	devicesTakeAsTheirUsers(t, smallDisk(t), syscall.ENOSPC)
}

// TestQuotasHoldForDevices does the same with a quota.
func TestQuotasHoldForDevices(t *testing.T) {
	devicesTakeAsTheirUsers(t, diskWithQuota(t), syscall.EDQUOT)
}

func devicesTakeAsTheirUsers(t *testing.T, disk string, full syscall.Errno) {
	for _, uid := range []uint32{alice, 0} {
		path := filepath.Join(disk, strconv.Itoa(int(uid)))
		require.NoError(t, os.WriteFile(path, nil, 0666))
		require.NoError(t, os.Chmod(path, 0666))
		require.NoError(t, os.Truncate(path, 1<<20))
	}
	probe := filepath.Join(disk, "probe")
	require.NoError(t, os.WriteFile(probe, nil, 0600))
	fillUp(t, disk)
	rootTakes := run(t, program("take", "write", probe)) == "false"
	s, cache, n := mountWithDevices(t, 1, on(disk))
	for _, uid := range []uint32{alice, 0} {
		f, err := openAs(uid, filepath.Join(s.mnt, strconv.Itoa(int(uid))))
		require.NoError(t, err)
		w := mapOn(t, cache, n, f, 0, 1<<20)
		w.store(t, 0, make([]byte, 1)) // stores zeros over zeros
		for i := int64(0); i < 1<<20; i += page.Size {
			w.store(t, i, []byte{1})
		}
		err = w.Sync(t.Context(), 0, 1<<20, false)
		if uid == 0 && rootTakes {
			assert.NoError(t, err)
		} else {
			assert.ErrorIs(t, err, full)
			require.NoError(t, os.Remove(filepath.Join(disk, "ballast")), "so that the bytes arrive")
			assert.NoError(t, w.Sync(t.Context(), 0, 1<<20, false))
			fillUp(t, disk)
		}
		w.close(t)
		require.NoError(t, f.Close())
	}
}

// openAs opens a file for reading and writing by a thread that acts as another user.
func openAs(uid uint32, path string) (*os.File, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	become := func(uid uint32) error { // of this thread only, and so that it may become root again
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			return errno
		}
		return nil
	}
	if err := become(uid); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err := become(0); err != nil {
		panic(err)
	}
	return f, err
}

// BenchmarkRightToSpace measures a small write with the daemon's right to space and with another user's.
func BenchmarkRightToSpace(b *testing.B) {
	requireRoot(b)
	c, err := newCreator()
	require.NoError(b, err)
	f, err := os.CreateTemp(b.TempDir(), "")
	require.NoError(b, err)
	defer f.Close()
	p := make([]byte, page.Size)
	for _, uid := range []uint32{0, alice} {
		b.Run(fmt.Sprint("user ", uid), func(b *testing.B) {
			for range b.N {
				if err := c.spend(uid, func() error {
					_, err := unix.Pwrite(int(f.Fd()), p, 0)
					return err
				}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
