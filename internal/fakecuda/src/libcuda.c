/*
 * A libcuda.so.1 for tests. It has what a program needs to map device memory of another process, to copy, and to order
 * work in streams. Device memory is a memfd. A device address is the address of its mapping in this process, so tests
 * can read the memory directly.
 *
 * It is as strict as the driver: a handle is mapped as a whole, addresses and sizes are multiples of the granularity,
 * calls on memory need a current context, and memory is accessible only after access was set. A failure is an error and
 * never a crash. Bytes copied from ordinary host memory arrive as late as the driver permits: when a thread waits for
 * the stream, or when the stream has more work. Host functions run one at a time, and imports wait for them, as the
 * driver's locks may require: a host function that waits for another thread's import waits forever. While a stream is
 * captured, calls that the driver forbids then fail and end the capture. It does not support kernels. Of graphs, it
 * supports only captures of host functions and waits, which are launched without an instance. Every device can reach
 * the memory of every other one, except device number 2.
 *
 * FAKECUDA_DEVICES=N sets the number of devices (default 2). FAKECUDA_FAIL=cuMemMap:2,cuInit:999 makes calls fail with
 * these codes; cuMemMap:2:3 lets the first three calls pass. FAKECUDA_LATE=1 makes cuLaunchHostFunc return late. With
 * FAKECUDA_LEAKS=1, a process that ends normally with something imported, mapped or reserved exits with status 86 and a
 * message on standard error.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	INVALID_HANDLE = 400,
	NOT_READY = 600,
	NOT_SUPPORTED = 801,
	CAPTURE_UNSUPPORTED = 900,
	CAPTURE_INVALIDATED = 901,
};

#define GRANULARITY ((size_t)2 << 20)
#define MOST_DEVICES 16
#define LONER 2 /* the device that reaches only its own memory */

typedef int result;
typedef uint64_t address;

struct context {
	int device;
	int retained;
};

/* The work of a stream, in order. */
struct work {
	struct work *next;
	void (*call)(void *);
	void *argument;
	void *to;
	const void *from;
	size_t n;
	void *staged;        /* copy of ordinary host memory, freed after the copy */
	const uint32_t *word; /* a wait until this word has reached value */
	uint32_t value;
};

struct stream {
	struct stream *next; /* list of all streams; protected by mu */
	int pins;            /* threads in drain_all that use it; protected by mu */
	struct context *context;
	pthread_t thread;
	pthread_mutex_t mu;
	pthread_cond_t changed;
	unsigned long long number;
	struct work *first, **last;
	bool busy, ending;
	int waiters;
};

enum { MOST_NODES = 16 };

struct object {
	void *data;
	void (*destroy)(void *);
};

struct graph {
	int nodes, objects;
	struct work node[MOST_NODES];
	struct object *kept[MOST_NODES];
};

struct allocation {
	int fd;
	size_t size;
	int users; /* the importer's own handle, and mappings */
};

struct mapping {
	struct mapping *next;
	address at;
	size_t size;
	struct allocation *of;
	int device;
	unsigned users; /* the devices that may use it, one bit each */
};

struct range {
	struct range *next;
	address at;
	size_t size;
};

/* mu protects everything except streams, which have their own mutexes. */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static bool initialized;
static int devices;
static pid_t owner;
static struct context contexts[MOST_DEVICES];
static struct stream *defaults[MOST_DEVICES], *streams;
static pthread_cond_t unpinned = PTHREAD_COND_INITIALIZER;
static struct stream *captured; /* one at a time */
static struct graph *capturing;
static bool invalidated;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* held by host functions */
static int allocated;
static struct mapping *mappings;
static struct range *ranges;
static int imported;

static __thread struct context *stack[16];
static __thread int depth;
static __thread int thread_mode; /* 0: global, 2: relaxed */

/* fails returns the code with which the environment wants the call to fail, or 0. */
static result fails(const char *name)
{
	static int calls; /* for the one name that is counted */
	const char *list = getenv("FAKECUDA_FAIL");
	size_t n = strlen(name);

	while (list && *list) {
		if (strncmp(list, name, n) == 0 && list[n] == ':') {
			char *end;
			long code = strtol(list + n + 1, &end, 10);
			if (*end != ':')
				return (result)code;
			return __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST) >= strtol(end + 1, NULL, 10) ? (result)code
																								: SUCCESS;
		}
		list = strchr(list, ',');
		if (list)
			list++;
	}
	return SUCCESS;
}

