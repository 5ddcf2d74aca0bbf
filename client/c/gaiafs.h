/*
 * gaiafs.h - map files of a gaiafs mount into the memory of a device and share them with every program of the machine.
 *
 * gaia_mmap gives a window on a file in a device's memory; all processes that map the file on that device share the
 * same memory. What is stored there is seen by everyone else, CPU programs with plain reads included, after
 * gaia_mrelease; what others released or wrote is seen after gaia_macquire. Two programs may write the same page at
 * once: the bytes that each changed are merged.
 *
 * The device of a mapping is a GPU, and the pointer one for its kernels and for every library of CUDA; or an emulated
 * device, and the pointer an address of the process. The library needs no CUDA to be built or linked: it loads
 * libcuda.so.1 when it maps the memory of a GPU.
 *
 * Every function may be called from any thread; none is async-signal-safe, and none is a cancellation point. They block
 * until the daemon has answered, but for those whose names end with _async, or until a signal whose handler does not
 * restart calls interrupts them: EINTR. On failure they return -1 (those that map: MAP_FAILED) and set errno, and
 * gaia_error says more. The manual is gaia_mmap(3).
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
#define GAIA_VERSION 101

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
/* have the device hold the memory, and do not map it: the address is for calls only */
#define GAIA_MAP_HOLD (UINT64_C(1) << 34)
/* Start no thread for a mapping on an emulated device, for programs that fork; but for one that moves, which needs it.
 * */
#define GAIA_MAP_NO_THREAD (UINT64_C(1) << 35)

/*
 * Have the mapping's memory move: it has addresses only, and memory while a bracket uses it (gaia_use). So it may be
 * larger than the device, and many programs may share a device that has no room for all. Files only. What is touched
 * outside of a bracket may not be there.
 *
 * A mapping of a file that is larger than its device's budget (--gpu-memory) moves without this flag, since it would
 * fail otherwise: the flags in gaia_info say so. With GAIA_MAP_STAYS, GAIA_MAP_PEERS or GAIA_MAP_HOLD it fails with
 * ENOMEM instead. All other mappings never move.
 */
#define GAIA_MAP_MOVABLE (UINT64_C(1) << 36)
#define GAIA_MAP_STAYS (UINT64_C(1) << 37)

/* GAIA_MAP_MOVABLE for gaia_mmap, as is GAIA_LAZY. */
#define GAIA_MOVABLE 0x40000000

/* GAIA_MAP_LAZY for gaia_mmap. It lies among the bits by which Linux chooses sizes of huge pages. */
#define GAIA_LAZY 0x20000000

/* The advice of gaia_madvise, with the numbers of madvise(2). */
#define GAIA_MADV_NORMAL 0
#define GAIA_MADV_RANDOM 1
#define GAIA_MADV_SEQUENTIAL 2
#define GAIA_MADV_WILLNEED 3
#define GAIA_MADV_DONTNEED 4

/* A stream of CUDA: a cudaStream_t or a CUstream is passed as it is. NULL is the default stream of the mapping's
 * device. */
typedef struct CUstream_st *gaia_stream_t;

/* In place of a stream: the work of all streams of the context, and none. */
#define GAIA_ALL_STREAMS ((gaia_stream_t)-1)
#define GAIA_NO_STREAM ((gaia_stream_t)-2)

/*
 * What gaia_map maps, and how. Set what is not needed to 0. Later versions may have more fields at the end, where 0
 * means what there was before.
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
 * gaia_map maps a part of a file into the memory of a device and returns its address. size is sizeof *args. A program
 * may be built with a newer header than the library's: E2BIG says that it asks for something which the library does not
 * know.
 */
GAIA_API void *gaia_map(const struct gaia_map_args *args, size_t size);

/* What gaia_info says about a mapping. Later versions may have more fields at the end. */
struct gaia_info {
	void *address;   /* of its first byte */
	uint64_t length; /* as asked for */
	uint64_t offset; /* in the file */
	uint64_t flags;  /* the GAIA_MAP_ flags, as asked for */
	uint64_t serial; /* no other mapping of this process ever has the same */
	int prot;        /* PROT_READ or PROT_READ|PROT_WRITE */
	int device;      /* as asked for */
	int kind;        /* GAIA_KIND_EMULATED or GAIA_KIND_CUDA; 0 with GAIA_MAP_HOLD */
	int reserved;    /* 0 */
	int64_t size;    /* of the file when it was mapped; -1: not known, or no file's memory */
};

/* gaia_info describes the mapping that has the address. size is sizeof *info; fields that the library lacks are set to
 * 0. */
GAIA_API int gaia_info(const void *addr, struct gaia_info *info, size_t size);

