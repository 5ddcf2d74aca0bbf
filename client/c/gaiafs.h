/*
 * gaiafs.h - map files of a gaiafs mount into device memory, and share them with every program of the machine.
 *
 * gaia_mmap maps a part of a file into a device's memory. All processes that map the file on that device share the same
 * memory. gaia_mrelease makes stores visible to everyone, including CPU programs that use plain reads. gaia_macquire
 * shows what others released or wrote before. Two programs may write the same page concurrently: gaiafs merges the
 * bytes that each of them changed.
 *
 * The device of a mapping is a GPU or an emulated device. On a GPU, the pointer is for kernels and for the CUDA
 * libraries. On an emulated device, it is an address of the process. Building and linking the library needs no CUDA: it
 * loads libcuda.so.1 when it first maps GPU memory.
 *
 * Every function may be called from any thread. None is async-signal-safe, and none is a cancellation point. A call
 * blocks until the daemon answers, unless its name ends with _async. A signal whose handler does not restart calls
 * interrupts it: EINTR. On failure, calls return -1 (those that map return MAP_FAILED) and set errno; gaia_error
 * returns the reason in words. The manual is gaia_mmap(3).
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

/* gaia_version returns the GAIA_VERSION of the library that the program runs with. It may differ from the header's. */
GAIA_API int gaia_version(void);

/* The kinds of device memory. */
#define GAIA_KIND_ANY 0
#define GAIA_KIND_EMULATED 1
#define GAIA_KIND_CUDA 2

/*
 * The flags of gaia_map. The lower 32 bits hold flags of mmap(2): MAP_SHARED (0 means the same), MAP_FIXED and
 * MAP_FIXED_NOREPLACE (the last two not on GPUs). The upper 32 bits hold this library's flags.
 */
#define GAIA_MAP_LAZY (UINT64_C(1) << 32)  /* fetch nothing now; gaia_macquire or GAIA_MADV_WILLNEED fetches */
#define GAIA_MAP_PEERS (UINT64_C(1) << 33) /* let the other GPUs of this process use the pointer too */
/* Have the device hold the memory, but do not map it: the address only names the mapping in calls. */
#define GAIA_MAP_HOLD (UINT64_C(1) << 34)
/* Start no thread for a mapping on an emulated device, for programs that fork. A movable mapping starts it anyway. */
#define GAIA_MAP_NO_THREAD (UINT64_C(1) << 35)

/*
 * Make the mapping movable. It always has addresses, but memory only while a bracket uses it (gaia_use). It may be
 * larger than the device, and programs that together need more than the device has can share it. Files only. Memory
 * touched outside a bracket may not be there.
 *
 * A mapping of a file that is larger than its device's budget (--gpu-memory) is movable without this flag, because it
 * would fail otherwise; the flags in gaia_info show it. With GAIA_MAP_STAYS, GAIA_MAP_PEERS or GAIA_MAP_HOLD it fails
 * with ENOMEM instead. All other mappings never move.
 */
#define GAIA_MAP_MOVABLE (UINT64_C(1) << 36)
#define GAIA_MAP_STAYS (UINT64_C(1) << 37)

/* GAIA_MAP_MOVABLE for gaia_mmap. */
#define GAIA_MOVABLE 0x40000000

/* GAIA_MAP_LAZY for gaia_mmap. Like GAIA_MOVABLE, it uses a bit in which Linux encodes the size of huge pages. */
#define GAIA_LAZY 0x20000000

/* The advice of gaia_madvise, with the numbers of madvise(2). */
#define GAIA_MADV_NORMAL 0
#define GAIA_MADV_RANDOM 1
#define GAIA_MADV_SEQUENTIAL 2
#define GAIA_MADV_WILLNEED 3
#define GAIA_MADV_DONTNEED 4

/* A CUDA stream: pass a cudaStream_t or a CUstream as it is. NULL is the default stream of the mapping's device. */
typedef struct CUstream_st *gaia_stream_t;

/* In place of a stream: the work of all streams of the context, or no work at all. */
#define GAIA_ALL_STREAMS ((gaia_stream_t)-1)
#define GAIA_NO_STREAM ((gaia_stream_t)-2)

