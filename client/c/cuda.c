/*
 * GPUs: libcuda.so.1, which is loaded when a mount has GPUs and never otherwise, and the memory that it imports.
 *
 * CUDA maps an imported handle only from its first byte on and only whole. So the extents of a mapping lie side by side in
 * one range of addresses, each of them whole, and what the program gets begins somewhere in the first one.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef int device;
typedef uint64_t handle;
typedef uint64_t address;
typedef void *context;
typedef void *stream;
typedef void *graph;

/* Results of calls that are looked at; the others only get words. */
enum {
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_HANDLE = 400,
	NOT_READY = 600,
	NOT_PERMITTED = 800,
	NOT_SUPPORTED = 801,
	CAPTURE_UNSUPPORTED = 900, /* the first that speaks of captures, */
	CAPTURE_WRONG_THREAD = 908, /* and the last */
};

enum { POSIX_DESCRIPTOR = 1 };               /* CUmemAllocationHandleType */
enum { LOCATION_DEVICE = 1 };                /* CUmemLocationType */
enum { ACCESS_READ = 1, ACCESS_BOTH = 3 };   /* CUmemAccess_flags */
enum { CAPTURE_ACTIVE = 1 };                 /* CUstreamCaptureStatus */
enum { CAPTURE_MODE_RELAXED = 2 };           /* CUstreamCaptureMode */
enum { WITHOUT_SYNC = 1, MOVE = 1 };         /* of user objects: CUuserObject_flags, CUuserObjectRetain_flags */
enum { GRANULARITY = 2 << 20 };              /* to which hints are rounded */
#define PER_THREAD_STREAM ((stream)(uintptr_t)2) /* the numbers up to this one are default streams */

struct access {
	struct {
		int type, id;
	} location;
	int flags;
};

static struct {
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
	result (*release)(handle h);
	result (*reserve)(address *a, size_t n, size_t alignment, address hint, unsigned long long flags);
	result (*free)(address a, size_t n);
	result (*map)(address a, size_t n, size_t offset, handle h, unsigned long long flags);
	result (*unmap)(address a, size_t n);
	result (*set_access)(address a, size_t n, const struct access *who, size_t count);
	result (*stream_ctx)(stream s, context *c);
	result (*stream_query)(stream s);
	result (*launch)(stream s, void (*call)(void *), void *argument);
	/* NULL in old drivers. */
	result (*capture_mode)(int *mode);
	result (*capture_info)(stream s, int *status, uint64_t *id, graph *g, const void **nodes, size_t *n);
	result (*is_capturing)(stream s, int *status);
	result (*object_create)(void **object, void *data, void (*destroy)(void *), unsigned refs, unsigned flags);
	result (*object_release)(void *object, unsigned refs);
	result (*graph_retain)(graph g, void *object, unsigned refs, unsigned flags);
} cu;