#define ENTER(name)                            \
	do {                                       \
		result code_ = fails(#name);           \
		if (code_)                             \
			return code_;                      \
		if (!initialized || owner != getpid()) \
			return NOT_INITIALIZED;            \
	} while (0)

static struct context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

static void leaks(void)
{
	if (owner != getpid() || (!imported && !mappings && !ranges && !allocated))
		return;
	fprintf(stderr, "fakecuda: left behind: %d handles, %s, %s, %d allocations\n", imported,
		mappings ? "mappings" : "no mappings", ranges ? "address ranges" : "no address ranges", allocated);
	_exit(86);
}

result cuInit(unsigned flags)
{
	result code = fails("cuInit");
	const char *n = getenv("FAKECUDA_DEVICES");

	if (code)
		return code;
	if (flags)
		return INVALID_VALUE;
	pthread_mutex_lock(&mu);
	if (!initialized) {
		devices = n ? atoi(n) : 2;
		if (devices > MOST_DEVICES)
			devices = MOST_DEVICES;
		for (int i = 0; i < devices; i++)
			contexts[i].device = i;
		owner = getpid();
		if (getenv("FAKECUDA_LEAKS"))
			atexit(leaks);
		initialized = true;
	}
	code = owner != getpid() ? NOT_INITIALIZED : devices > 0 ? SUCCESS : NO_DEVICE;
	pthread_mutex_unlock(&mu);
	return code;
}

result cuDriverGetVersion(int *version)
{
	*version = 13000;
	return SUCCESS;
}

result cuDeviceGetCount(int *count)
{
	ENTER(cuDeviceGetCount);
	*count = devices;
	return SUCCESS;
}

result cuDeviceGet(int *device, int ordinal)
{
	ENTER(cuDeviceGet);
	if (ordinal < 0 || ordinal >= devices)
		return INVALID_DEVICE;
	*device = ordinal;
	return SUCCESS;
}

result cuDeviceCanAccessPeer(int *can, int device, int peer)
{
	ENTER(cuDeviceCanAccessPeer);
	if (device < 0 || device >= devices || peer < 0 || peer >= devices)
		return INVALID_DEVICE;
	*can = device != peer && device != LONER && peer != LONER;
	return SUCCESS;
}

/* For tests: returns the devices that may use an address, one bit each. */
unsigned fakecuda_users(address at)
{
	unsigned users = 0;

	pthread_mutex_lock(&mu);
	for (struct mapping *m = mappings; m; m = m->next)
		if (at >= m->at && at - m->at < m->size)
			users = m->users;
	pthread_mutex_unlock(&mu);
	return users;
}

result cuDeviceGetName(char *name, int n, int device)
{
	ENTER(cuDeviceGetName);
	snprintf(name, (size_t)n, "Fake GPU %d", device);
	return SUCCESS;
}

result cuDeviceGetUuid_v2(char uuid[16], int device)
{
	ENTER(cuDeviceGetUuid_v2);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	memcpy(uuid, "fakecuda-device", 15);
	uuid[15] = (char)device;
	return SUCCESS;
}

result cuDeviceGetUuid(char uuid[16], int device) { return cuDeviceGetUuid_v2(uuid, device); }

result cuDeviceGetAttribute(int *value, int attribute, int device)
{
	ENTER(cuDeviceGetAttribute);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	*value = attribute == 41 || attribute == 102 || attribute == 103; /* unified addresses, VMM, descriptors */
	return SUCCESS;
}

result cuDeviceTotalMem_v2(size_t *n, int device)
{
	ENTER(cuDeviceTotalMem_v2);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	*n = (size_t)1 << 30;
	return SUCCESS;
}

result cuDevicePrimaryCtxRetain(struct context **ctx, int device)
{
	ENTER(cuDevicePrimaryCtxRetain);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	__atomic_add_fetch(&contexts[device].retained, 1, __ATOMIC_SEQ_CST);
	*ctx = &contexts[device];
	return SUCCESS;
}

result cuDevicePrimaryCtxRelease_v2(int device)
{
	ENTER(cuDevicePrimaryCtxRelease);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	return __atomic_sub_fetch(&contexts[device].retained, 1, __ATOMIC_SEQ_CST) < 0 ? INVALID_CONTEXT : SUCCESS;
}

result cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }

result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
	ENTER(cuDevicePrimaryCtxGetState);
	if (device < 0 || device >= devices)
		return INVALID_DEVICE;
	*flags = 0;
	*active = contexts[device].retained > 0;
	return SUCCESS;
}

