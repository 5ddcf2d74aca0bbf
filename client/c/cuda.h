/* Declarations that the GPU sources share: the driver's functions that the library calls. */
#ifndef GAIAFS_CUDA_H
#define GAIAFS_CUDA_H

#include "internal.h"

typedef int result;
typedef int device;
typedef uint64_t handle;
typedef uint64_t address;
typedef void *context;
typedef void *stream;
typedef void *graph;

/* Results that the library looks at. All others become an errno and a message. */
enum {
	NOT_READY = 600,
	CAPTURE_UNSUPPORTED = 900, /* the first of the results about captures, */
	CAPTURE_WRONG_THREAD = 908, /* and the last one */
};

enum { POSIX_DESCRIPTOR = 1 };               /* CUmemAllocationHandleType */
enum { LOCATION_DEVICE = 1 };                /* CUmemLocationType */
enum { ACCESS_READ = 1, ACCESS_BOTH = 3 };   /* CUmemAccess_flags */
enum { CAPTURE_ACTIVE = 1 };                 /* CUstreamCaptureStatus */
enum { CAPTURE_MODE_RELAXED = 2 };           /* CUstreamCaptureMode */
enum { UNTIL_AT_LEAST = 0 };                 /* CUstreamWaitValue_flags: cyclically */
enum { PORTABLE = 1, MAPPED = 2 };           /* of registered memory */
enum { WITHOUT_SYNC = 1, MOVE = 1 };         /* of user objects: CUuserObject_flags, CUuserObjectRetain_flags */
enum { WITHOUT_TIMING = 2 };                 /* CUevent_flags */
enum { NON_BLOCKING = 1 };                   /* CUstream_flags */
enum { MOST_DEVICES = 64 };                  /* CUDA shows a process no more than this */
enum { GRANULARITY = 2 << 20 };              /* hints are rounded to this */
#define PER_THREAD_STREAM ((stream)(uintptr_t)2) /* numbers up to this are default streams */

struct access {
	struct {
		int type, id;
	} location;
	int flags;
};

struct gaiafs_cu {
	result (*init)(unsigned flags);
	result (*name)(result r, const char **name);
	result (*words)(result r, const char **words);
	result (*device_count)(int *n);
	result (*device_get)(device *d, int ordinal);
	result (*device_uuid)(uint8_t uuid[GAIAFS_UUID], device d);
	result (*primary_retain)(context *c, device d);
	result (*primary_release)(device d);
	result (*ctx_current)(context *c);
	result (*ctx_device)(device *d);
	result (*ctx_push)(context c);
	result (*ctx_pop)(context *c);
	result (*import)(handle *h, void *os_handle, int type);
	result (*mem_release)(handle h);
	result (*reserve)(address *a, size_t n, size_t alignment, address hint, unsigned long long flags);
	result (*free)(address a, size_t n);
	result (*map)(address a, size_t n, size_t offset, handle h, unsigned long long flags);
	result (*unmap)(address a, size_t n);
	result (*set_access)(address a, size_t n, const struct access *who, size_t count);
	result (*ctx_sync)(void);
	result (*stream_sync)(stream s);
	result (*stream_create)(stream *s, unsigned flags);
	result (*stream_destroy)(stream s);
	result (*alloc)(address *a, size_t n);
	result (*dealloc)(address a);
	result (*to_host)(void *to, address from, size_t n);
	result (*to_device)(address to, const void *from, size_t n);
	result (*within)(address to, address from, size_t n, stream s);
	result (*stream_ctx)(stream s, context *c);
	result (*stream_query)(stream s);
	result (*event_create)(void **event, unsigned flags);
	result (*event_record)(void *event, stream s);
	result (*event_query)(void *event);
	result (*event_sync)(void *event);
	result (*event_destroy)(void *event);
	result (*launch)(stream s, void (*call)(void *), void *argument);
	result (*host_register)(void *at, size_t n, unsigned flags);
	result (*host_pointer)(address *a, void *at, unsigned flags);
	/* NULL in old drivers. */
	result (*can_access)(int *can, device d, device peer);
	result (*stream_id)(stream s, unsigned long long *id);
	result (*wait)(stream s, address word, uint32_t value, unsigned flags);
	result (*capture_mode)(int *mode);
	result (*capture_info)(stream s, int *status, uint64_t *id, graph *g, const void **nodes, size_t *n);
	result (*is_capturing)(stream s, int *status);
	result (*object_create)(void **object, void *data, void (*destroy)(void *), unsigned refs, unsigned flags);
	result (*object_release)(void *object, unsigned refs);
	result (*graph_retain)(graph g, void *object, unsigned refs, unsigned flags);
};