/*
 * gaia_mmap is gaia_map with the arguments of mmap(2): it maps len bytes at off of the file fd, an open file of a
 * gaiafs mount, into the memory of device dev, a CUDA ordinal as this process counts where the mount has GPUs. off is a
 * multiple of 4096. prot is PROT_READ or PROT_READ|PROT_WRITE (PROT_WRITE alone means both). flags is MAP_SHARED (0
 * means it too), with MAP_FIXED, MAP_FIXED_NOREPLACE (both not for GPUs) and GAIA_LAZY as options. fd may be closed
 * afterwards.
 */
GAIA_API void *gaia_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev);

/*
 * A view is device memory that is only read, with chosen bytes of one file, or of several, in a layout of its own:
 * kernels get each piece at an aligned address. All processes that ask for the same segments of the same files on the
 * same device share it. It stays coherent: after gaia_macquire it shows what was released or written before, and only
 * what changed is copied again. The manual is gaia_mview(3).
 */

/* A segment is count rows of length bytes of a file, the first at offset, each stride bytes after the one before. */
struct gaia_segment {
	uint64_t offset; /* in the file */
	uint64_t length; /* of a row, at least 1 */
	uint64_t stride; /* at least length; not looked at where there is one row */
	uint64_t count;  /* of rows; 0 means 1 */
};

/*
 * gaia_view_layout finds out where a view has its segments: segment i begins offsets[i] bytes from its start, a
 * multiple of align, and its rows are packed. *size is that of the view. offsets and size may be NULL. align is a power
 * of two up to 2 MiB, 0 means 256. EINVAL, or EOVERFLOW past the largest file: gaia_error names the segment.
 */
GAIA_API int gaia_view_layout(
	const struct gaia_segment *segments, size_t n, size_t align, uint64_t *offsets, uint64_t *size);

/*
 * gaia_mview makes a view of n segments of an open file on device dev, and returns its address, a multiple of align.
 * The calls that follow take it as they take a mapping that is only read; their offsets, and the length for
 * gaia_munmap, are the view's. Padding, and what lies past the end of the file, is zeros.
 */
GAIA_API void *gaia_mview(int fd, const struct gaia_segment *segments, size_t n, size_t align, int dev);

/* What gaia_map_view makes a view of, and how. Later versions may have more fields at the end, where 0 means what there
 * was before. */
struct gaia_view_args {
	const struct gaia_segment *segments;
	uint64_t count;        /* of segments */
	const int *fds;        /* open files of one gaiafs mount; they may be closed afterwards */
	uint64_t fd_count;     /* at most 16384 */
	const uint32_t *files; /* of each segment, which of fds it is of; NULL: all of the first */
	uint64_t align;        /* as in gaia_view_layout */
	void *address;         /* as in gaia_map_args, as are the next three */
	uint64_t flags;
	int device;
	int kind;
};

/* gaia_map_view makes a view of several files. size is sizeof *args, as in gaia_map. */
GAIA_API void *gaia_map_view(const struct gaia_view_args *args, size_t size);

/*
 * gaia_macquire brings the len bytes at addr up to date: it sees every release, and every write of a CPU program, that
 * happened before. Bytes stored by this device and not yet released stay.
 */
GAIA_API int gaia_macquire(void *addr, size_t len, int dev);

/*
 * gaia_mrelease makes the stores into the len bytes at addr visible to everyone. On a GPU it first waits for all work
 * that was begun in the calling thread's context. While a stream is captured, which such a wait would end, use
 * gaia_mrelease_async, or gaia_start with a stream.
 */
GAIA_API int gaia_mrelease(void *addr, size_t len, int dev);

/*
 * Acquire and release in the order of a stream: the calls return at once; what they ask for is done after all earlier
 * work of the stream and before all later work of it. They may be captured into a graph. A failure that comes later is
 * kept with the mapping, the first one, until gaia_async_error, gaia_msync or gaia_munmap reports it.
 */
GAIA_API int gaia_macquire_async(void *addr, size_t len, int dev, gaia_stream_t stream);
GAIA_API int gaia_mrelease_async(void *addr, size_t len, int dev, gaia_stream_t stream);

/*
 * gaia_async_error reports, once, what went wrong in stream order with the mapping that has addr: -1 with its errno, or
 * 0. It does not wait for the stream. NULL asks for failures of graphs that ran when their mapping was gone.
 */
GAIA_API int gaia_async_error(void *addr);

/*
 * gaia_msync releases, and waits until the bytes are in the backing file (MS_ASYNC, or no flag) and on stable storage
 * (MS_SYNC). With MS_INVALIDATE it acquires afterwards; MS_INVALIDATE alone is an acquire. Where it releases, it
 * reports a failure that gaia_async_error would.
 */