result cuCtxGetCurrent(struct context **ctx)
{
	ENTER(cuCtxGetCurrent);
	*ctx = current();
	return SUCCESS;
}

result cuCtxSetCurrent(struct context *ctx)
{
	ENTER(cuCtxSetCurrent);
	if (depth > 0)
		depth--;
	if (ctx)
		stack[depth++] = ctx;
	return SUCCESS;
}

result cuCtxPushCurrent_v2(struct context *ctx)
{
	ENTER(cuCtxPushCurrent);
	if (!ctx || depth == (int)(sizeof stack / sizeof stack[0]))
		return INVALID_CONTEXT;
	stack[depth++] = ctx;
	return SUCCESS;
}

result cuCtxPopCurrent_v2(struct context **ctx)
{
	ENTER(cuCtxPopCurrent);
	if (depth == 0)
		return INVALID_CONTEXT;
	depth--;
	if (ctx)
		*ctx = stack[depth];
	return SUCCESS;
}

result cuCtxPushCurrent(struct context *ctx) { return cuCtxPushCurrent_v2(ctx); }
result cuCtxPopCurrent(struct context **ctx) { return cuCtxPopCurrent_v2(ctx); }

result cuCtxGetDevice(int *device)
{
	ENTER(cuCtxGetDevice);
	if (!current())
		return INVALID_CONTEXT;
	*device = current()->device;
	return SUCCESS;
}

/* Captures. */

/* forbidden returns the error of a call that a capture forbids: always, or only in threads that did not relax. */
static result forbidden(bool always)
{
	if (!captured || (thread_mode == 2 && !always))
		return SUCCESS;
	invalidated = true;
	return CAPTURE_UNSUPPORTED;
}

result cuThreadExchangeStreamCaptureMode(int *mode)
{
	int old = thread_mode;

	thread_mode = *mode;
	*mode = old;
	return SUCCESS;
}

result cuStreamBeginCapture_v2(struct stream *s, int mode)
{
	if (captured || mode != 0)
		return NOT_SUPPORTED;
	capturing = calloc(1, sizeof *capturing);
	invalidated = false;
	captured = s;
	return capturing ? SUCCESS : OUT_OF_MEMORY;
}

result cuStreamIsCapturing(struct stream *s, int *status)
{
	ENTER(cuStreamIsCapturing);
	*status = s && s == captured;
	return SUCCESS;
}

/* Memory. */

struct prop {
	int kind, handles;
	struct {
		int kind, id;
	} location;
};

struct access {
	struct {
		int kind, id;
	} location;
	int flags;
};

result cuMemGetAllocationGranularity(size_t *n, const struct prop *prop, int option)
{
	ENTER(cuMemGetAllocationGranularity);
	(void)prop, (void)option;
	*n = GRANULARITY;
	return SUCCESS;
}

result cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int kind)
{
	struct stat st;
	struct allocation *a;

	ENTER(cuMemImportFromShareableHandle);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	if (!current())
		return INVALID_CONTEXT;
	if (kind != 1 || fstat((int)(intptr_t)descriptor, &st) || st.st_size == 0 || (size_t)st.st_size % GRANULARITY)
		return INVALID_VALUE;
	a = calloc(1, sizeof *a);
	if (!a || (a->fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 3)) < 0) {
		free(a);
		return OUT_OF_MEMORY;
	}
	a->size = (size_t)st.st_size;
	a->users = 1;
	pthread_mutex_lock(&one_at_a_time);
	pthread_mutex_lock(&mu);
	imported++;
	pthread_mutex_unlock(&mu);
	pthread_mutex_unlock(&one_at_a_time);
	*handle = (uint64_t)(uintptr_t)a;
	return SUCCESS;
}

static void drop(struct allocation *a)
{
	if (--a->users == 0) {
		close(a->fd);
		free(a);
	}
}

result cuMemRelease(uint64_t handle)
{
	ENTER(cuMemRelease);
	if (!handle)
		return INVALID_VALUE;
	pthread_mutex_lock(&mu);
	imported--;
	drop((struct allocation *)(uintptr_t)handle);
	pthread_mutex_unlock(&mu);
	return SUCCESS;
}

