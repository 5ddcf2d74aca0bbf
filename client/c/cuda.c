/*
 * GPUs: libcuda.so.1, which is loaded only if a mount has GPUs, and the GPU memory that is imported.
 *
 * CUDA maps an imported handle only whole. So the extents of a mapping lie side by side in one range of addresses, each
 * of them whole, and the program's pointer may point into the middle of the first one.
 */
#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct gaiafs_cu gaiafs_cu;

/* The driver's functions. If name is missing, second is tried. */
static const struct {
	void *slot;
	const char *name, *second;
	bool optional;
} symbols[] = {
	{ &gaiafs_cu.init, "cuInit", NULL, false },
	{ &gaiafs_cu.name, "cuGetErrorName", NULL, false },
	{ &gaiafs_cu.words, "cuGetErrorString", NULL, false },
	{ &gaiafs_cu.device_count, "cuDeviceGetCount", NULL, false },
	{ &gaiafs_cu.device_get, "cuDeviceGet", NULL, false },
	{ &gaiafs_cu.device_uuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid", false },
	{ &gaiafs_cu.primary_retain, "cuDevicePrimaryCtxRetain", NULL, false },
	{ &gaiafs_cu.primary_release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", false },
	{ &gaiafs_cu.ctx_current, "cuCtxGetCurrent", NULL, false },
	{ &gaiafs_cu.ctx_device, "cuCtxGetDevice", NULL, false },
	{ &gaiafs_cu.ctx_push, "cuCtxPushCurrent_v2", NULL, false },
	{ &gaiafs_cu.ctx_pop, "cuCtxPopCurrent_v2", NULL, false },
	{ &gaiafs_cu.import, "cuMemImportFromShareableHandle", NULL, false },
	{ &gaiafs_cu.mem_release, "cuMemRelease", NULL, false },
	{ &gaiafs_cu.reserve, "cuMemAddressReserve", NULL, false },
	{ &gaiafs_cu.free, "cuMemAddressFree", NULL, false },
	{ &gaiafs_cu.map, "cuMemMap", NULL, false },
	{ &gaiafs_cu.unmap, "cuMemUnmap", NULL, false },
	{ &gaiafs_cu.set_access, "cuMemSetAccess", NULL, false },
	{ &gaiafs_cu.ctx_sync, "cuCtxSynchronize", NULL, false },
	{ &gaiafs_cu.stream_sync, "cuStreamSynchronize", NULL, false },
	{ &gaiafs_cu.stream_create, "cuStreamCreate", NULL, false },
	{ &gaiafs_cu.stream_destroy, "cuStreamDestroy_v2", "cuStreamDestroy", false },
	{ &gaiafs_cu.alloc, "cuMemAlloc_v2", NULL, false },
	{ &gaiafs_cu.dealloc, "cuMemFree_v2", NULL, false },
	{ &gaiafs_cu.to_host, "cuMemcpyDtoH_v2", NULL, false },
	{ &gaiafs_cu.to_device, "cuMemcpyHtoD_v2", NULL, false },
	{ &gaiafs_cu.within, "cuMemcpyDtoDAsync_v2", NULL, false },
	{ &gaiafs_cu.stream_ctx, "cuStreamGetCtx", NULL, false },
	{ &gaiafs_cu.stream_query, "cuStreamQuery", NULL, false },
	{ &gaiafs_cu.event_create, "cuEventCreate", NULL, false },
	{ &gaiafs_cu.event_record, "cuEventRecord", NULL, false },
	{ &gaiafs_cu.event_query, "cuEventQuery", NULL, false },
	{ &gaiafs_cu.event_sync, "cuEventSynchronize", NULL, false },
	{ &gaiafs_cu.event_destroy, "cuEventDestroy_v2", "cuEventDestroy", false },
	{ &gaiafs_cu.launch, "cuLaunchHostFunc", NULL, false },
	{ &gaiafs_cu.host_register, "cuMemHostRegister_v2", "cuMemHostRegister", false },
	{ &gaiafs_cu.host_pointer, "cuMemHostGetDevicePointer_v2", NULL, false },
	{ &gaiafs_cu.can_access, "cuDeviceCanAccessPeer", NULL, true },
	{ &gaiafs_cu.stream_id, "cuStreamGetId", NULL, true },
	{ &gaiafs_cu.wait, "cuStreamWaitValue32_v2", NULL, true },
	{ &gaiafs_cu.capture_mode, "cuThreadExchangeStreamCaptureMode", NULL, true },
	{ &gaiafs_cu.capture_info, "cuStreamGetCaptureInfo_v2", NULL, true },
	{ &gaiafs_cu.is_capturing, "cuStreamIsCapturing", NULL, true },
	{ &gaiafs_cu.object_create, "cuUserObjectCreate", NULL, true },
	{ &gaiafs_cu.object_release, "cuUserObjectRelease", NULL, true },
	{ &gaiafs_cu.graph_retain, "cuGraphRetainUserObject", NULL, true },
};

/* The result of loading; set once. */
static struct gaiafs_fail unusable;
static pid_t loader; /* atomic: the process that has loaded all functions; 0: none */
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

#include "cuda_errors.h"

/* CUDA_ERROR_ILLEGAL_ADDRESS. The driver reports it at some later call. */
enum { ILLEGAL_ADDRESS = 700 };
#define ILLEGAL_ADDRESS_WORDS                                                                                          \
	". A kernel before this call used an address that has no memory, or stored into read-only memory: "                  \
	"memory that moves is there in brackets only (gaia_use, gaiafs.use)"

int gaiafs_cu_check(result r, const char *call, struct gaiafs_fail *f)
{
	const char *name = NULL, *words = NULL;

	if (r == 0)
		return 0;
	if (gaiafs_cu.name(r, &name) != 0 || name == NULL)
		name = "error";
	if (gaiafs_cu.words(r, &words) != 0 || words == NULL)
		words = "no words for it";
	return gaiafs_failed(f, errno_of(r), "%s failed: %s (%d), %s%s", call, name, r, words,
			     r == ILLEGAL_ADDRESS ? ILLEGAL_ADDRESS_WORDS : "");
}

static void load(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	struct gaiafs_fail f;

	if (library == NULL) {
		const char *why = dlerror();

		(void)gaiafs_failed(&unusable, ENODEV,
				    "the mount's devices are GPUs, and libcuda.so.1 cannot be loaded here (%s): install the NVIDIA "
				    "driver's library in this environment, or start the container with access to the GPUs",
				    why != NULL ? why : "no reason given");
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
	if (gaiafs_cu_check(gaiafs_cu.init(0), "cuInit", &f) != 0)
		(void)gaiafs_failed(&unusable, ENODEV,
				    "CUDA cannot be used in this process: %s. CUDA_VISIBLE_DEVICES is %s%s%s; a child of a process "
				    "that used CUDA cannot use it", f.text, visible != NULL ? "'" : "not set",
				    visible != NULL ? visible : "", visible != NULL ? "'" : "");
	__atomic_store_n(&loader, getpid(), __ATOMIC_RELEASE);
}

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

/*
 * The devices whose primary context stays retained until the process ends, by their CUDA numbers. Guarded by
 * primary_lock. Making a context and ending it takes more than a second while several processes do so. A program with
 * no other use for the context would pay that for each file that it maps and unmaps.
 */
static uint64_t kept;

/* leave_primary gives up a mapping's reference to its primary context, or keeps it for later mappings. */
static void leave_primary(struct gaiafs_cuda *c, bool keep)
{
	if (c->primary == NULL)
		return;
	pthread_mutex_lock(&primary_lock);
	keep = keep && c->device < 64 && (kept >> c->device & 1) == 0;
	if (keep)
		kept |= UINT64_C(1) << c->device;
	pthread_mutex_unlock(&primary_lock);
	if (!keep)
		(void)gaiafs_cu.primary_release(c->device);
	c->primary = NULL;
}

static const uint8_t *uuid_of(const struct gaiafs_gpu *gpu)
{
	return ((const struct gaiafs_cuda *)gpu)->uuid;
}

static void free_gpu(struct gaiafs_gpu *gpu)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(gpu);

	free(c->parts);
	free(c);
}

void gaiafs_cu_relax(struct visit *v)
{
	v->mode = CAPTURE_MODE_RELAXED;
	v->relaxed = gaiafs_cu.capture_mode != NULL && gaiafs_cu.capture_mode(&v->mode) == 0;
}

void gaiafs_cu_leave(struct visit *v)
{
	context ignored;

	if (v->pushed)
		(void)gaiafs_cu.ctx_pop(&ignored);
	if (v->relaxed)
		(void)gaiafs_cu.capture_mode(&v->mode);
}

/* Another thread's context, which this thread uses if it has no context of the device itself. */
static _Thread_local context lent;

static bool current_is(device d)
{
	device of;

	return gaiafs_cu.ctx_device(&of) == 0 && of == d;
}

int gaiafs_cu_enter(struct gaiafs_cuda *c, struct visit *v, struct gaiafs_fail *f)
{
	context now = NULL, ignored;
	int err;

	*v = (struct visit){ 0 };
	gaiafs_cu_relax(v);
	err = gaiafs_cu_check(gaiafs_cu.ctx_current(&now), "cuCtxGetCurrent", f);
	if (err == 0 && now != NULL && current_is(c->device))
		return 0;
	if (err == 0 && lent != NULL && gaiafs_cu.ctx_push(lent) == 0) {
		v->pushed = true;
		if (current_is(c->device))
			return 0;
		(void)gaiafs_cu.ctx_pop(&ignored);
		v->pushed = false;
	}
	if (err == 0) {
		pthread_mutex_lock(&primary_lock);
		if (c->primary == NULL)
			err = gaiafs_cu_check(gaiafs_cu.primary_retain(&now, c->device), "cuDevicePrimaryCtxRetain", f);
		if (err == 0 && c->primary == NULL)
			c->primary = now;
		now = c->primary;
		pthread_mutex_unlock(&primary_lock);
	}
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.ctx_push(now), "cuCtxPushCurrent", f);
	v->pushed = err == 0;
	if (err != 0)
		gaiafs_cu_leave(v);
	return err;
}

void *gaia_context(void)
{
	context now = NULL;

	if (__atomic_load_n(&loader, __ATOMIC_ACQUIRE) != getpid() || gaiafs_cu.ctx_current(&now) != 0)
		return NULL;
	return now != NULL ? now : lent;
}

void gaia_lend_context(void *c)
{
	lent = c;
}

static int open_gpu(struct gaiafs_mapping *m, bool used, struct gaiafs_fail *f)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	struct gaiafs_cuda *c;
	struct visit v;
	int ordinal = m->dev, n = 0;

	pthread_once(&load_once, load);
	if (unusable.errnum != 0) {
		*f = unusable;
		return f->errnum;
	}
	if (loader != getpid())
		return gaiafs_failed(f, ENODEV, "the process that this one was forked from uses CUDA, which a child then cannot: "
				     "fork before the first mapping, or start a program of its own (multiprocessing's spawn in Python)");
	if (gaiafs_cu_check(gaiafs_cu.device_count(&n), "cuDeviceGetCount", f) != 0)
		return f->errnum;
	if (ordinal < 0 || ordinal >= n)
		return gaiafs_failed(f, ENODEV, "there is no CUDA device %d: this process sees %d, with CUDA_VISIBLE_DEVICES%s%s",
				     ordinal, n, visible != NULL ? "=" : " not set", visible != NULL ? visible : "");
	c = calloc(1, sizeof *c);
	if (c == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	if (gaiafs_cu_check(gaiafs_cu.device_get(&c->device, ordinal), "cuDeviceGet", f) != 0 ||
	    gaiafs_cu_check(gaiafs_cu.device_uuid(c->uuid, c->device), "cuDeviceGetUuid", f) != 0) {
		free(c);
		return f->errnum;
	}
	m->gpu = (struct gaiafs_gpu *)c;
	if (!used)
		return 0;
	/* Making a context takes time, so do it here, without a lock. */
	if (gaiafs_cu_enter(c, &v, f) != 0) {
		leave_primary(c, false);
		free(c);
		m->gpu = NULL;
		return f->errnum;
	}
	gaiafs_cu_leave(&v);
	return 0;
}

static int begin(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f)
{
	(void)addr;
	if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))
		return gaiafs_failed(f, EINVAL, "MAP_FIXED is not for GPUs, where the driver chooses the address; an address "
				     "without it is a hint");
	if (m->movable && (m->flags & GAIA_MAP_PEERS))
		return gaiafs_failed(f, EINVAL, "memory that moves is for one GPU");
	return 0;
}