/* The driver's names; a second one is taken where the first is missing. */
static const struct {
	void *slot;
	const char *name, *second;
	bool optional;
} symbols[] = {
	{ &cu.init, "cuInit", NULL, false },
	{ &cu.name, "cuGetErrorName", NULL, false },
	{ &cu.words, "cuGetErrorString", NULL, false },
	{ &cu.device_count, "cuDeviceGetCount", NULL, false },
	{ &cu.device_get, "cuDeviceGet", NULL, false },
	{ &cu.device_uuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid", false },
	{ &cu.primary_retain, "cuDevicePrimaryCtxRetain", NULL, false },
	{ &cu.primary_release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", false },
	{ &cu.ctx_current, "cuCtxGetCurrent", NULL, false },
	{ &cu.ctx_device, "cuCtxGetDevice", NULL, false },
	{ &cu.ctx_push, "cuCtxPushCurrent_v2", NULL, false },
	{ &cu.ctx_pop, "cuCtxPopCurrent_v2", NULL, false },
	{ &cu.import, "cuMemImportFromShareableHandle", NULL, false },
	{ &cu.release, "cuMemRelease", NULL, false },
	{ &cu.reserve, "cuMemAddressReserve", NULL, false },
	{ &cu.free, "cuMemAddressFree", NULL, false },
	{ &cu.map, "cuMemMap", NULL, false },
	{ &cu.unmap, "cuMemUnmap", NULL, false },
	{ &cu.set_access, "cuMemSetAccess", NULL, false },
	{ &cu.stream_ctx, "cuStreamGetCtx", NULL, false },
	{ &cu.stream_query, "cuStreamQuery", NULL, false },
	{ &cu.launch, "cuLaunchHostFunc", NULL, false },
	{ &cu.capture_mode, "cuThreadExchangeStreamCaptureMode", NULL, true },
	{ &cu.capture_info, "cuStreamGetCaptureInfo_v2", NULL, true },
	{ &cu.is_capturing, "cuStreamIsCapturing", NULL, true },
	{ &cu.object_create, "cuUserObjectCreate", NULL, true },
	{ &cu.object_release, "cuUserObjectRelease", NULL, true },
	{ &cu.graph_retain, "cuGraphRetainUserObject", NULL, true },
};

/* What loading came to; set once. */
static struct gaiafs_fail unusable;
static pid_t loader;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

static int errno_of(result r)
{
	if (r >= CAPTURE_UNSUPPORTED && r <= CAPTURE_WRONG_THREAD)
		return EINVAL;
	switch (r) {
	case OUT_OF_MEMORY:
		return ENOMEM;
	case NOT_INITIALIZED:
	case NO_DEVICE:
	case INVALID_DEVICE:
		return ENODEV;
	case INVALID_HANDLE:
		return EINVAL;
	case NOT_PERMITTED:
		return EPERM;
	case NOT_SUPPORTED:
		return ENOTSUP;
	default:
		return EIO;
	}
}

/* check returns 0 for success, else an errno with the call's name and the driver's words in *f. */
static int check(result r, const char *call, struct gaiafs_fail *f)
{
	const char *name = NULL, *words = NULL;

	if (r == 0)
		return 0;
	if (cu.name(r, &name) != 0 || name == NULL)
		name = "error";
	if (cu.words(r, &words) != 0 || words == NULL)
		words = "no words for it";
	return gaiafs_failed(f, errno_of(r), "%s failed: %s (%d), %s", call, name, r, words);
}

static void load(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	struct gaiafs_fail f;

	loader = getpid();
	if (library == NULL) {
		const char *why = dlerror();

		(void)gaiafs_failed(&unusable, ENODEV,
				    "the mount's devices are GPUs, and this process cannot load libcuda.so.1, which comes with "
				    "NVIDIA's driver: %s", why != NULL ? why : "no reason given");
		return;
	}
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		void *found = dlsym(library, symbols[i].name);

		if (found == NULL && symbols[i].second != NULL)
			found = dlsym(library, symbols[i].second);
		if (found == NULL && !symbols[i].optional) {
			(void)gaiafs_failed(&unusable, ENODEV, "libcuda.so.1 has no %s: install a newer NVIDIA driver",
					    symbols[i].name);
			return;
		}
		memcpy(symbols[i].slot, &found, sizeof found);
	}
	if (check(cu.init(0), "cuInit", &f) != 0)
		(void)gaiafs_failed(&unusable, ENODEV,
				    "CUDA cannot be used in this process: %s; see to the driver, to CUDA_VISIBLE_DEVICES, and "
				    "that the process is not the child of one that used CUDA", f.text);
}

struct gaiafs_cuda {
	device device;              /* immutable */
	uint8_t uuid[GAIAFS_UUID];  /* immutable */
	context primary;            /* the device's, if retained; guarded by primary_lock */

	/* The mapping's, for the thread that makes it, and later for the one that ends it. */
	struct part {
		handle handle; /* 0: given back */
		size_t size;
	} *parts;
	size_t count, room, total; /* total: bytes of all parts */
	int64_t first;             /* file offset of the first extent */
	address range;             /* total bytes; 0: none */
	size_t mapped;             /* bytes of it that are mapped */
};

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

const uint8_t *gaiafs_cuda_uuid(const struct gaiafs_cuda *c)
{
	return c->uuid;
}

void gaiafs_cuda_free(struct gaiafs_cuda *c)
{
	if (c == NULL)
		return;
	free(c->parts);
	free(c);
}

/* How a thread's CUDA state was found, for leave_device. */
struct visit {
	bool pushed, relaxed;
	int mode;
};

/* relax lets the thread call what is forbidden while another one captures a stream. */
static void relax(struct visit *v)
{
	v->mode = CAPTURE_MODE_RELAXED;
	v->relaxed = cu.capture_mode != NULL && cu.capture_mode(&v->mode) == 0;
}

static void leave_device(struct visit *v)
{
	context ignored;

	if (v->pushed)
		(void)cu.ctx_pop(&ignored);
	if (v->relaxed)
		(void)cu.capture_mode(&v->mode);
}

/* enter_device makes a context of the device current: the caller's, if it is one, else the primary one, which is retained
 * until the mapping ends. */
static int enter_device(struct gaiafs_cuda *c, struct visit *v, struct gaiafs_fail *f)
{
	context now = NULL;
	device of;
	int err = 0;

	*v = (struct visit){ 0 };
	relax(v);
	if (cu.ctx_current(&now) == 0 && now != NULL && cu.ctx_device(&of) == 0 && of == c->device)
		return 0;
	pthread_mutex_lock(&primary_lock);
	if (c->primary == NULL && (err = check(cu.primary_retain(&now, c->device), "cuDevicePrimaryCtxRetain", f)) == 0)
		c->primary = now;
	now = c->primary;
	pthread_mutex_unlock(&primary_lock);
	if (err == 0)
		err = check(cu.ctx_push(now), "cuCtxPushCurrent", f);
	v->pushed = err == 0;
	if (err != 0)
		leave_device(v);
	return err;
}

int gaiafs_cuda_open(int ordinal, struct gaiafs_cuda **out, struct gaiafs_fail *f)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	struct gaiafs_cuda *c;
	struct visit v;
	int n = 0;

	pthread_once(&load_once, load);
	if (unusable.errnum != 0) {
		*f = unusable;
		return f->errnum;
	}
	if (loader != getpid())
		return gaiafs_failed(f, ENODEV, "the process that this one was forked from uses CUDA, which a child then cannot: "
				     "fork before the first mapping, or execute a program in the child");
	if (check(cu.device_count(&n), "cuDeviceGetCount", f) != 0)
		return f->errnum;
	if (ordinal < 0 || ordinal >= n)
		return gaiafs_failed(f, ENODEV, "there is no CUDA device %d: this process sees %d, with CUDA_VISIBLE_DEVICES%s%s",
				     ordinal, n, visible != NULL ? "=" : " not set", visible != NULL ? visible : "");
	c = calloc(1, sizeof *c);
	if (c == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	if (check(cu.device_get(&c->device, ordinal), "cuDeviceGet", f) != 0 ||
	    check(cu.device_uuid(c->uuid, c->device), "cuDeviceGetUuid", f) != 0) {
		free(c);
		return f->errnum;
	}
	/* A context takes its time to be made: now, under no lock. */
	if (enter_device(c, &v, f) != 0) {
		if (c->primary != NULL)
			(void)cu.primary_release(c->device);
		free(c);
		return f->errnum;
	}
	leave_device(&v);
	*out = c;
	return 0;
}

static int begin(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f)
{
	(void)m, (void)addr;
	if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))
		return gaiafs_failed(f, EINVAL, "MAP_FIXED is not for GPUs, where the driver chooses the address; an address "
				     "without it is a hint");
	return 0;
}

