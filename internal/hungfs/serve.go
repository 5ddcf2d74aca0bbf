package hungfs

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// sleepy passes requests on to a loopback filesystem, except those that hang or fail.
type sleepy struct {
	fuse.RawFileSystem

	mu     sync.Mutex
	kinds  []string      // kinds that hang; protected by mu
	errno  fuse.Status   // the result of writes and fsync if not OK; protected by mu
	answer chan struct{} // closed by the order "answer"; protected by mu
}

// serve is the server's process. It returns when standard input ends.
func serve(shown, mountpoint string) error {
	root, err := fs.NewLoopbackRoot(shown)
	if err != nil {
		return err
	}
	none := time.Duration(0)
	s := &sleepy{
		RawFileSystem: fs.NewNodeFS(root, &fs.Options{EntryTimeout: &none, AttrTimeout: &none}),
		answer:        make(chan struct{}),
	}
	server, err := fuse.NewServer(s, mountpoint, &fuse.MountOptions{
		FsName: "hungfs", Name: "hungfs", DirectMountStrict: true, AllowOther: true,
		Options:              []string{"default_permissions"},
		DisabledCapabilities: fuse.CAP_PASSTHROUGH, // all reads and writes must be requests
	})
	if err != nil {
		return err
	}
	go server.Serve()
	if err := server.WaitMount(); err != nil {
		return err
	}
	fmt.Println("ready")
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		s.obey(strings.Fields(orders.Text()))
		fmt.Println("done " + orders.Text())
	}
	return nil
}

func (s *sleepy) obey(order []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if order[0] == "fail" {
		errno, _ := strconv.Atoi(order[1])
		s.errno = fuse.Status(errno)
		return
	}
	s.kinds = order[1:]
	if order[0] == "answer" {
		s.errno = fuse.OK
		close(s.answer)
		s.answer = make(chan struct{})
	}
}

// fails returns the error of writes and fsync, or OK.
func (s *sleepy) fails() fuse.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.errno
}

// pass returns when a request of this kind may go on.
func (s *sleepy) pass(kind string) {
	s.mu.Lock()
	hangs, answer := slices.Contains(s.kinds, kind), s.answer
	s.mu.Unlock()
	if hangs {
		fmt.Println("hung " + kind)
		<-answer
	}
}

// Lookup implements fuse.RawFileSystem, as do the methods below.
func (s *sleepy) Lookup(c <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	s.pass("lookup")
	return s.RawFileSystem.Lookup(c, h, name, out)
}

func (s *sleepy) GetAttr(c <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	s.pass("getattr")
	return s.RawFileSystem.GetAttr(c, in, out)
}

func (s *sleepy) Statx(c <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	s.pass("getattr")
	return s.RawFileSystem.Statx(c, in, out)
}

func (s *sleepy) SetAttr(c <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	s.pass("setattr")
	return s.RawFileSystem.SetAttr(c, in, out)
}

func (s *sleepy) Open(c <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	s.pass("open")
	status := s.RawFileSystem.Open(c, in, out)
	serveAll(out)
	return status
}

func (s *sleepy) Create(c <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	status := s.RawFileSystem.Create(c, in, name, out)
	serveAll(&out.OpenOut)
	return status
}

// serveAll makes every read and write of an open a request.
func serveAll(out *fuse.OpenOut) {
	out.OpenFlags, out.BackingID = fuse.FOPEN_DIRECT_IO, 0
}

func (s *sleepy) Read(c <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	s.pass("read")
	return s.RawFileSystem.Read(c, in, buf)
}

// Writev implements fuse.RawFileSystem. go-fuse calls it instead of Write.
func (s *sleepy) Writev(c <-chan struct{}, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	s.pass("write")
	if errno := s.fails(); errno != fuse.OK {
		return 0, errno
	}
	return s.RawFileSystem.Writev(c, in, data)
}

func (s *sleepy) Flush(c <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	s.pass("flush")
	return s.RawFileSystem.Flush(c, in)
}

func (s *sleepy) Fsync(c <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	s.pass("fsync")
	if errno := s.fails(); errno != fuse.OK {
		return errno
	}
	return s.RawFileSystem.Fsync(c, in)
}

func (s *sleepy) OpenDir(c <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	s.pass("opendir")
	return s.RawFileSystem.OpenDir(c, in, out)
}

func (s *sleepy) ReadDirPlus(c <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	s.pass("readdir")
	return s.RawFileSystem.ReadDirPlus(c, in, out)
}

func (s *sleepy) Unlink(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	s.pass("unlink")
	return s.RawFileSystem.Unlink(c, h, name)
}