/*
 * What gaia_map maps, and how. Set unused fields to 0. Later versions may add fields at the end; 0 in a new field means
 * the old behaviour.
 */
struct gaia_map_args {
	uint64_t length; /* in bytes, at least 1 */
	uint64_t offset; /* in the file, a multiple of 4096 */
	void *address;   /* a hint, or NULL; with MAP_FIXED the address itself */
	uint64_t flags;  /* see GAIA_MAP_LAZY */
	int fd;          /* an open file of a gaiafs mount; it may be closed afterwards */
	int prot;        /* PROT_READ or PROT_READ|PROT_WRITE; PROT_WRITE alone means both */
	int device;      /* a CUDA ordinal as this process counts them, or the number of an emulated device */
	int kind;        /* of device; GAIA_KIND_ANY: a GPU if the mount has any, otherwise an emulated device */
};

/*
 * gaia_map maps a part of a file into the memory of a device and returns its address. size is sizeof *args. A program
 * may be built with a newer header than the library's. If it then uses a field or flag that the library does not know,
 * the call fails with E2BIG.
 */
GAIA_API void *gaia_map(const struct gaia_map_args *args, size_t size);

/* What gaia_info says about a mapping. Later versions may add fields at the end. */
struct gaia_info {
	void *address;   /* of its first byte */
	uint64_t length; /* as asked for */
	uint64_t offset; /* in the file */
	uint64_t flags;  /* the GAIA_MAP_ flags, as asked for; GAIA_MAP_MOVABLE whenever the mapping moves */
	uint64_t serial; /* unique among all mappings this process ever makes */
	int prot;        /* PROT_READ or PROT_READ|PROT_WRITE */
	int device;      /* as asked for */
	int kind;        /* GAIA_KIND_EMULATED or GAIA_KIND_CUDA; 0 with GAIA_MAP_HOLD */
	int reserved;    /* 0 */
	int64_t size;    /* of the file when it was mapped; -1: not known, or the memory is no file's */
};

/* gaia_info describes the mapping that contains addr. size is sizeof *info; the call sets unknown fields to 0. */
GAIA_API int gaia_info(const void *addr, struct gaia_info *info, size_t size);

/*
 * gaia_mmap is gaia_map with the arguments of mmap(2). It maps len bytes at offset off of fd, an open file of a gaiafs
 * mount, into the memory of device dev. On a mount that has GPUs, dev is a CUDA ordinal as this process counts them.
 * off is a multiple of 4096. prot is PROT_READ or PROT_READ|PROT_WRITE (PROT_WRITE alone means both). flags is
 * MAP_SHARED (0 means the same), optionally with MAP_FIXED or MAP_FIXED_NOREPLACE (neither on GPUs), GAIA_LAZY and
 * GAIA_MOVABLE. fd may be closed afterwards.
 */
GAIA_API void *gaia_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev);

/*
 * A view is read-only device memory with chosen bytes of one or more files in a layout of its own, so that kernels get
 * each piece at an aligned address. All processes that ask for the same segments of the same files on the same device
 * share it. It stays coherent: after gaia_macquire it shows everything released or written before. Only bytes that
 * changed are copied again. The manual is gaia_mview(3).
 */

/*
 * A segment is count rows of length bytes of a file. The first row begins at offset, each further row stride bytes
 * after the one before.
 */
struct gaia_segment {
	uint64_t offset; /* in the file */
	uint64_t length; /* of a row, at least 1 */
	uint64_t stride; /* at least length; ignored if there is one row */
	uint64_t count;  /* of rows; 0 means 1 */
};

/*
 * gaia_view_layout computes the layout of a view. Segment i begins offsets[i] bytes from the start of the view, a
 * multiple of align. Its rows are packed. *size is the size of the view. offsets and size may be NULL. align is a power
 * of two up to 2 MiB; 0 means 256. It fails with EINVAL, or with EOVERFLOW if a segment ends past the largest possible
 * file; gaia_error names the segment.
 */