static int add(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = m->cuda;
	struct visit v;
	handle h;
	int err;

	if (c->count == c->room) {
		size_t more = c->room == 0 ? 16 : 2 * c->room;
		struct part *bigger = realloc(c->parts, more * sizeof *bigger);

		if (bigger == NULL)
			return gaiafs_failed(f, ENOMEM, "out of memory");
		c->parts = bigger;
		c->room = more;
	}
	err = enter_device(c, &v, f);
	if (err != 0)
		return err;
	err = check(cu.import(&h, (void *)(intptr_t)fd, POSIX_DESCRIPTOR), "cuMemImportFromShareableHandle", f);
	leave_device(&v);
	if (err != 0)
		return err;
	if (c->count == 0)
		c->first = extent->off;
	c->parts[c->count++] = (struct part){ h, (size_t)extent->size };
	c->total += (size_t)extent->size;
	return 0;
}

/* lay reserves the range and maps the parts into it. What it leaves behind where it fails, drop takes away. */
static int lay(struct gaiafs_cuda *c, address hint, bool writable, struct gaiafs_fail *f)
{
	const struct access who = { { LOCATION_DEVICE, c->device }, writable ? ACCESS_BOTH : ACCESS_READ };
	int err = check(cu.reserve(&c->range, c->total, 0, hint, 0), "cuMemAddressReserve", f);

	if (err != 0) {
		c->range = 0;
		return err;
	}
	for (size_t i = 0; i < c->count; i++) {
		struct part *p = &c->parts[i];

		err = check(cu.map(c->range + c->mapped, p->size, 0, p->handle, 0), "cuMemMap", f);
		if (err != 0)
			return err;
		c->mapped += p->size;
		err = check(cu.release(p->handle), "cuMemRelease", f); /* the mapping keeps the memory */
		if (err != 0)
			return err;
		p->handle = 0;
	}
	return check(cu.set_access(c->range, c->total, &who, 1), "cuMemSetAccess", f);
}