result cuMemAddressReserve(address *at, size_t n, size_t alignment, address hint, unsigned long long flags)
{
	struct range *r;
	char *p;
	size_t skip;

	ENTER(cuMemAddressReserve);
	(void)hint;
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	if (!n || n % GRANULARITY || flags || (alignment && (alignment & (alignment - 1))))
		return INVALID_VALUE;
	if (alignment < GRANULARITY)
		alignment = GRANULARITY;
	p = mmap(NULL, n + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return OUT_OF_MEMORY;
	skip = (alignment - (uintptr_t)p % alignment) % alignment;
	if (skip)
		munmap(p, skip);
	p += skip;
	munmap(p + n, alignment - skip);
	r = calloc(1, sizeof *r);
	r->at = (address)(uintptr_t)p;
	r->size = n;
	pthread_mutex_lock(&mu);
	r->next = ranges;
	ranges = r;
	pthread_mutex_unlock(&mu);
	*at = r->at;
	return SUCCESS;
}

static struct range **reserved(address at, size_t n)
{
	for (struct range **r = &ranges; *r; r = &(*r)->next)
		if (at >= (*r)->at && at + n <= (*r)->at + (*r)->size)
			return r;
	return NULL;
}

static bool mapped(address at, size_t n)
{
	for (struct mapping *m = mappings; m; m = m->next)
		if (at < m->at + m->size && m->at < at + n)
			return true;
	return false;
}

result cuMemAddressFree(address at, size_t n)
{
	struct range **r, *gone;
	result code = INVALID_VALUE;

	ENTER(cuMemAddressFree);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&mu);
	r = reserved(at, n);
	if (r && (*r)->at == at && (*r)->size == n && !mapped(at, n)) {
		gone = *r;
		*r = gone->next;
		free(gone);
		munmap((void *)(uintptr_t)at, n);
		code = SUCCESS;
	}
	pthread_mutex_unlock(&mu);
	return code;
}

result cuMemMap(address at, size_t n, size_t offset, uint64_t handle, unsigned long long flags)
{
	struct allocation *a = (struct allocation *)(uintptr_t)handle;
	struct mapping *m;
	result code = INVALID_VALUE;

	ENTER(cuMemMap);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	if (!current())
		return INVALID_CONTEXT;
	if (offset)
		return NOT_SUPPORTED;
	if (!a || flags || n != a->size || at % GRANULARITY)
		return INVALID_VALUE;
	pthread_mutex_lock(&mu);
	if (reserved(at, n) && !mapped(at, n)) {
		m = calloc(1, sizeof *m);
		*m = (struct mapping){.next = mappings, .at = at, .size = n, .of = a, .device = current()->device};
		mappings = m;
		a->users++;
		code = SUCCESS;
	}
	pthread_mutex_unlock(&mu);
	return code;
}

result cuMemSetAccess(address at, size_t n, const struct access *desc, size_t count)
{
	size_t covered = 0;
	result code = SUCCESS;

	ENTER(cuMemSetAccess);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	if (!current())
		return INVALID_CONTEXT;
	if (count < 1)
		return INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		int id = desc[i].location.id;

		if (desc[i].location.kind != 1 || id < 0 || id >= devices || (i > 0 && id == LONER) ||
			desc[i].flags != desc->flags)
			return INVALID_VALUE;
	}
	pthread_mutex_lock(&mu);
	for (struct mapping *m = mappings; m && !code; m = m->next) {
		int prot = desc->flags == 3 ? PROT_READ | PROT_WRITE : desc->flags == 1 ? PROT_READ : PROT_NONE;
		if (m->at < at || m->at >= at + n)
			continue;
		covered += m->size;
		m->users = 0;
		for (size_t i = 0; i < count; i++)
			m->users |= 1u << desc[i].location.id;
		if (mmap((void *)(uintptr_t)m->at, m->size, prot, MAP_SHARED | MAP_FIXED, m->of->fd, 0) == MAP_FAILED)
			code = errno == EACCES ? NOT_SUPPORTED : OUT_OF_MEMORY;
	}
	if (!code && covered != n)
		code = INVALID_VALUE;
	pthread_mutex_unlock(&mu);
	return code;
}

result cuMemUnmap(address at, size_t n)
{
	size_t covered = 0;

	ENTER(cuMemUnmap);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&mu);
	for (struct mapping *m = mappings; m; m = m->next)
		if (m->at >= at && m->at + m->size <= at + n)
			covered += m->size;
	if (covered == n) {
		for (struct mapping **m = &mappings; *m;) {
			struct mapping *gone = *m;
			if (gone->at < at || gone->at >= at + n) {
				m = &gone->next;
				continue;
			}
			mmap((void *)(uintptr_t)gone->at, gone->size, PROT_NONE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
			*m = gone->next;
			drop(gone->of);
			free(gone);
		}
	}
	pthread_mutex_unlock(&mu);
	return covered == n ? SUCCESS : INVALID_VALUE;
}