GAIA_API int gaia_view_layout(
	const struct gaia_segment *segments, size_t n, size_t align, uint64_t *offsets, uint64_t *size);

/*
 * gaia_mview makes a view of n segments of an open file on device dev. It returns the view's address, a multiple of
 * align. The calls below take a view as they take a read-only mapping. Their offsets are offsets in the view, and
 * gaia_munmap takes the view's length. Padding and bytes past the end of the file read as zero.
 */
GAIA_API void *gaia_mview(int fd, const struct gaia_segment *segments, size_t n, size_t align, int dev);

/*
 * What gaia_map_view makes a view of, and how. Later versions may add fields at the end; 0 in a new field means the old
 * behaviour.
 */
struct gaia_view_args {
	const struct gaia_segment *segments;
	uint64_t count;        /* of segments */
	const int *fds;        /* open files of one gaiafs mount; they may be closed afterwards */
	uint64_t fd_count;     /* at most 16384 */
	const uint32_t *files; /* for each segment an index into fds; NULL: all are of the first file */
	uint64_t align;        /* as in gaia_view_layout */
	void *address;         /* as in gaia_map_args, like the next three */
	uint64_t flags;
	int device;
	int kind;
};

/* gaia_map_view makes a view of several files. size is sizeof *args, as in gaia_map. */
GAIA_API void *gaia_map_view(const struct gaia_view_args *args, size_t size);

/*
 * gaia_macquire brings the len bytes at addr up to date. They then show every earlier release and every earlier write
 * of a CPU program. Stores of this device that are not released yet stay.
 */
GAIA_API int gaia_macquire(void *addr, size_t len, int dev);

/*
 * gaia_mrelease makes the stores into the len bytes at addr visible to everyone. On a GPU it first waits for all work
 * that was begun in the calling thread's context. During a stream capture such a wait would end the capture: use
 * gaia_mrelease_async, or gaia_start with a stream.
 */
GAIA_API int gaia_mrelease(void *addr, size_t len, int dev);

/*
 * Acquire and release in stream order. The calls return at once. The acquire or release runs after all earlier work of
 * the stream and before all later work of it. A graph can capture these calls. The mapping keeps the first failure
 * until gaia_async_error, gaia_msync or gaia_munmap reports it.
 */
GAIA_API int gaia_macquire_async(void *addr, size_t len, int dev, gaia_stream_t stream);
GAIA_API int gaia_mrelease_async(void *addr, size_t len, int dev, gaia_stream_t stream);

/*
 * gaia_async_error reports, once, the stream-ordered failure of the mapping that contains addr: it returns -1 and sets
 * errno to the failure's, or returns 0. It does not wait for the stream. With NULL it reports failures of graphs that
 * ran after their mapping was gone.
 */
GAIA_API int gaia_async_error(void *addr);

/*
 * gaia_msync releases, and waits until the bytes are in the backing file (MS_ASYNC, or no flag) or on stable storage
 * (MS_SYNC). With MS_INVALIDATE it acquires afterwards; MS_INVALIDATE alone only acquires. If it releases, it also
 * reports a failure that gaia_async_error would report.
 */
GAIA_API int gaia_msync(void *addr, size_t len, int flags);

/* gaia_madvise gives one of the GAIA_MADV_ hints. */
GAIA_API int gaia_madvise(void *addr, size_t len, int advice);

/*
 * gaia_munmap releases a mapping and removes it. It takes whole mappings only: addr and len as gaia_mmap returned and
 * got them. It waits for stream-ordered calls on the mapping and for all work that was begun in the context. It does
 * not end a stream capture. After a failure the mapping is gone, except after EINVAL and EINTR. The failure means that
 * this release, or an earlier one in stream order, could not be confirmed.
 */
GAIA_API int gaia_munmap(void *addr, size_t len);

/*
 * gaia_drop is gaia_munmap for finalizers. It reports no failure and does not wait for the daemon. If stream-ordered
 * calls are queued on the mapping, it does nothing. It waits for work that was begun, and never ends a stream capture.
 */
GAIA_API void gaia_drop(void *addr, size_t len);

