package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// cuFile is NVIDIA's library for reading files into GPU memory (GPUDirect Storage). This bench uses its compatibility
// mode, in which it reads and copies. It always runs in that mode if its kernel module or a suitable disk is missing.
type cuFile struct {
	gpu        *cudaGPU
	folder     string // of its log
	flags      int    // flags for opening files, besides O_RDONLY
	register   func(handle *uintptr, description *cuFileDescription) uint64
	deregister func(handle uintptr)
	readFile   func(handle uintptr, to address, n uintptr, off, into int64) int64
}

// cuFileDescription is a CUfileDescr_t with a Linux descriptor.
type cuFileDescription struct {
	kind int32 // 1: CU_FILE_HANDLE_TYPE_OPAQUE_FD
	_    int32
	fd   int32
	_    int32
	_    uintptr // operations of a user-space filesystem
}

// The description has the size that the library expects.
var _ [24]byte = [unsafe.Sizeof(cuFileDescription{})]byte{}

// kernelModules is a file that the library (1.15) tries to read forever if it cannot be opened. Tests change it.
var kernelModules = "/proc/modules"

// cuFileReaders is how many threads read at once, each a different part.
const cuFileReaders = 8

// configureCuFile writes a configuration into a folder. It returns the environment that makes the library use it, with
// compatibility mode forced. Logs go to the folder. All other settings are those of the configuration that NVIDIA
// ships; without them, the library has no threads of its own.
func configureCuFile(folder string) (environment []string, err error) {
	text, err := json.MarshalIndent(map[string]any{
		"logging": map[string]any{"dir": folder, "level": "INFO"},
		"execution": map[string]any{
			"max_io_queue_depth": 128, "max_io_threads": 4, "parallel_io": true,
			"min_io_threshold_size_kb": 8192, "max_request_parallelism": 4,
		},
		"properties": map[string]any{"allow_compat_mode": true, "force_compat_mode": true},
	}, "", "  ")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(folder, "cufile.json")
	if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(file, text, 0o644)); err != nil {
		return nil, err
	}
	return []string{"CUFILE_ENV_PATH_JSON=" + file, "CUFILE_ALLOW_COMPAT_MODE=true", "CUFILE_FORCE_COMPAT_MODE=true"},
		nil
}

// openCuFile loads the library, which stays loaded. folder is that of its log. It fails with errMissing if there is no
// library. The library's functions return a CUfileError_t, 8 bytes in a register: the library's error in the lower
// half, CUDA's in the upper half.
func openCuFile(g gpu, folder string) (*cuFile, error) {
	cuda, ok := g.(*cudaGPU)
	if !ok {
		return nil, fmt.Errorf("%w: cuFile needs a GPU", errMissing)
	}
	if _, err := os.Stat(kernelModules); err != nil {
		return nil, fmt.Errorf("%w: cuFile needs a kernel with modules (%w)", errMissing, err)
	}
	candidates := []string{"libcufile.so.0", "libcufile.so"}
	for _, pattern := range []string{"/usr/local/cuda*/lib64/libcufile.so.0",
		"/usr/local/cuda*/targets/*/lib/libcufile.so.0"} {
		found, _ := filepath.Glob(pattern) // the pattern is valid
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
	c := &cuFile{gpu: cuda, folder: folder}
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
	return c, cuda.with(func() error { return c.logged(checkCuFile("cuFileDriverOpen", open())) })
}

// cuFileErrors describes the errors that a reader may get (CUfileOpError).
var cuFileErrors = map[int32]string{
	5001: "the driver is not initialised",
	5006: "the driver is closing",
	5007: "the platform is not supported",
	5010: "an error of CUDA",
	5018: "the type of the file is not supported",
	5019: "the flags of the descriptor are not supported",
	5020: "the descriptor lacks O_DIRECT",
	5022: "an invalid value",
	5025: "permission denied",
	5027: "the file is not registered",
	5028: "the file is registered already",
	5030: "an internal error",
	5033: "the library could not set itself up",
	5034: "disabled by the configuration",
}

// checkCuFile converts the result of a call to an error.
func checkCuFile(call string, r uint64) error {
	code, cuda := int32(r), int32(r>>32)
	if code == 0 {
		return nil
	}
	text := fmt.Sprintf("%s: %s (cuFile error %d)", call, cmp.Or(cuFileErrors[code], "no description"), code)
	if cuda != 0 {
		text += fmt.Sprintf(", CUDA error %d", cuda)
	}
	return errors.New(text)
}

// logged adds the end of the library's log to an error, which may be nil.
func (c *cuFile) logged(err error) error {
	if said := lastOfLog(c.folder); err != nil && said != "" {
		return fmt.Errorf("%w; cuFile's log says: %s", err, said)
	}
	return err
}

// lastOfLog returns the last errors in the newest log of a folder, shortened. If there are no errors, it returns the
// last lines.
func lastOfLog(folder string) string {
	const most = 5
	logs, _ := filepath.Glob(filepath.Join(folder, "*.log")) // the pattern is valid
	var newest string
	var at time.Time
	for _, l := range logs {
		if info, err := os.Stat(l); err == nil && !info.ModTime().Before(at) {
			newest, at = l, info.ModTime()
		}
	}
	text, err := os.ReadFile(newest)
	if err != nil {
		return ""
	}
	var lines, errs []string
	for line := range strings.Lines(string(text)) {
		_, after, found := strings.Cut(line, "] ") // after the time and the process
		if !found {
			after = line
		}
		words := strings.Join(strings.Fields(after), " ")
		if words == "" || slices.Contains(lines, words) {
			continue
		}
		lines = append(lines, words)
		if strings.HasPrefix(words, "ERROR ") {
			errs = append(errs, words)
		}
	}
	if len(errs) > 0 {
		lines = errs
	}
	return strings.Join(lines[max(0, len(lines)-most):], " | ")
}

// open opens and registers a file in a way that the library accepts. Without O_DIRECT it reads through the kernel's
// cache, like the other sides; with O_DIRECT past it.
func (c *cuFile) open(path string) (f *os.File, handle uintptr, err error) {
	var errs []error
	for _, flags := range slices.Compact([]int{c.flags, unix.O_DIRECT}) {
		f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		d := cuFileDescription{kind: 1, fd: int32(f.Fd())}
		if err = checkCuFile("cuFileHandleRegister", c.register(&handle, &d)); err == nil {
			c.flags = flags
			return f, handle, nil
		}
		f.Close()
		if flags == unix.O_DIRECT {
			err = fmt.Errorf("with O_DIRECT %w", err)
		}
		errs = append(errs, err)
	}
	return nil, 0, c.logged(errors.Join(errs...))
}

// read reads n bytes of a file into fresh memory of the GPU, on several threads. Then it calls look with that memory,
// outside the measured time.
func (c *cuFile) read(path string, n int64, look func(a address) error) (took time.Duration, err error) {
	start := time.Now()
	to, err := c.gpu.alloc(n)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.gpu.free(to)) }()
	f, handle, err := c.open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
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
						return c.logged(fmt.Errorf("cuFileRead of %d bytes at %d returned %d", end-off, off, got))
					}
					off += got
				}
				return nil
			})
		})
	}
	wg.Wait()
	took = time.Since(start)
	return took, errors.Join(append(errs, look(to))...)
}

// note returns a remark for readers of the figures.
func (c *cuFile) note() string {
	if c.flags == unix.O_DIRECT {
		return "here cuFile accepts files only with O_DIRECT, so it reads the disk"
	}
	return ""
}