result cuMemGetInfo_v2(size_t *left, size_t *total)
{
	ENTER(cuMemGetInfo);
	*total = (size_t)1 << 30;
	*left = *total;
	return SUCCESS;
}

result cuPointerGetAttribute(void *data, int attribute, address at)
{
	result code = INVALID_VALUE;

	ENTER(cuPointerGetAttribute);
	pthread_mutex_lock(&mu);
	for (struct mapping *m = mappings; m; m = m->next) {
		if (at < m->at || at >= m->at + m->size)
			continue;
		code = SUCCESS;
		if (attribute == 2) /* memory type: device */
			*(unsigned *)data = 2;
		else if (attribute == 9) /* ordinal */
			*(int *)data = m->device;
		else
			code = NOT_SUPPORTED;
	}
	pthread_mutex_unlock(&mu);
	return code;
}

/* Streams. */

static void *serve(void *argument)
{
	struct stream *s = argument;

	pthread_mutex_lock(&s->mu);
	for (;;) {
		struct work *w = s->first;
		if (!w) {
			if (s->ending)
				break;
			pthread_cond_wait(&s->changed, &s->mu);
			continue;
		}
		if (w->staged && !w->next && !s->waiters && !s->ending) {
			pthread_cond_wait(&s->changed, &s->mu);
			continue;
		}
		s->first = w->next;
		if (!s->first)
			s->last = &s->first;
		s->busy = true;
		pthread_mutex_unlock(&s->mu);
		if (w->call) {
			pthread_mutex_lock(&one_at_a_time);
			w->call(w->argument);
			pthread_mutex_unlock(&one_at_a_time);
		} else if (w->word) {
			while ((int32_t)(__atomic_load_n(w->word, __ATOMIC_ACQUIRE) - w->value) < 0)
				sched_yield();
		} else {
			memmove(w->to, w->from, w->n);
			free(w->staged);
		}
		free(w);
		pthread_mutex_lock(&s->mu);
		s->busy = false;
		pthread_cond_broadcast(&s->changed);
	}
	pthread_mutex_unlock(&s->mu);
	return NULL;
}

static unsigned long long last_stream; /* atomic */

static struct stream *make_stream(struct context *ctx)
{
	struct stream *s = calloc(1, sizeof *s);

	if (!s)
		return NULL;
	s->context = ctx;
	s->number = __atomic_add_fetch(&last_stream, 1, __ATOMIC_RELAXED);
	s->last = &s->first;
	pthread_mutex_init(&s->mu, NULL);
	pthread_cond_init(&s->changed, NULL);
	if (pthread_create(&s->thread, NULL, serve, s)) {
		free(s);
		return NULL;
	}
	return s;
}

/* list_locked adds a stream to the list that cuCtxSynchronize uses. */
static struct stream *list_locked(struct stream *s)
{
	if (s) {
		s->next = streams;
		streams = s;
	}
	return s;
}

/*
 * stream_of finds the stream. Small numbers stand for the default stream of the current context, or 2 for the one that
 * the thread has there. The streams of threads stay.
 */
static struct stream *stream_of(struct stream *s)
{
	static __thread struct stream *mine[MOST_DEVICES];

	if ((uintptr_t)s > 2)
		return s;
	if (!current())
		return NULL;
	pthread_mutex_lock(&mu);
	struct stream **d = s == (struct stream *)2 ? &mine[current()->device] : &defaults[current()->device];
	if (!*d)
		*d = list_locked(make_stream(current()));
	s = *d;
	pthread_mutex_unlock(&mu);
	return s;
}

static result enqueue(struct stream *s, struct work w)
{
	struct work *copy = malloc(sizeof *copy);

	s = stream_of(s);
	if (!s || !copy) {
		free(copy);
		return s ? OUT_OF_MEMORY : INVALID_CONTEXT;
	}
	*copy = w;
	copy->next = NULL;
	pthread_mutex_lock(&s->mu);
	*s->last = copy;
	s->last = &copy->next;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mu);
	return SUCCESS;
}

static result drain(struct stream *s)
{
	s = stream_of(s);
	if (!s)
		return INVALID_CONTEXT;
	pthread_mutex_lock(&s->mu);
	s->waiters++;
	pthread_cond_broadcast(&s->changed);
	while (s->first || s->busy)
		pthread_cond_wait(&s->changed, &s->mu);
	s->waiters--;
	pthread_mutex_unlock(&s->mu);
	return SUCCESS;
}