/*
 * A bracket says what memory a launch uses. gaia_use returns once all n ranges have their memory. The ranges are of
 * mappings on one device. The memory is the device's own, or pinned host memory if the device is full; that is slower.
 * gaia_use gets memory for all ranges or for none. It waits for other programs' brackets only if pinned memory is full
 * too. Waiting brackets are served in order of arrival. gaia_use waits for at most a minute, gaia_use_for for at most
 * patience milliseconds (0 means a minute). The memory and its contents stay until gaia_done. gaia_use does not bring
 * pages up to date if the device has them already; gaia_macquire does.
 *
 * gaia_done ends the bracket that this thread opened last with that stream. The bracket ends after all work that was
 * begun in the stream; gaia_done does not wait for that work. With GAIA_ALL_STREAMS it does wait, for the work of the
 * whole context. GAIA_NO_STREAM says that no work is left. gaia_done cannot be captured into a graph.
 *
 * Brackets nest, and each thread has its own. Ranges of mappings that do not move are allowed and need nothing. Errors
 * of gaia_use: EINVAL (wrong ranges), ENOMEM (the ranges can never fit), ETIMEDOUT (gaia_error names the holders),
 * EDEADLK (it would have to wait while this thread has a bracket: put all ranges into one bracket).
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
 * gaia_explain_faults makes the library explain faults. When a load or store into a mapping is about to end the
 * program, the library prints one line on stderr: the address, the file and the reason (no bracket uses the byte, or
 * the mapping is read-only). Then the fault goes where it would have gone before: to the previous handler, or to the
 * program's end. The call installs handlers for SIGSEGV and SIGBUS, once. It is for tests and for programs under
 * development. It covers CPU loads and stores, on emulated devices. A GPU fault shows as CUDA_ERROR_ILLEGAL_ADDRESS;
 * the library adds an explanation to that error's text at its next call.
 */
GAIA_API int gaia_explain_faults(void);

/*
 * Requests that can be waited for in steps, for programs that do other things in between, such as handling a signal.
 */

/* A request. Set it to zeros before gaia_start. */
struct gaia_call {
	void *running;  /* the library's; NULL: nothing to wait for */
	uint64_t pages; /* when it is over: how many pages an acquire updated, or in how many a release found stores */
};

#define GAIA_DO_ACQUIRE 1
#define GAIA_DO_RELEASE 2
#define GAIA_DO_SYNC 3   /* release and bring home; argument: 1 for stable storage, or 0 */
#define GAIA_DO_ADVISE 4 /* argument: the GAIA_MADV_ number */

/*
 * gaia_start starts one of the GAIA_DO_ requests for the len bytes at addr, and returns before the answer comes. It
 * first waits for the work that was begun in the stream, or in the whole context with GAIA_ALL_STREAMS. It waits for no
 * work with GAIA_NO_STREAM, for GAIA_DO_ADVISE, and on emulated devices.
 */
GAIA_API int gaia_start(struct gaia_call *call, int what, void *addr, size_t len, int argument, gaia_stream_t stream);

/*
 * gaia_start_use is gaia_use_for as a request. The bracket belongs to this thread once gaia_wait has returned 0. If no
 * range moves, it is open at once and call->running stays NULL. call->pages is then the bracket's number. gaia_cancel
 * gives the request up. gaia_done_use ends the thread's bracket with that number as gaia_done does: in the order of its
 * stream.
 */
GAIA_API int gaia_start_use(struct gaia_call *call, const struct gaia_range *ranges, size_t n, gaia_stream_t stream,
			    unsigned patience);
GAIA_API int gaia_done_use(uint64_t bracket);

/*
 * gaia_wait waits at most timeout milliseconds until the request is over, and returns its result. With a negative
 * timeout it waits without limit. While call->running is not NULL, the request is not over. The call then failed with
 * ETIMEDOUT or EINTR: call it again, or gaia_cancel. Any signal handler causes EINTR; without a timeout, only a handler
 * that does not restart calls. Only one thread may use a call.
 */
