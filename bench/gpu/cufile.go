package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// cuFile is NVIDIA's library for reading files into GPU memory (GPUDirect Storage). Here it is in its compatibility mode,
// which it is in wherever its kernel module or the right disk is missing: it reads and copies.
type cuFile struct {
	gpu        *cudaGPU
	register   func(handle *uintptr, description *cuFileDescription) uint64
	deregister func(handle uintptr)
	readFile   func(handle uintptr, to address, n uintptr, off, into int64) int64
}

// cuFileDescription is a CUfileDescr_t with a descriptor of Linux.
type cuFileDescription struct {
	kind int32 // 1: CU_FILE_HANDLE_TYPE_OPAQUE_FD
	_    int32
	fd   int32
	_    int32
	_    uintptr // operations of a filesystem in user space
}

// cuFileReaders is how many threads read at once, each a part of its own.
const cuFileReaders = 8

// cuFileEnvironment has the library use its compatibility mode, also where it need not.
var cuFileEnvironment = []string{"CUFILE_ALLOW_COMPAT_MODE=true", "CUFILE_FORCE_COMPAT_MODE=true"}

// openCuFile loads the library, which stays. errMissing where there is none. Its functions return a CUfileError_t, 8 bytes
// in a register: the library's error in the lower half, CUDA's in the upper one.
func openCuFile(g gpu) (*cuFile, error) {
	cuda, ok := g.(*cudaGPU)
	if !ok {
		return nil, fmt.Errorf("%w: cuFile needs a GPU", errMissing)
	}
	candidates := []string{"libcufile.so.0", "libcufile.so"}
	for _, pattern := range []string{"/usr/local/cuda*/lib64/libcufile.so.0", "/usr/local/cuda*/targets/*/lib/libcufile.so.0"} {
		found, _ := filepath.Glob(pattern) // the pattern is well-formed
		candidates = append(candidates, found...)
	}
	var handle uintptr
	var err error
	for _, name := range candidates {
		if handle, err = purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL); err == nil {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: libcufile.so.0 cannot be loaded (%w)", errMissing, err)
	}
	c := &cuFile{gpu: cuda}
	var open func() uint64
	for name, f := range map[string]any{
		"cuFileDriverOpen":       &open,
		"cuFileHandleRegister":   &c.register,
		"cuFileHandleDeregister": &c.deregister,
		"cuFileRead":             &c.readFile,
	} {
		a, err := purego.Dlsym(handle, name)
		if err != nil {
			return nil, fmt.Errorf("%w: libcufile has no %s", errMissing, name)
		}
		purego.RegisterFunc(f, a)
	}
	return c, cuda.with(func() error { return checkCuFile("cuFileDriverOpen", open()) })
}

func checkCuFile(call string, r uint64) error {
	if r == 0 {
		return nil
	}
	return fmt.Errorf("%s failed with error %d of cuFile and %d of CUDA", call, int32(r), int32(r>>32))
}

// read reads n bytes of a file into fresh memory of the GPU, on several threads.
func (c *cuFile) read(path string, n int64) (took time.Duration, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	start := time.Now()
	to, err := c.gpu.alloc(n)
	if err != nil {
		return 0, err
	}
	defer func() {
		if freeErr := c.gpu.free(to); err == nil {
			err = freeErr
		}
	}()
	var handle uintptr
	d := cuFileDescription{kind: 1, fd: int32(f.Fd())}
	if err := checkCuFile("cuFileHandleRegister", c.register(&handle, &d)); err != nil {
		return 0, err
	}
	defer c.deregister(handle)
	part := (n/cuFileReaders + pageSize - 1) &^ (pageSize - 1)
	errs := make([]error, cuFileReaders)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			errs[i] = c.gpu.with(func() error {
				for off, end := part*int64(i), min(part*int64(i+1), n); off < end; {
					got := c.readFile(handle, to, uintptr(end-off), off, off)
					if got <= 0 {
						return fmt.Errorf("cuFileRead of %d bytes at %d returned %d", end-off, off, got)
					}
					off += got
				}
				return nil
			})
		})
	}
	wg.Wait()
	took = time.Since(start)
	for _, e := range errs {
		if e != nil {
			return took, e
		}
	}
	return took, nil
}

// The description is what the library expects.
var _ [24]byte = [unsafe.Sizeof(cuFileDescription{})]byte{}