/* drain_all waits for all streams of the current context. A destroyed stream stays until drain_all has left it. */
static result drain_all(void)
{
	struct context *of = current();
	struct stream *s;

	if (!of)
		return INVALID_CONTEXT;
	pthread_mutex_lock(&mu);
	for (s = streams; s;) {
		s->pins++;
		pthread_mutex_unlock(&mu);
		if (s->context == of)
			drain(s);
		pthread_mutex_lock(&mu);
		struct stream *next = s->next;
		if (--s->pins == 0)
			pthread_cond_broadcast(&unpinned);
		s = next;
	}
	pthread_mutex_unlock(&mu);
	return SUCCESS;
}

result cuStreamCreate(struct stream **s, unsigned flags)
{
	ENTER(cuStreamCreate);
	(void)flags;
	if (!current())
		return INVALID_CONTEXT;
	*s = make_stream(current());
	pthread_mutex_lock(&mu);
	list_locked(*s);
	pthread_mutex_unlock(&mu);
	return *s ? SUCCESS : OUT_OF_MEMORY;
}

result cuStreamDestroy_v2(struct stream *s)
{
	ENTER(cuStreamDestroy);
	if ((uintptr_t)s <= 2)
		return INVALID_HANDLE;
	pthread_mutex_lock(&s->mu);
	s->ending = true;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mu);
	pthread_join(s->thread, NULL);
	pthread_mutex_lock(&mu);
	while (s->pins)
		pthread_cond_wait(&unpinned, &mu);
	for (struct stream **p = &streams; *p; p = &(*p)->next)
		if (*p == s) {
			*p = s->next;
			break;
		}
	pthread_mutex_unlock(&mu);
	free(s);
	return SUCCESS;
}

result cuStreamSynchronize(struct stream *s)
{
	ENTER(cuStreamSynchronize);
	if (forbidden(s && s == captured))
		return CAPTURE_UNSUPPORTED;
	return drain(s);
}

result cuCtxSynchronize(void)
{
	ENTER(cuCtxSynchronize);
	return forbidden(true) ? CAPTURE_UNSUPPORTED : drain_all();
}

/* Allocations are also host memory. Freeing one waits for the whole context. */

result cuMemAlloc_v2(address *at, size_t n)
{
	void *p;

	ENTER(cuMemAlloc);
	if (!current())
		return INVALID_CONTEXT;
	if (!n)
		return INVALID_VALUE;
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	/* Like the driver, begin large ones on a page boundary. */
	if (posix_memalign(&p, n < 4096 ? 256 : 4096, n))
		return OUT_OF_MEMORY;
	memset(p, 0xa5, n);
	__atomic_add_fetch(&allocated, 1, __ATOMIC_SEQ_CST);
	*at = (address)(uintptr_t)p;
	return SUCCESS;
}

result cuMemFree_v2(address at)
{
	result code;

	ENTER(cuMemFree);
	if (!at)
		return INVALID_VALUE;
	code = forbidden(false);
	if (!code)
		code = drain_all();
	if (code)
		return code;
	__atomic_sub_fetch(&allocated, 1, __ATOMIC_SEQ_CST);
	free((void *)(uintptr_t)at);
	return SUCCESS;
}

result cuStreamQuery(struct stream *s)
{
	bool idle;

	ENTER(cuStreamQuery);
	s = stream_of(s);
	if (!s)
		return INVALID_CONTEXT;
	pthread_mutex_lock(&s->mu);
	idle = !s->first && !s->busy;
	pthread_mutex_unlock(&s->mu);
	return idle ? SUCCESS : NOT_READY;
}

#ifndef OLD_DRIVER
result cuStreamGetId(struct stream *s, unsigned long long *id)
{
	ENTER(cuStreamGetId);
	s = stream_of(s);
	if (!s)
		return INVALID_CONTEXT;
	*id = s->number;
	return SUCCESS;
}
#endif

result cuStreamGetCtx(struct stream *s, struct context **ctx)
{
	ENTER(cuStreamGetCtx);
	if ((uintptr_t)s <= 2) {
		*ctx = current();
		return *ctx ? SUCCESS : INVALID_CONTEXT;
	}
	*ctx = s->context;
	return SUCCESS;
}

/* append adds work to the stream, or to the graph into which the stream is captured. */
static result append(struct stream *s, struct work w)
{
	if (!s || s != captured)
		return enqueue(s, w);
	if (capturing->nodes == MOST_NODES)
		return OUT_OF_MEMORY;
	capturing->node[capturing->nodes++] = w;
	return SUCCESS;
}