GAIA_API int gaia_msync(void *addr, size_t len, int flags);

/* gaia_madvise gives one of the GAIA_MADV_ hints. */
GAIA_API int gaia_madvise(void *addr, size_t len, int advice);

/*
 * gaia_munmap releases a mapping and takes it away, the whole of it: addr and len are those of gaia_mmap. It waits for
 * stream-ordered calls on the mapping, and for all work that was begun in the context. It ends no capture of a stream.
 * The mapping is gone after every failure but EINVAL and EINTR; the failure says that the release, or an earlier one in
 * stream order, could not be confirmed.
 */
GAIA_API int gaia_munmap(void *addr, size_t len);

/*
 * gaia_drop is gaia_munmap for finalizers: it fails in silence, does not wait for the daemon, and does nothing to a
 * mapping that stream-ordered calls keep. It waits for work that was begun, and never ends a capture of a stream.
 */
GAIA_API void gaia_drop(void *addr, size_t len);

/*
 * A bracket says what a launch uses. gaia_use returns once all n ranges, of mappings of one device, have their memory:
 * the device's own, or pinned memory of the host where that is full, which is slower. It is all or nothing, and it
 * waits for other programs' brackets only where pinned memory is full too: those who wait are served in the order in
 * which they came, for a minute at most, or patience milliseconds with gaia_use_for. The memory, and what is in it,
 * stays until gaia_done. Pages that the device has are not brought up to date: gaia_macquire does that.
 *
 * gaia_done ends the bracket that this thread opened last with that stream, after all work that was begun in the
 * stream, and waits for none of it. GAIA_NO_STREAM: there is no work left. It may not be captured into a graph.
 *
 * Brackets nest, and each thread has its own. Ranges of mappings that do not move need nothing and do no harm. Errors
 * of gaia_use: EINVAL (the ranges), ENOMEM (they can never fit), ETIMEDOUT (gaia_error says who holds what), EDEADLK
 * (it would have to wait while this thread has a bracket: use all in one).
 */
/* A range of a mapping, or of a view. */
struct gaia_range {
	void *address;
	uint64_t length;
};
GAIA_API int gaia_use(const struct gaia_range *ranges, size_t n, gaia_stream_t stream);
GAIA_API int gaia_use_for(const struct gaia_range *ranges, size_t n, gaia_stream_t stream, unsigned patience);
GAIA_API int gaia_done(gaia_stream_t stream);

/*
 * gaia_explain_faults has a program say in words why a load or store into a mapping ended it: on stderr, in one line,
 * with the address, the file and the reason (a byte that no bracket uses, a store into what is only read). Then the
 * fault goes where it would have gone before: to the handler that was there, or to the program's end. It installs
 * handlers for SIGSEGV and SIGBUS, once, and is for tests and for programs under development. It is about CPU loads and
 * stores, on emulated devices; a GPU's fault shows as CUDA_ERROR_ILLEGAL_ADDRESS, whose words the next call of the
 * library adds to.
 */
GAIA_API int gaia_explain_faults(void);

/*
 * Requests that are waited for in pieces, for programs that have something else to do now and then, such as handling a
 * signal.
 */

/* A request. Set it to zeros before gaia_start. */
struct gaia_call {
	void *running;  /* the library's; NULL: there is nothing to wait for */
	uint64_t pages; /* once it is over: how many an acquire brought up to date, or a release found stores in */
};

#define GAIA_DO_ACQUIRE 1
#define GAIA_DO_RELEASE 2
#define GAIA_DO_SYNC 3   /* release and bring home; argument: 1 for stable storage, or 0 */
#define GAIA_DO_ADVISE 4 /* argument: the GAIA_MADV_ number */

/*
 * gaia_start asks for one of these for the len bytes at addr, and returns before the answer comes. It first waits for
 * the work that was begun in the stream, or in the context with GAIA_ALL_STREAMS. With GAIA_NO_STREAM it waits for
 * none, and so does GAIA_DO_ADVISE. On emulated devices there is nothing to wait for.
 */
GAIA_API int gaia_start(struct gaia_call *call, int what, void *addr, size_t len, int argument, gaia_stream_t stream);

/*
 * gaia_start_use is gaia_use_for in that way. The bracket is the thread's once gaia_wait has returned 0 or, where
 * nothing of the ranges moves and nothing runs, at once; call->pages is its number then. gaia_cancel gives it up.
 * gaia_done_use ends the thread's bracket with that number, in the order of its stream, as gaia_done ends the last one
 * of a stream.
 */