static int finish(struct gaiafs_mapping *m, void *addr, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = m->cuda;
	uint64_t in = m->off - (uint64_t)c->first;
	address hint = (uintptr_t)addr > in ? ((uintptr_t)addr - in) / GRANULARITY * GRANULARITY : 0;
	struct visit v;
	int err = enter_device(c, &v, f);

	if (err != 0)
		return err;
	err = lay(c, hint, m->writable, f);
	leave_device(&v);
	if (err != 0)
		return err;
	m->base = (uint8_t *)(uintptr_t)(c->range + in);
	/* The addresses are ours alone before the table has them, and are given back after it has not. */
	pthread_mutex_lock(&gaiafs_table_lock);
	err = gaiafs_table_room_locked();
	if (err == 0)
		gaiafs_table_add_locked(m);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return err == 0 ? 0 : gaiafs_failed(f, err, "out of memory");
}

static void leave(struct gaiafs_mapping *m)
{
	(void)m;
}

/* drop goes on after a failure, and reports the first. */
static int drop(struct gaiafs_mapping *m, struct gaiafs_fail *f)
{
	struct gaiafs_fail fails[4] = { 0 };
	struct gaiafs_cuda *c = m->cuda;
	struct visit v = { 0 };

	if (c->range != 0 || c->count > 0)
		(void)enter_device(c, &v, &fails[0]); /* a context that is lost may still let go of its memory */
	if (c->mapped > 0)
		(void)check(cu.unmap(c->range, c->mapped), "cuMemUnmap", &fails[1]);
	if (c->range != 0 && fails[1].errnum == 0)
		(void)check(cu.free(c->range, c->total), "cuMemAddressFree", &fails[2]);
	for (size_t i = 0; i < c->count; i++)
		if (c->parts[i].handle != 0)
			(void)check(cu.release(c->parts[i].handle), "cuMemRelease", &fails[3]);
	leave_device(&v);
	if (c->primary != NULL)
		(void)cu.primary_release(c->device);
	free(c->parts);
	c->primary = NULL;
	c->parts = NULL;
	c->count = c->room = c->total = c->mapped = 0;
	c->range = 0;
	for (size_t i = 0; i < sizeof fails / sizeof fails[0]; i++)
		if (fails[i].errnum != 0) {
			*f = fails[i];
			return f->errnum;
		}
	return 0;
}

