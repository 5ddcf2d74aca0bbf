/*
 * gaiafs.h - map files of a gaiafs mount into the memory of a device and share them with every program of the machine.
 *
 * gaia_mmap gives a window on a file in a device's memory; all processes that map the file on that device share the same
 * memory. What is stored there is seen by everyone else, CPU programs with plain reads included, after gaia_mrelease;
 * what others released or wrote is seen after gaia_macquire. Two programs may write the same page at once: the bytes
 * that each changed are merged.
 *
 * The device of a mapping is a GPU, and the pointer one for its kernels and for every library of CUDA; or an emulated
 * device, and the pointer an address of the process. The library needs no CUDA to be built or linked: it loads
 * libcuda.so.1 when it maps the memory of a GPU.
 *
 * Every function may be called from any thread; none is async-signal-safe, and none is a cancellation point. They block
 * until the daemon has answered, but for those whose names end with _async, or until a signal whose handler does not restart
 * calls interrupts them: EINTR. On failure they return -1 (gaia_map and gaia_mmap: MAP_FAILED) and set errno, and gaia_error
 * says more. The manual is gaia_mmap(3).
 */
#ifndef GAIAFS_H
#define GAIAFS_H

#include <sys/mman.h>
#include <sys/types.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define GAIA_API __attribute__((visibility("default")))
#else
#define GAIA_API
#endif

/* The version of this header: 10000 * major + 100 * minor + patch. */
#define GAIA_VERSION 100

/* gaia_version returns the GAIA_VERSION of the library that the program runs with, which may be another one. */
GAIA_API int gaia_version(void);

/* The kinds of device memory. */
#define GAIA_KIND_ANY 0
#define GAIA_KIND_EMULATED 1
#define GAIA_KIND_CUDA 2

/*
 * The flags of gaia_map. The lower 32 bits are for flags of mmap(2): MAP_SHARED, which 0 means too, MAP_FIXED and
 * MAP_FIXED_NOREPLACE (both not for GPUs). The upper 32 bits are this library's.
 */
#define GAIA_MAP_LAZY (UINT64_C(1) << 32)  /* fetch nothing now: gaia_macquire does, or GAIA_MADV_WILLNEED */
#define GAIA_MAP_PEERS (UINT64_C(1) << 33) /* let the other GPUs of this process use the pointer, too */

/* GAIA_MAP_LAZY for gaia_mmap. It lies among the bits by which Linux chooses sizes of huge pages. */
#define GAIA_LAZY 0x20000000

/* The advice of gaia_madvise, with the numbers of madvise(2). */
#define GAIA_MADV_NORMAL 0
#define GAIA_MADV_RANDOM 1
#define GAIA_MADV_SEQUENTIAL 2
#define GAIA_MADV_WILLNEED 3
#define GAIA_MADV_DONTNEED 4

/* A stream of CUDA: a cudaStream_t or a CUstream is passed as it is. NULL is the default stream of the mapping's device. */
typedef struct CUstream_st *gaia_stream_t;

/*
 * What gaia_map maps, and how. Set what is not needed to 0. Later versions may have more fields at the end, where 0 means what
 * there was before.
 */
struct gaia_map_args {
	uint64_t length; /* in bytes, at least 1 */
	uint64_t offset; /* in the file, a multiple of 4096 */
	void *address;   /* a hint, or NULL; with MAP_FIXED the address itself */
	uint64_t flags;  /* see GAIA_MAP_LAZY */
	int fd;          /* an open file of a gaiafs mount; it may be closed afterwards */
	int prot;        /* PROT_READ or PROT_READ|PROT_WRITE; PROT_WRITE alone means both */
	int device;      /* a CUDA ordinal as this process counts, or the number of an emulated device */
	int kind;        /* of the device; GAIA_KIND_ANY: a GPU if the mount has any, else an emulated device */
};

/*
 * gaia_map maps a part of a file into the memory of a device and returns its address. size is sizeof *args. A program may be
 * built with a newer header than the library's: E2BIG says that it asks for something which the library does not know.
 */