result cuLaunchHostFunc(struct stream *s, void (*call)(void *), void *argument)
{
	result code;

	ENTER(cuLaunchHostFunc);
	code = append(s, (struct work){.call = call, .argument = argument});
	if (getenv("FAKECUDA_LATE"))
		usleep(5000); /* the function has run, and what it started too */
	return code;
}

/* An event has reached the last of its records that a stream has executed. */

struct event {
	pthread_mutex_t mu;
	pthread_cond_t changed;
	unsigned records, reached, users; /* users: the program, and pending records */
};

struct record {
	struct event *event;
	unsigned number;
};

static void drop_event(struct event *e)
{
	bool last;

	pthread_mutex_lock(&e->mu);
	last = --e->users == 0;
	pthread_mutex_unlock(&e->mu);
	if (last)
		free(e);
}

static void reach(void *argument)
{
	struct record *r = argument;

	pthread_mutex_lock(&r->event->mu);
	r->event->reached = r->number;
	pthread_cond_broadcast(&r->event->changed);
	pthread_mutex_unlock(&r->event->mu);
	drop_event(r->event);
	free(r);
}

result cuEventCreate(struct event **e, unsigned flags)
{
	ENTER(cuEventCreate);
	if (!current())
		return INVALID_CONTEXT;
	if (flags != 2) /* without timing */
		return INVALID_VALUE;
	*e = calloc(1, sizeof **e);
	if (!*e)
		return OUT_OF_MEMORY;
	pthread_mutex_init(&(*e)->mu, NULL);
	pthread_cond_init(&(*e)->changed, NULL);
	(*e)->users = 1;
	return SUCCESS;
}

result cuEventRecord(struct event *e, struct stream *s)
{
	struct record *r;
	result code;

	ENTER(cuEventRecord);
	r = malloc(sizeof *r);
	if (!r)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&e->mu);
	*r = (struct record){ e, ++e->records };
	e->users++;
	pthread_mutex_unlock(&e->mu);
	code = append(s, (struct work){.call = reach, .argument = r});
	if (code)
		reach(r);
	return code;
}

result cuEventQuery(struct event *e)
{
	bool passed;

	ENTER(cuEventQuery);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&e->mu);
	passed = e->reached == e->records;
	pthread_mutex_unlock(&e->mu);
	return passed ? SUCCESS : NOT_READY;
}

result cuEventSynchronize(struct event *e)
{
	ENTER(cuEventSynchronize);
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&e->mu);
	while (e->reached != e->records)
		pthread_cond_wait(&e->changed, &e->mu);
	pthread_mutex_unlock(&e->mu);
	return SUCCESS;
}

result cuEventDestroy_v2(struct event *e)
{
	ENTER(cuEventDestroy);
	drop_event(e);
	return SUCCESS;
}

/* Waits for a word of registered memory. The only comparison is: at least value, cyclically. */
result cuStreamWaitValue32_v2(struct stream *s, address word, uint32_t value, unsigned flags)
{
	ENTER(cuStreamWaitValue32);
	if (flags || word % sizeof(uint32_t))
		return INVALID_VALUE;
	return append(s, (struct work){.word = (const uint32_t *)(uintptr_t)word, .value = value});
}

result cuMemHostRegister_v2(void *at, size_t n, unsigned flags)
{
	ENTER(cuMemHostRegister);
	if (!current())
		return INVALID_CONTEXT;
	if (forbidden(false))
		return CAPTURE_UNSUPPORTED;
	return at && n && flags == 3 ? SUCCESS : INVALID_VALUE; /* portable, and mapped */
}

result cuMemHostGetDevicePointer_v2(address *to, void *at, unsigned flags)
{
	ENTER(cuMemHostGetDevicePointer);
	if (!current())
		return INVALID_CONTEXT;
	*to = (address)(uintptr_t)at;
	return flags ? INVALID_VALUE : SUCCESS;
}

/* Graphs. */

result cuStreamEndCapture(struct stream *s, struct graph **g)
{
	if (s != captured)
		return INVALID_VALUE;
	*g = capturing;
	captured = NULL;
	return invalidated ? CAPTURE_INVALIDATED : SUCCESS;
}

static void destroy(struct object *o)
{
	o->destroy(o->data);
	free(o);
}