/* Loaded once gaiafs_cuda_kind.open has returned 0. */
extern struct gaiafs_cu gaiafs_cu;

/*
 * gaiafs_cu_check returns 0 for success. For a failure it returns an errno, with the call's name and the driver's text
 * in *f.
 */
int gaiafs_cu_check(result r, const char *call, struct gaiafs_fail *f);

/* The GPU of a mapping: what a struct gaiafs_gpu of this kind points to. */
struct gaiafs_cuda {
	device device;              /* immutable */
	uint8_t uuid[GAIAFS_UUID];  /* immutable */
	context primary;            /* the device's, if the mapping retains it; guarded by primary_lock */

	/* The mapping's memory. The thread that makes the mapping uses it, and later the one that ends it. */
	struct part {
		handle handle; /* 0: released */
		size_t size;
		size_t at; /* in a movable mapping: its place in the range */
	} *parts;
	size_t count, room, total; /* total: bytes of all parts; in a movable mapping bytes of its addresses */
	int64_t first;             /* file offset of the first extent */
	address range;             /* total bytes; 0: none */
	size_t mapped;             /* bytes of the range that are mapped */
	address block;             /* an allocation; 0: none. Freeing it waits for the context: see drop */
};

/* A thread's previous CUDA state, for gaiafs_cu_leave to restore. */
struct visit {
	bool pushed, relaxed;
	int mode;
};

/* gaiafs_cu_relax allows the thread calls that are forbidden while another thread captures a stream. */
void gaiafs_cu_relax(struct visit *v);
/*
 * gaiafs_cu_enter makes a context of the device current. It prefers the thread's current context, then the lent one,
 * then the primary one. That stays retained: by the mapping, and later until the process ends.
 */
int gaiafs_cu_enter(struct gaiafs_cuda *c, struct visit *v, struct gaiafs_fail *f);
void gaiafs_cu_leave(struct visit *v);
static inline struct gaiafs_cuda *gaiafs_cu_of(struct gaiafs_gpu *gpu)
{
	return (struct gaiafs_cuda *)gpu;
}

/* The functions of gaiafs_cuda_kind in cuda_stream.c. */
int gaiafs_cu_enqueue(struct gaiafs_gpu *gpu, gaia_stream_t s, struct gaiafs_work *w, bool *captured, bool *launched,
		      struct gaiafs_fail *f);
int gaiafs_cu_after(
	struct gaiafs_gpu *gpu, gaia_stream_t s, void (*call)(void *), void *argument, struct gaiafs_fail *f);
int gaiafs_cu_stream_number(struct gaiafs_gpu *gpu, gaia_stream_t s, uint64_t *number, struct gaiafs_fail *f);
int gaiafs_cu_mark(struct gaiafs_gpu *gpu, gaia_stream_t s, void **event, struct gaiafs_fail *f);
bool gaiafs_cu_passed(void *event);
void gaiafs_cu_unmark(struct gaiafs_gpu *gpu, void *event, bool wait);
bool gaiafs_cu_lost(void *context, struct gaiafs_fail *f);
/* Those in cuda_copy.c. */
int gaiafs_cu_quiesce(struct gaiafs_mapping *m, gaia_stream_t s, struct gaiafs_fail *f);
int gaiafs_cu_read(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
int gaiafs_cu_write(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
int gaiafs_cu_copies(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list,
	size_t count, struct gaiafs_fail *f);

#endif