GAIA_API void *gaia_map(const struct gaia_map_args *args, size_t size);

/* What gaia_info says about a mapping. Later versions may have more fields at the end. */
struct gaia_info {
	void *address;   /* of its first byte */
	uint64_t length; /* as asked for */
	uint64_t offset; /* in the file */
	uint64_t flags;  /* GAIA_MAP_LAZY and GAIA_MAP_PEERS, as asked for */
	uint64_t serial; /* no other mapping of this process ever has the same */
	int prot;        /* PROT_READ or PROT_READ|PROT_WRITE */
	int device;      /* as asked for */
	int kind;        /* GAIA_KIND_EMULATED or GAIA_KIND_CUDA */
	int reserved;    /* 0 */
};

/* gaia_info describes the mapping that has the address. size is sizeof *info; fields that the library lacks are set to 0. */
GAIA_API int gaia_info(const void *addr, struct gaia_info *info, size_t size);

/*
 * gaia_mmap is gaia_map with the arguments of mmap(2): it maps len bytes at off of the file fd, an open file of a gaiafs mount, into the memory of device dev, a CUDA
 * ordinal as this process counts where the mount has GPUs. off is a multiple of 4096. prot is PROT_READ or
 * PROT_READ|PROT_WRITE (PROT_WRITE alone means both). flags is MAP_SHARED (0 means it too), with MAP_FIXED,
 * MAP_FIXED_NOREPLACE (both not for GPUs) and GAIA_LAZY as options. fd may be closed afterwards.
 */
GAIA_API void *gaia_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev);

/*
 * gaia_macquire brings the len bytes at addr up to date: it sees every release, and every write of a CPU program, that
 * happened before. Bytes stored by this device and not yet released stay.
 */
GAIA_API int gaia_macquire(void *addr, size_t len, int dev);

/* gaia_mrelease makes the stores into the len bytes at addr visible to everyone. */
GAIA_API int gaia_mrelease(void *addr, size_t len, int dev);

/*
 * Acquire and release in the order of a stream: the calls return at once; what they ask for is done after all earlier work
 * of the stream and before all later work of it. They may be captured into a graph. A failure that comes later is kept with
 * the mapping, the first one, until gaia_async_error, gaia_msync or gaia_munmap reports it.
 */
GAIA_API int gaia_macquire_async(void *addr, size_t len, int dev, gaia_stream_t stream);
GAIA_API int gaia_mrelease_async(void *addr, size_t len, int dev, gaia_stream_t stream);

/*
 * gaia_async_error reports, once, what went wrong in stream order with the mapping that has addr: -1 with its errno, or 0.
 * It does not wait for the stream. NULL asks for failures of graphs that ran when their mapping was gone.
 */
GAIA_API int gaia_async_error(void *addr);

/*
 * gaia_msync releases, and waits until the bytes are in the backing file (MS_ASYNC, or no flag) and on stable storage
 * (MS_SYNC). With MS_INVALIDATE it acquires afterwards; MS_INVALIDATE alone is an acquire. Where it releases, it reports a
 * failure that gaia_async_error would.
 */
GAIA_API int gaia_msync(void *addr, size_t len, int flags);

/* gaia_madvise gives one of the GAIA_MADV_ hints. */
GAIA_API int gaia_madvise(void *addr, size_t len, int advice);

/*
 * gaia_munmap releases a mapping and takes it away, the whole of it: addr and len are those of gaia_mmap. It waits for
 * stream-ordered calls on the mapping, but not for kernels that use the pointer. The mapping is gone after every failure
 * but EINVAL and EINTR; the failure says that the release, or an earlier one in stream order, could not be confirmed.
 */
GAIA_API int gaia_munmap(void *addr, size_t len);

/*
 * gaia_error returns what the last failure of a function of this library in this thread was, in words; the daemon's own
 * where it failed there. The string is never NULL and valid until the thread's next failure.
 */
GAIA_API const char *gaia_error(void);

#ifdef __cplusplus
}
#endif

#endif