GAIA_API int gaia_wait(struct gaia_call *call, int timeout);

/* gaia_cancel stops waiting, at once. The request may still be carried out. It does nothing if no request runs. */
GAIA_API void gaia_cancel(struct gaia_call *call);

/*
 * Updates in place. A group is ranges of mappings of one mount whose stores are released at once: everyone sees all of
 * them or none. The manual is gaia_group_begin(3).
 */

struct gaia_group; /* an open group */

/*
 * gaia_group_begin opens a group of ranges of writable mappings. It returns NULL on failure. Store only after it has
 * returned. Until gaia_group_release, only programs on the same device see the stores. If the program ends or unmaps
 * one of the mappings before that, nothing of the group is released: the memory is what it was at the last release.
 */
GAIA_API struct gaia_group *gaia_group_begin(const struct gaia_range *ranges, size_t n);

/*
 * gaia_group_release publishes the group and frees it. It stores the files' new version into *version, unless version
 * is NULL. It waits for work on GPUs as gaia_mrelease does. After a failure the group must still be released or
 * aborted; after ECANCELED it can only be aborted.
 */
GAIA_API int gaia_group_release(struct gaia_group *group, uint64_t *version);

/* gaia_group_abort takes back what was stored into the group, and frees it. With NULL it does nothing. */
GAIA_API void gaia_group_abort(struct gaia_group *group);

/*
 * gaia_acquire_all acquires several ranges of one mount at once. They show all of each group up to *version, and
 * nothing of later groups. *version is the version of the newest group of the files, or 0 if there was none; version
 * may be NULL. If least is not 0, the call first waits until a file has at least that version: at most timeout
 * milliseconds, or without limit if timeout is negative. It fails with ETIMEDOUT, with EPIPE if the last program that
 * began groups of the files ends, and with EINTR after a signal handler.
 */
GAIA_API int gaia_acquire_all(
	const struct gaia_range *ranges, size_t n, uint64_t least, int timeout, uint64_t *version);

/*
 * gaia_read copies len bytes at addr out of a mapping's memory, and gaia_write copies len bytes into it. When they
 * return, the bytes are there.
 */
GAIA_API int gaia_read(const void *addr, void *to, size_t len);
GAIA_API int gaia_write(void *addr, const void *from, size_t len);

/* A copy within a device: length bytes at from, in a mapping, go to offset to in the new memory. */
struct gaia_copy {
	uint64_t to;
	const void *from;
	uint64_t length;
};

/*
 * gaia_copies allocates size bytes on the device of the mapping that contains addr, and copies count ranges of that
 * mapping there. The memory belongs to this process alone and to no file. gaia_read, gaia_write, gaia_info, gaia_munmap
 * and gaia_drop take it as they take a mapping. It returns MAP_FAILED on failure.
 */
GAIA_API void *gaia_copies(const void *addr, size_t size, const struct gaia_copy *copies, size_t count);

/*
 * gaia_status returns the status of a mount's daemon: a JSON document that the caller frees, or NULL on failure. fd is
 * an open descriptor of the mountpoint.
 */
GAIA_API char *gaia_status(int fd);

/*
 * A thread that works for another thread should use that thread's CUDA context. gaia_context returns the calling
 * thread's context. NULL: it has none, or this library has not loaded CUDA. gaia_lend_context gives the calling thread
 * a context: its calls use it when the thread itself has no context of the mapping's device. NULL takes it back.
 */
GAIA_API void *gaia_context(void);
GAIA_API void gaia_lend_context(void *context);

/*
 * gaia_error returns a text about the last failure of this library in the calling thread. If the daemon refused the
 * request, the text is the daemon's. The string is never NULL, and valid until the thread's next failure.
 */
GAIA_API const char *gaia_error(void);

/*
 * gaia_note returns a warning from the calling thread's last call if that succeeded, or "". The warning says that a
 * release, a sync or the end of a mapping found stores past the end of the file, which are not kept. The string is
 * never NULL, and valid until the thread's next call.
 */
GAIA_API const char *gaia_note(void);

#ifdef __cplusplus
}
#endif

#endif