/*
 * The first and the last extent may reach past the mapping's ends, and each is mapped whole. So a movable mapping
 * reserves addresses up to multiples of this size.
 */
#define LARGEST_EXTENT ((uint64_t)1 << 30)

/* reserve_movable reserves the addresses of a movable mapping. move maps extents there. */
static int reserve_movable(struct gaiafs_mapping *m, address hint, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(m->gpu);
	uint64_t begin = m->off & ~(LARGEST_EXTENT - 1),
			 end = (m->off + m->size + LARGEST_EXTENT - 1) & ~(LARGEST_EXTENT - 1);

	c->first = (int64_t)begin;
	c->total = (size_t)(end - begin);
	if (gaiafs_cu_check(gaiafs_cu.reserve(&c->range, c->total, 0, hint, 0), "cuMemAddressReserve", f) != 0)
		c->range = 0;
	return f->errnum;
}

/* room_for_part makes room for one more part of c. */
static int room_for_part(struct gaiafs_cuda *c, struct gaiafs_fail *f)
{
	size_t more = c->room == 0 ? 16 : 2 * c->room;
	struct part *bigger;

	if (c->count < c->room)
		return 0;
	bigger = realloc(c->parts, more * sizeof *bigger);
	if (bigger == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	c->parts = bigger;
	c->room = more;
	return 0;
}

static int add(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(m->gpu);
	struct visit v;
	handle h;
	int err;

	err = room_for_part(c, f);
	if (err != 0)
		return err;
	err = gaiafs_cu_enter(c, &v, f);
	if (err != 0)
		return err;
	err = gaiafs_cu_check(gaiafs_cu.import(&h, (void *)(intptr_t)fd, POSIX_DESCRIPTOR), "cuMemImportFromShareableHandle", f);
	gaiafs_cu_leave(&v);
	if (err != 0)
		return err;
	if (c->count == 0)
		c->first = extent->off;
	c->parts[c->count++] = (struct part){ .handle = h, .size = (size_t)extent->size };
	c->total += (size_t)extent->size;
	return 0;
}

/* give_access lets the device use the range. With peers, so may the process's other GPUs that can reach the memory. */
static int give_access(struct gaiafs_cuda *c, address at, size_t size, bool writable, bool peers, struct gaiafs_fail *f)
{
	const int flags = writable ? ACCESS_BOTH : ACCESS_READ;
	struct access who[MOST_DEVICES] = { { { LOCATION_DEVICE, c->device }, flags } };
	size_t n = 1;
	int count = 0;

	if (peers && gaiafs_cu.can_access == NULL)
		return gaiafs_failed(f, ENOTSUP, "libcuda.so.1 has no cuDeviceCanAccessPeer: install a newer NVIDIA driver");
	if (peers && gaiafs_cu_check(gaiafs_cu.device_count(&count), "cuDeviceGetCount", f) != 0)
		return f->errnum;
	for (int i = 0; i < count && n < MOST_DEVICES; i++) {
		device other;
		int can = 0;

		if (gaiafs_cu_check(gaiafs_cu.device_get(&other, i), "cuDeviceGet", f) != 0)
			return f->errnum;
		if (other == c->device)
			continue;
		if (gaiafs_cu_check(gaiafs_cu.can_access(&can, other, c->device), "cuDeviceCanAccessPeer", f) != 0)
			return f->errnum;
		if (can)
			who[n++] = (struct access){ { LOCATION_DEVICE, other }, flags };
	}
	return gaiafs_cu_check(gaiafs_cu.set_access(at, size, who, n), "cuMemSetAccess", f);
}

/* lay reserves the range and maps the parts into it. After a failure, drop removes what is left. */
static int lay(struct gaiafs_cuda *c, address hint, bool writable, bool peers, struct gaiafs_fail *f)
{
	int err;

	if (gaiafs_cu.alloc(&c->block, 1) != 0) /* for drop; fails on a full device */
		c->block = 0;
	err = gaiafs_cu_check(gaiafs_cu.reserve(&c->range, c->total, 0, hint, 0), "cuMemAddressReserve", f);

	if (err != 0) {
		c->range = 0;
		return err;
	}
	for (size_t i = 0; i < c->count; i++) {
		struct part *p = &c->parts[i];

		err = gaiafs_cu_check(gaiafs_cu.map(c->range + c->mapped, p->size, 0, p->handle, 0), "cuMemMap", f);
		if (err != 0)
			return err;
		c->mapped += p->size;
		err = gaiafs_cu_check(gaiafs_cu.mem_release(p->handle), "cuMemRelease", f); /* the mapping keeps the memory */
		if (err != 0)
			return err;
		p->handle = 0;
	}
	return give_access(c, c->range, c->total, writable, peers, f);
}

/* place maps the memory of a handle. It gives the handle back in any case: the mapping keeps the memory. */
static int place(struct gaiafs_cuda *c, address at, size_t size, handle h, bool writable, struct gaiafs_fail *f)
{
	struct gaiafs_fail second;
	int err = gaiafs_cu_check(gaiafs_cu.map(at, size, 0, h, 0), "cuMemMap", f);

	(void)gaiafs_cu_check(gaiafs_cu.mem_release(h), "cuMemRelease", &second);
	if (err != 0)
		return err;
	err = give_access(c, at, size, writable, false, f);
	if (err != 0)
		(void)gaiafs_cu.unmap(at, size);
	return err;
}

/*
 * move unmaps the parts in the place of an extent, and maps other memory there. No bracket uses the extent, so no
 * kernel does. The driver does not wait for running kernels.
 */
static int move(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(m->gpu);
	size_t at = (size_t)(extent->off - c->first), size = (size_t)extent->size;
	struct visit v;
	handle h;
	int err;

	if (extent->off < c->first || at > c->total || size > c->total - at)
		return gaiafs_failed(f, ERANGE, "an extent is outside of the addresses of its mapping");
	err = gaiafs_cu_enter(c, &v, f);
	if (err != 0)
		return err;
	for (size_t i = 0; i < c->count && err == 0; i++) {
		struct part p = c->parts[i];

		if (p.at + p.size <= at || at + size <= p.at)
			continue;
		err = gaiafs_cu_check(gaiafs_cu.unmap(c->range + p.at, p.size), "cuMemUnmap", f);
		if (err == 0)
			c->parts[i--] = c->parts[--c->count];
	}
	if (err == 0 && fd >= 0)
		err = room_for_part(c, f);
	if (err == 0 && fd >= 0)
		err = gaiafs_cu_check(gaiafs_cu.import(&h, (void *)(intptr_t)fd, POSIX_DESCRIPTOR), "cuMemImportFromShareableHandle",
				      f);
	if (err == 0 && fd >= 0)
		err = place(c, c->range + at, size, h, m->writable, f);
	if (err == 0 && fd >= 0)
		c->parts[c->count++] = (struct part){ .size = size, .at = at };
	gaiafs_cu_leave(&v);
	return err;
}

static int finish(struct gaiafs_mapping *m, void *addr, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(m->gpu);
	uint64_t in = m->off - (uint64_t)c->first;
	address hint = (uintptr_t)addr > in ? ((uintptr_t)addr - in) / GRANULARITY * GRANULARITY : 0;
	struct visit v;
	int err = gaiafs_cu_enter(c, &v, f);

	if (err != 0)
		return err;
	if (m->movable) {
		err = reserve_movable(m, 0, f);
		in = m->off - (uint64_t)c->first;
	} else {
		err = lay(c, hint, m->writable, (m->flags & GAIA_MAP_PEERS) != 0, f);
	}
	gaiafs_cu_leave(&v);
	if (err != 0)
		return err;
	m->base = (uint8_t *)(uintptr_t)(c->range + in);
	return gaiafs_table_add(m, f); /* the range is reserved longer than m is in the table, so no other mapping overlaps
	*/
}

static void leave(struct gaiafs_mapping *m)
{
	(void)m;
}

/*
 * quiesce_unseen waits for the context without ending a capture. cuCtxSynchronize would end it, whichever thread calls
 * it. cuMemFree waits for the context too, and a thread in relaxed capture mode may call it. False: there is nothing to
 * free.
 */
static bool quiesce_unseen(struct gaiafs_cuda *c, struct gaiafs_fail *f)
{
	if (c->block == 0 && gaiafs_cu.alloc(&c->block, 1) != 0)
		c->block = 0;
	if (c->block == 0)
		return false;
	if (gaiafs_cu_check(gaiafs_cu.dealloc(c->block), "cuMemFree", f) == 0)
		c->block = 0;
	return true;
}

/* drop continues after a failure, and reports the first one. */
static int drop(struct gaiafs_mapping *m, bool gently, struct gaiafs_fail *f)
{
	struct gaiafs_fail fails[5] = { 0 };
	struct gaiafs_cuda *c = gaiafs_cu_of(m->gpu);
	struct visit v = { 0 };
	bool keep = false;

	if (c->range != 0 || c->count > 0 || c->block != 0)
		(void)gaiafs_cu_enter(c, &v, &fails[0]); /* a lost context may still free its memory */
	/* cuMemUnmap does not wait. */
	if ((c->mapped > 0 || c->block != 0 || (m->movable && c->count > 0)) && !quiesce_unseen(c, &fails[4])) {
		keep = gently;
		if (!gently)
			(void)gaiafs_cu_check(gaiafs_cu.ctx_sync(), "cuCtxSynchronize", &fails[4]);
	}
	if (keep)
		(void)gaiafs_failed(&fails[4], ENOMEM, "the device has no memory left, and the mapping stays");
	if (c->mapped > 0 && !keep)
		(void)gaiafs_cu_check(gaiafs_cu.unmap(c->range, c->mapped), "cuMemUnmap", &fails[1]);
	for (size_t i = 0; m->movable && i < c->count && !keep; i++)
		(void)gaiafs_cu_check(gaiafs_cu.unmap(c->range + c->parts[i].at, c->parts[i].size), "cuMemUnmap", &fails[1]);
	if (c->range != 0 && fails[1].errnum == 0 && !keep)
		(void)gaiafs_cu_check(gaiafs_cu.free(c->range, c->total), "cuMemAddressFree", &fails[2]);
	for (size_t i = 0; i < c->count; i++)
		if (c->parts[i].handle != 0)
			(void)gaiafs_cu_check(gaiafs_cu.mem_release(c->parts[i].handle), "cuMemRelease", &fails[3]);
	gaiafs_cu_leave(&v);
	leave_primary(c, c->mapped > 0 || c->block != 0 || m->movable);
	free(c->parts);
	c->parts = NULL;
	c->count = c->room = c->total = c->mapped = 0;
	c->range = c->block = 0;
	for (size_t i = 0; i < sizeof fails / sizeof fails[0]; i++)
		if (fails[i].errnum != 0) {
			*f = fails[i];
			return f->errnum;
		}
	return 0;
}

const struct gaiafs_kind gaiafs_cuda_kind = {
	.number = GAIAFS_KIND_CUDA,
	.open = open_gpu,
	.uuid = uuid_of,
	.free = free_gpu,
	.enqueue = gaiafs_cu_enqueue,
	.after = gaiafs_cu_after,
	.stream_number = gaiafs_cu_stream_number,
	.mark = gaiafs_cu_mark,
	.passed = gaiafs_cu_passed,
	.unmark = gaiafs_cu_unmark,
	.lost = gaiafs_cu_lost,
	.begin = begin,
	.add = add,
	.finish = finish,
	.move = move,
	.leave = leave,
	.drop = drop,
	.quiesce = gaiafs_cu_quiesce,
	.read = gaiafs_cu_read,
	.write = gaiafs_cu_write,
	.copies = gaiafs_cu_copies,
};