#ifndef OLD_DRIVER
result cuStreamGetCaptureInfo_v2(
	struct stream *s, int *status, uint64_t *id, struct graph **g, const void **nodes, size_t *n)
{
	ENTER(cuStreamGetCaptureInfo_v2);
	(void)id, (void)nodes, (void)n;
	*status = s && s == captured;
	*g = *status ? capturing : NULL;
	return SUCCESS;
}

result cuUserObjectCreate(struct object **o, void *data, void (*destroy)(void *), unsigned refs, unsigned flags)
{
	ENTER(cuUserObjectCreate);
	if (refs != 1 || flags != 1)
		return INVALID_VALUE;
	*o = calloc(1, sizeof **o);
	**o = (struct object){data, destroy};
	return SUCCESS;
}

result cuUserObjectRelease(struct object *o, unsigned refs)
{
	if (refs != 1)
		return INVALID_VALUE;
	destroy(o);
	return SUCCESS;
}

result cuGraphRetainUserObject(struct graph *g, struct object *o, unsigned refs, unsigned flags)
{
	ENTER(cuGraphRetainUserObject);
	if (refs != 1 || flags != 1 || g->objects == MOST_NODES)
		return INVALID_VALUE;
	g->kept[g->objects++] = o;
	return SUCCESS;
}
#endif

result cuGraphDestroy(struct graph *g)
{
	for (int i = 0; i < g->objects; i++)
		destroy(g->kept[i]);
	free(g);
	return SUCCESS;
}

/* Launches a graph itself, without an instance. */
result cuGraphLaunch(struct graph *g, struct stream *s)
{
	for (int i = 0; i < g->nodes; i++) {
		result code = enqueue(s, g->node[i]);
		if (code)
			return code;
	}
	return SUCCESS;
}

/* Copies. Addresses are host addresses. Copies from or to unmapped memory are refused as far as this can be known. */

static result copy(struct stream *s, bool wait, address to, address from, size_t n)
{
	result code;

	if (!current())
		return INVALID_CONTEXT;
	if (n == 0)
		return SUCCESS;
	code = enqueue(s, (struct work){.to = (void *)(uintptr_t)to, .from = (const void *)(uintptr_t)from, .n = n});
	return code || !wait ? code : drain(s);
}

result cuMemcpyHtoD_v2(address to, const void *from, size_t n)
{
	struct work w = {.to = (void *)(uintptr_t)to, .n = n};
	result code;

	ENTER(cuMemcpyHtoD);
	if (!current())
		return INVALID_CONTEXT;
	if (n == 0)
		return SUCCESS;
	w.from = w.staged = malloc(n);
	if (!w.staged)
		return OUT_OF_MEMORY;
	memcpy(w.staged, from, n);
	code = enqueue(NULL, w);
	if (code)
		free(w.staged);
	return code;
}

result cuMemcpyDtoH_v2(void *to, address from, size_t n)
{
	ENTER(cuMemcpyDtoH);
	return copy(NULL, true, (address)(uintptr_t)to, from, n);
}

result cuMemcpyDtoD_v2(address to, address from, size_t n)
{
	ENTER(cuMemcpyDtoD);
	return copy(NULL, true, to, from, n);
}

result cuMemcpy(address to, address from, size_t n)
{
	ENTER(cuMemcpy);
	return copy(NULL, true, to, from, n);
}

result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, struct stream *s)
{
	ENTER(cuMemcpyHtoDAsync);
	return copy(s, false, to, (address)(uintptr_t)from, n);
}

result cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, struct stream *s)
{
	ENTER(cuMemcpyDtoHAsync);
	return copy(s, false, (address)(uintptr_t)to, from, n);
}

result cuMemcpyDtoDAsync_v2(address to, address from, size_t n, struct stream *s)
{
	ENTER(cuMemcpyDtoDAsync);
	return copy(s, false, to, from, n);
}

/* Words. */

result cuGetErrorName(result r, const char **name)
{
	switch (r) {
	case SUCCESS: *name = "CUDA_SUCCESS"; break;
	case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
	case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
	case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
	case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
	case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
	case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
	case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
	case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
	case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
	default: *name = "CUDA_ERROR_UNKNOWN";
	}
	return SUCCESS;
}

result cuGetErrorString(result r, const char **text)
{
	switch (r) {
	case OUT_OF_MEMORY: *text = "out of memory"; break;
	case INVALID_VALUE: *text = "invalid argument"; break;
	case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
	case NOT_SUPPORTED: *text = "operation not supported"; break;
	default: return cuGetErrorName(r, text);
	}
	return SUCCESS;
}