GAIA_API int gaia_start_use(struct gaia_call *call, const struct gaia_range *ranges, size_t n, gaia_stream_t stream,
			    unsigned patience);
GAIA_API int gaia_done_use(uint64_t bracket);

/*
 * gaia_wait waits at most timeout milliseconds, or with a negative timeout as long as it takes, until the request is
 * over, and returns what came of it. While call->running is not NULL it is not over, and -1 says ETIMEDOUT, or EINTR
 * after any signal's handler (without a timeout, one that does not restart calls): call it again, or gaia_cancel. A
 * call is one thread's.
 */
GAIA_API int gaia_wait(struct gaia_call *call, int timeout);

/* gaia_cancel gives up waiting, at once. The request may be carried out all the same. It does nothing where nothing
 * runs. */
GAIA_API void gaia_cancel(struct gaia_call *call);

/*
 * Updates in place. A group is ranges of mappings of one mount whose stores are released at once: everyone sees all of
 * it or nothing. The manual is gaia_group_begin(3).
 */

struct gaia_group; /* an open group */

/*
 * gaia_group_begin opens a group of ranges of mappings for writing; NULL on failure. Store after it has returned.
 * Nothing of the group is seen before gaia_group_release, but by programs on the same device. A program that ends, or
 * unmaps one of the mappings, before that has nothing of it released: the memory is what it was at the last release.
 */
GAIA_API struct gaia_group *gaia_group_begin(const struct gaia_range *ranges, size_t n);

/*
 * gaia_group_release publishes the group and frees it. *version, unless it is NULL, is the version that the files have
 * then. It waits for work on GPUs as gaia_mrelease does. After a failure the group is still to be released or aborted;
 * ECANCELED says that it can only be aborted.
 */
GAIA_API int gaia_group_release(struct gaia_group *group, uint64_t *version);

/* gaia_group_abort takes back what was stored into the group, and frees it. NULL is no group. */
GAIA_API void gaia_group_abort(struct gaia_group *group);

/*
 * gaia_acquire_all acquires several ranges of one mount at once: all of each group up to *version, and nothing of later
 * ones. *version, which may be NULL, is that of the newest group of the files; 0 if there was none. With least it first
 * waits, at most timeout milliseconds or with a negative timeout as long as it takes, until a file has at least that
 * version: ETIMEDOUT; EPIPE where the last program ended that began groups of the files; EINTR after a signal's
 * handler.
 */
GAIA_API int gaia_acquire_all(
	const struct gaia_range *ranges, size_t n, uint64_t least, int timeout, uint64_t *version);

/* gaia_read copies len bytes at addr out of a mapping's memory, and gaia_write into it; they are there when it returns.
 * */
GAIA_API int gaia_read(const void *addr, void *to, size_t len);
GAIA_API int gaia_write(void *addr, const void *from, size_t len);

/* A copy within a device: length bytes at from, in a mapping, go to offset to of the new memory. */
struct gaia_copy {
	uint64_t to;
	const void *from;
	uint64_t length;
};

/*
 * gaia_copies makes memory of this process alone, of size bytes, on the device of the mapping that has addr, and copies
 * count ranges of that mapping there. gaia_read, gaia_write, gaia_info, gaia_munmap and gaia_drop take it as they take
 * a mapping. It is no file's. MAP_FAILED on failure.
 */
GAIA_API void *gaia_copies(const void *addr, size_t size, const struct gaia_copy *copies, size_t count);

/*
 * gaia_status returns what the daemon of a mount says of itself, a JSON document that the caller frees; NULL on
 * failure. fd is an open descriptor of the mountpoint.
 */
GAIA_API char *gaia_status(int fd);

/*
 * A thread that works for another one uses that one's context of CUDA. gaia_context returns the calling thread's; NULL:
 * it has none, or this library has not loaded CUDA. gaia_lend_context has the calls of this thread use one where the
 * thread has no context of the mapping's device itself; NULL ends that.
 */
GAIA_API void *gaia_context(void);
GAIA_API void gaia_lend_context(void *context);

/*
 * gaia_error returns what the last failure of a function of this library in this thread was, in words; the daemon's own
 * where it failed there. The string is never NULL and valid until the thread's next failure.
 */
GAIA_API const char *gaia_error(void);

/*
 * gaia_note returns what the last call of this thread had to say though it succeeded, "" where nothing: that a
 * release, a sync or the end of a mapping found stores past the end of the file, which are not kept. The string is
 * never NULL and valid until the thread's next call.
 */
GAIA_API const char *gaia_note(void);

#ifdef __cplusplus
}
#endif

#endif