const struct gaiafs_kind gaiafs_cuda_kind = {
	.number = GAIAFS_KIND_CUDA,
	.begin = begin,
	.add = add,
	.finish = finish,
	.leave = leave,
	.drop = drop,
};

/* Streams */

/* capture gives the work to the graph that the stream is captured into, if it is. */
static int capture(stream s, struct gaiafs_work *w, bool *captured, struct gaiafs_fail *f)
{
	int status = 0;
	uint64_t id;
	graph g = NULL;
	void *object;

	if (cu.capture_info != NULL) {
		if (check(cu.capture_info(s, &status, &id, &g, NULL, NULL), "cuStreamGetCaptureInfo", f) != 0)
			return f->errnum;
	} else if (cu.is_capturing != NULL) {
		if (check(cu.is_capturing(s, &status), "cuStreamIsCapturing", f) != 0)
			return f->errnum;
	}
	if (status != CAPTURE_ACTIVE)
		return 0;
	if (g == NULL || cu.object_create == NULL || cu.object_release == NULL || cu.graph_retain == NULL)
		return gaiafs_failed(f, ENOTSUP, "the stream is captured, and this driver's graphs cannot keep what the call "
				     "needs: install one for CUDA 11.3 or newer");
	w->leave(w);
	if (check(cu.object_create(&object, w, w->free, 1, WITHOUT_SYNC), "cuUserObjectCreate", f) != 0)
		return f->errnum;
	*captured = w->captured = true; /* and from here on the object's, which may free it */
	if (check(cu.graph_retain(g, object, 1, MOVE), "cuGraphRetainUserObject", f) == 0)
		return 0;
	(void)cu.object_release(object, 1);
	return f->errnum;
}

int gaiafs_cuda_enqueue(struct gaiafs_cuda *c, void *s, struct gaiafs_work *w, bool *captured, struct gaiafs_fail *f)
{
	struct visit v = { 0 };
	context of = NULL;
	device d = -1;
	int err;

	*captured = false;
	if (s <= PER_THREAD_STREAM) {
		err = enter_device(c, &v, f);
		if (err == 0 && v.relaxed) { /* a launch is what a capture is about */
			(void)cu.capture_mode(&v.mode);
			v.relaxed = false;
		}
		if (err == 0)
			err = check(cu.ctx_current(&of), "cuCtxGetCurrent", f);
	} else {
		err = check(cu.stream_ctx(s, &of), "cuStreamGetCtx", f);
		if (err == 0)
			err = check(cu.ctx_push(of), "cuCtxPushCurrent", f);
		v.pushed = err == 0;
		if (err == 0)
			err = check(cu.ctx_device(&d), "cuCtxGetDevice", f);
		if (err == 0 && d != c->device)
			err = gaiafs_failed(f, EINVAL, "the stream is of CUDA device %d and the mapping on %d", d, c->device);
	}
	if (err == 0) {
		__atomic_store_n(&w->context, of, __ATOMIC_RELEASE);
		err = capture(s, w, captured, f);
	}
	if (err == 0)
		err = check(cu.launch(s, w->run, w), "cuLaunchHostFunc", f);
	leave_device(&v);
	return err;
}

bool gaiafs_cuda_lost(void *of, struct gaiafs_fail *f)
{
	struct visit v = { 0 };
	result r;

	relax(&v);
	r = cu.ctx_push(of);
	if (r == 0) {
		v.pushed = true;
		r = cu.stream_query(PER_THREAD_STREAM);
	}
	leave_device(&v);
	if (r == 0 || r == NOT_READY || (r >= CAPTURE_UNSUPPORTED && r <= CAPTURE_WRONG_THREAD))
		return false;
	(void)check(r, "the stream", f);
	return true;
}
