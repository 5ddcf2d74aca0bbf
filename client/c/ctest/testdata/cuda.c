/*
 * A client of the C library on GPUs, for the tests. It is like client.c, with a libcuda.so.1. The tests' fake libcuda
 * has device memory at addresses that the CPU can use, and runs a stream's host functions in threads.
 */
#include "check.h"

#include <dlfcn.h>
#include <sched.h>

typedef void *context;
typedef void *stream;
typedef void *graph;

static struct {
	int (*get_current)(context *);
	int (*set_current)(context);
	int (*retain)(context *, int);
	int (*stream_create)(stream *, unsigned);
	int (*stream_destroy)(stream);
	int (*stream_wait)(stream);
	int (*host_func)(stream, void (*)(void *), void *);
	int (*wait_value)(stream, uint64_t, uint32_t, unsigned);
	int (*pointer_attribute)(void *, int, uint64_t);
	int (*primary_state)(int, unsigned *, int *);
	int (*primary_release)(int);
	/* Missing if the driver has no graphs. */
	int (*begin_capture)(stream, int);
	int (*end_capture)(stream, graph *);
	int (*launch_graph)(graph, stream);
	int (*destroy_graph)(graph);
} cu;

/* load finds the library that the mapping calls loaded, or loads it. */
static void load_cuda(void)
{
	static const struct {
		void *slot;
		const char *name;
		bool of_graphs;
	} symbols[] = {
		{ &cu.get_current, "cuCtxGetCurrent", false },
		{ &cu.set_current, "cuCtxSetCurrent", false },
		{ &cu.retain, "cuDevicePrimaryCtxRetain", false },
		{ &cu.stream_create, "cuStreamCreate", false },
		{ &cu.stream_destroy, "cuStreamDestroy_v2", false },
		{ &cu.stream_wait, "cuStreamSynchronize", false },
		{ &cu.host_func, "cuLaunchHostFunc", false },
		{ &cu.wait_value, "cuStreamWaitValue32_v2", true },
		{ &cu.pointer_attribute, "cuPointerGetAttribute", false },
		{ &cu.primary_state, "cuDevicePrimaryCtxGetState", false },
		{ &cu.primary_release, "cuDevicePrimaryCtxRelease_v2", false },
		{ &cu.begin_capture, "cuStreamBeginCapture_v2", true },
		{ &cu.end_capture, "cuStreamEndCapture", true },
		{ &cu.launch_graph, "cuGraphLaunch", true },
		{ &cu.destroy_graph, "cuGraphDestroy", true },
	};
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned);

	CHECK(library != NULL);
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		void *found = dlsym(library, symbols[i].name);
		CHECK(found != NULL || symbols[i].of_graphs);
		memcpy(symbols[i].slot, &found, sizeof found);
	}
	void *found = dlsym(library, "cuInit");
	memcpy(&init, &found, sizeof found);
	CHECK(init(0) == 0);
}

static context current(void)
{
	context c = NULL;

	CHECK(cu.get_current(&c) == 0);
	return c;
}

/* use makes the primary context of a device current in the thread. */
static context use(int device)
{
	context c;

	CHECK(cu.retain(&c, device) == 0);
	CHECK(cu.set_current(c) == 0);
	return c;
}

static bool retained(int device)
{
	unsigned flags;
	int active = -1;

	CHECK(cu.primary_state(device, &flags, &active) == 0);
	return active != 0;
}

/* settled reports whether no mapping retains the context of a device. The library may keep it, once. */
static bool settled(int device)
{
	return !retained(device) || (cu.primary_release(device) == 0 && !retained(device));
}

static int descriptors(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* writable reports whether a byte can be stored into. It asks the kernel, without a fault: read(2) stores 'w' there. */
static bool writable(uint8_t *p)
{
	int pipes[2];

	CHECK(pipe(pipes) == 0);
	CHECK(write(pipes[1], "w", 1) == 1);
	ssize_t n = read(pipes[0], p, 1);
	CHECK(n == 1 || errno == EFAULT);
	close(pipes[0]);
	close(pipes[1]);
	return n == 1;
}

/* The mapping begins and ends inside extents. */
static void basic(const char *path)
{
	const size_t off = ((size_t)2 << 20) - PAGE, len = ((size_t)2 << 20) + 5 * PAGE + 5;
	int fd = open_file(path, O_RDWR), ordinal = -1;
	unsigned type = 0;
	uint8_t *p = gaia_mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)off, 1);
	char got[8] = { 0 };

	CHECK(p != MAP_FAILED);
	load_cuda();
	CHECK(current() == NULL); /* as before */
	CHECK(cu.pointer_attribute(&type, 2, (uintptr_t)p) == 0 && type == 2);
	CHECK(cu.pointer_attribute(&ordinal, 9, (uintptr_t)p + len - 1) == 0 && ordinal == 1);
	for (size_t i = 0; i < len; i++)
		CHECK(p[i] == at(off + i));
	memcpy(p + 2 * PAGE, "device", 6);
	CHECK(gaia_mrelease(p, len, 1) == 0);
	CHECK(pread(fd, got, 6, (off_t)(off + 2 * PAGE)) == 6 && memcmp(got, "device", 6) == 0);
	CHECK(pwrite(fd, "host", 4, (off_t)off + 100) == 4);
	CHECK(gaia_macquire(p + 5, 1, 1) == 0);
	CHECK(memcmp(p + 100, "host", 4) == 0);
	memcpy(p + 20, "sync", 4);
	CHECK(gaia_msync(p, len, MS_SYNC) == 0);
	CHECK(pread(fd, got, 4, (off_t)off + 20) == 4 && memcmp(got, "sync", 4) == 0);
	CHECK(gaia_madvise(p, len, GAIA_MADV_WILLNEED) == 0);

	/* A second, read-only mapping shares the memory. The thread's context is of another device, and stays current. */
	context other = use(0);
	uint8_t *q = gaia_mmap(NULL, 8 * PAGE, PROT_READ, 0, fd, (off_t)off, 1);
	CHECK(q != MAP_FAILED && q != p);
	CHECK(current() == other);
	memcpy(p + 300, "seen", 4);
	CHECK(memcmp(q + 300, "seen", 4) == 0);
	CHECK(!writable(q) && writable(p) && p[0] == 'w' && q[0] == 'w');
	CHECK(gaia_mrelease(q, PAGE, 1) == 0);
	FAILS(gaia_munmap(q, PAGE), EINVAL);
	CHECK(gaia_munmap(q, 8 * PAGE) == 0);
	CHECK(current() == other);
	FAILS(gaia_macquire(q, 1, 1), ENOMEM);

	/* With the thread's own context of the device. */
	context own = use(1);
	q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 1);
	CHECK(q != MAP_FAILED && current() == own);
	CHECK(gaia_munmap(q, PAGE) == 0 && current() == own);
	CHECK(cu.set_current(NULL) == 0);

	memcpy(p + 30, "munmap", 6);
	CHECK(gaia_munmap(p, len) == 0);
	CHECK(pread(fd, got, 6, (off_t)off + 30) == 6 && memcmp(got, "munmap", 6) == 0);
	CHECK(current() == NULL);
	close(fd);
}

static void bad(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *there = mmap(NULL, 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 2), ENODEV);
	CHECK(strstr(gaia_error(), "CUDA_VISIBLE_DEVICES") != NULL);
	MMAP_FAILS(gaia_mmap(there, PAGE, PROT_READ, MAP_FIXED, fd, 0, 0), EINVAL);
	CHECK(strstr(gaia_error(), "MAP_FIXED") != NULL);
	MMAP_FAILS(gaia_mmap(there, PAGE, PROT_READ, MAP_FIXED_NOREPLACE, fd, 0, 0), EINVAL);
	uint8_t *p = gaia_mmap(there, PAGE, PROT_READ, 0, fd, PAGE, 0); /* a hint */
	CHECK(p != MAP_FAILED && p[0] == at(PAGE));

	/* The device's context is kept for later mappings, which do not have to make it again. */
	load_cuda();
	CHECK(retained(0));
	CHECK(gaia_munmap(p, PAGE) == 0);
	CHECK(retained(0));
	for (int i = 0; i < 3; i++) {
		p = gaia_mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0, 0);
		CHECK(p != MAP_FAILED && gaia_munmap(p, PAGE) == 0);
	}
	CHECK(retained(0) && settled(0));
}

/* Extents in more than one frame: a file whose extents have a fixed small size, and that grew. */
static void many(const char *path)
{
	const size_t len = (size_t)300 << 20;
	int fd = open_file(path, O_RDWR), before = descriptors();
	uint8_t *small = gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0);

	CHECK(small != MAP_FAILED);
	CHECK(ftruncate(fd, (off_t)len) == 0);
	CHECK(pwrite(fd, "far", 3, (off_t)len - 3) == 3);
	uint8_t *p = gaia_mmap(NULL, len - PAGE, PROT_WRITE, GAIA_LAZY, fd, PAGE, 0);
	CHECK(p != MAP_FAILED);
	CHECK(gaia_macquire(p + len - PAGE - 3, 3, 0) == 0 && memcmp(p + len - PAGE - 3, "far", 3) == 0);
	CHECK(gaia_macquire(p + ((size_t)270 << 20), 6, 0) == 0);
	memcpy(p + ((size_t)270 << 20), "within", 6);
	CHECK(gaia_mrelease(p + ((size_t)270 << 20), 6, 0) == 0);
	char got[6];
	CHECK(pread(fd, got, 6, ((off_t)270 << 20) + PAGE) == 6 && memcmp(got, "within", 6) == 0);
	CHECK(gaia_munmap(p, len - PAGE) == 0);
	CHECK(gaia_munmap(small, PAGE) == 0);
	CHECK(descriptors() - before <= 2); /* for the connections */
}

/* Every mapping fails, at the call that the environment names, and leaves nothing behind. The first argument is
 * "failing". */
static void failing(const char *path, const char *call)
{
	int fd = open_file(path, O_RDWR), before;

	/* A failure of cuInit is known before there is a connection. */
	CHECK(gaia_mmap(NULL, 3 * PAGE, PROT_WRITE, 0, fd, ((off_t)2 << 20) - PAGE, 0) == MAP_FAILED);
	CHECK(strstr(gaia_error(), call) != NULL);
	before = descriptors();
	for (int i = 0; i < 3; i++) {
		CHECK(gaia_mmap(NULL, 3 * PAGE, PROT_WRITE, 0, fd, ((off_t)2 << 20) - PAGE, 0) == MAP_FAILED);
		CHECK(errno == ENOMEM || errno == ENODEV);
		CHECK(strstr(gaia_error(), call) != NULL);
	}
	CHECK(descriptors() == before);
	if (strcmp(call, "cuInit") != 0) {
		load_cuda();
		CHECK(settled(0));
	}
}

/* The mapping is made, but unmapping it fails. */
static void failing_unmap(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	char got[4];

	CHECK(p != MAP_FAILED);
	memcpy(p, "gone", 4);
	FAILS(gaia_munmap(p, PAGE), EIO);
	CHECK(strstr(gaia_error(), "cuMem") != NULL);
	CHECK(pread(fd, got, 4, 0) == 4 && memcmp(got, "gone", 4) == 0);
	FAILS(gaia_munmap(p, PAGE), EINVAL);
}

/* Stream order */

/* A gate blocks a stream until it is opened. */
struct gate {
	int entered, open;
};

static void pass(void *argument)
{
	struct gate *g = argument;

	__atomic_store_n(&g->entered, 1, __ATOMIC_RELEASE);
	while (!__atomic_load_n(&g->open, __ATOMIC_ACQUIRE))
		sched_yield();
}

static void open_gate(struct gate *g)
{
	__atomic_store_n(&g->open, 1, __ATOMIC_RELEASE);
}

/* Work that stands for a kernel, or for a check of its results. */
static uint8_t *device_memory;
static int work_fd;
static char seen[8];

static void store_one(void *unused)
{
	(void)unused;
	memcpy(device_memory, "one", 3);
}

static void store_two(void *unused)
{
	(void)unused;
	memcpy(device_memory, "two", 3);
}

static void write_file(void *unused)
{
	(void)unused;
	CHECK(pread(work_fd, seen, 3, 0) == 3);
	CHECK(pwrite(work_fd, "cpu", 3, 100) == 3);
}

static void async(const char *path, int device, stream s)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	context before;
	struct gate gate = { 0 };
	char got[3];

	CHECK(p != MAP_FAILED);
	load_cuda();
	if (device >= 0)
		use(device);
	device_memory = p;
	work_fd = fd;
	if (s == NULL) {
		use(0);
		CHECK(cu.stream_create(&s, 0) == 0);
		CHECK(cu.set_current(NULL) == 0);
	}
	before = current();
	CHECK(cu.host_func(s, pass, &gate) == 0);
	CHECK(cu.host_func(s, store_one, NULL) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(cu.host_func(s, write_file, NULL) == 0);
	CHECK(gaia_macquire_async(p, PAGE, 0, s) == 0);
	CHECK(current() == before);
	/* None of it was done yet, because the calls return at once. */
	CHECK(pread(fd, got, 3, 0) == 3 && got[0] == (char)at(0));
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	open_gate(&gate);
	CHECK(cu.stream_wait(s) == 0);
	CHECK(memcmp(seen, "one", 3) == 0);      /* released before the checking work, */
	CHECK(memcmp(p + 100, "cpu", 3) == 0);   /* acquired after the writing work */
	CHECK(gaia_async_error(p) == 0);
	CHECK(cu.host_func(s, store_two, NULL) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0); /* waits for it */
	CHECK(pread(fd, got, 3, 0) == 3 && memcmp(got, "two", 3) == 0);
}

static void stream_order(const char *path)
{
	async(path, -1, NULL);
}

/* The default streams, by their numbers, in a context of the device. */
static void default_stream(const char *path)
{
	async(path, 0, (stream)(uintptr_t)1);
}

static void null_stream(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 1);
	char got[4];

	CHECK(p != MAP_FAILED);
	load_cuda();
	memcpy(p, "null", 4);
	context other = use(0); /* the stream is still the one of the mapping's device */
	CHECK(gaia_mrelease_async(p, PAGE, 1, NULL) == 0);
	CHECK(current() == other);
	use(1);
	CHECK(cu.stream_wait(NULL) == 0);
	CHECK(pread(fd, got, 4, 0) == 4 && memcmp(got, "null", 4) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

static void wrong_stream(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	stream s;

	CHECK(p != MAP_FAILED);
	load_cuda();
	context other = use(1);
	CHECK(cu.stream_create(&s, 0) == 0);
	FAILS(gaia_macquire_async(p, PAGE, 0, s), EINVAL);
	CHECK(strstr(gaia_error(), "CUDA device 1") != NULL);
	CHECK(current() == other);
	FAILS(gaia_mrelease_async(p, 2 * PAGE, 0, s), EINVAL);
	FAILS(gaia_mrelease_async(p, PAGE, 1, s), ENODEV);
	CHECK(gaia_async_error(p) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

static void change_byte(void *unused)
{
	(void)unused;
	device_memory[0]++;
}

/* A graph acquires and releases whenever it runs. It fails when its mapping is gone. */
static void graphs(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0), *q, b = 0;
	graph g, late;
	stream s;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	device_memory = p;
	CHECK(cu.stream_create(&s, 0) == 0);
	CHECK(cu.begin_capture(s, 0) == 0);
	CHECK(gaia_macquire_async(p, PAGE, 0, s) == 0);
	CHECK(cu.host_func(s, change_byte, NULL) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0); /* allowed during a capture */
	CHECK(q != MAP_FAILED);
	CHECK(cu.end_capture(s, &g) == 0);
	CHECK(pread(fd, &b, 1, 0) == 1 && b == at(0));
	for (uint8_t i = 10; i < 30; i++) {
		CHECK(pwrite(fd, &i, 1, 0) == 1);
		CHECK(cu.launch_graph(g, s) == 0 && cu.stream_wait(s) == 0);
		CHECK(gaia_async_error(p) == 0);
		CHECK(pread(fd, &b, 1, 0) == 1 && b == i + 1);
	}
	/* Two concurrent launches share a word; each waits at least for its own run. */
	stream s2;
	CHECK(cu.stream_create(&s2, 0) == 0);
	for (int i = 0; i < 50; i++)
		CHECK(cu.launch_graph(g, s) == 0 && cu.launch_graph(g, s2) == 0);
	CHECK(cu.stream_wait(s) == 0 && cu.stream_wait(s2) == 0);
	CHECK(gaia_async_error(p) == 0);
	CHECK(cu.stream_destroy(s2) == 0);
	CHECK(cu.begin_capture(s, 0) == 0);
	CHECK(gaia_mrelease_async(q, PAGE, 0, s) == 0);
	CHECK(cu.end_capture(s, &late) == 0);
	CHECK(gaia_munmap(q, PAGE) == 0); /* a graph that does not run keeps no mapping */
	CHECK(gaia_async_error(NULL) == 0);
	CHECK(cu.launch_graph(late, s) == 0 && cu.stream_wait(s) == 0);
	FAILS(gaia_async_error(NULL), ENOMEM);
	CHECK(gaia_async_error(NULL) == 0);
	/* Not even if another mapping has the addresses: it is not the graph's. */
	q = gaia_mmap(q, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
	CHECK(q != MAP_FAILED);
	CHECK(cu.launch_graph(late, s) == 0 && cu.stream_wait(s) == 0);
	CHECK(gaia_async_error(q) == 0);
	FAILS(gaia_async_error(NULL), ENOMEM);
	CHECK(cu.destroy_graph(late) == 0 && cu.destroy_graph(g) == 0);
	CHECK(gaia_munmap(q, PAGE) == 0 && gaia_munmap(p, PAGE) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

/* The graph cannot keep what the call needs, because memory is short or the driver too old. */
static void no_capture(const char *path, int want)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	graph g;
	stream s;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s, 0) == 0 && cu.begin_capture(s, 0) == 0);
	FAILS(gaia_macquire_async(p, PAGE, 0, s), want);
	CHECK(cu.end_capture(s, &g) == 0 && cu.destroy_graph(g) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

static void failing_capture(const char *path)
{
	no_capture(path, ENOMEM);
}

static void old_driver(const char *path)
{
	no_capture(path, ENOTSUP);
	CHECK(strstr(gaia_error(), "CUDA 11.3") != NULL);
}

/* The environment makes the launch fail. */
static void no_launch(const char *path, const char *call)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	FAILS(gaia_macquire_async(p, PAGE, 0, NULL), ENOMEM);
	CHECK(strstr(gaia_error(), call) != NULL);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

static void count(void *n)
{
	__atomic_add_fetch((int *)n, 1, __ATOMIC_SEQ_CST);
}

/* While the daemon is slow for one stream, host functions of other streams run, and their calls are done. */
static void callbacks_do_not_wait(const char *path)
{
	int fd = open_file(path, O_RDWR), before = 0, after = 0, other = 0;
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	stream s1, s2;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s1, 0) == 0 && cu.stream_create(&s2, 0) == 0);
	CHECK(cu.host_func(s1, count, &before) == 0);
	CHECK(gaia_macquire_async(p, PAGE, 0, s1) == 0);
	CHECK(cu.host_func(s1, count, &after) == 0);
	say_and_wait("queued"); /* the daemon has it */
	CHECK(cu.host_func(s2, count, &other) == 0);
	memcpy(p, "others", 6);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s2) == 0);
	CHECK(cu.host_func(s2, count, &other) == 0);
	CHECK(cu.stream_wait(s2) == 0 && other == 2);
	char got[6];
	CHECK(pread(fd, got, 6, 0) == 6 && memcmp(got, "others", 6) == 0);
	CHECK(__atomic_load_n(&before, __ATOMIC_SEQ_CST) == 1 && __atomic_load_n(&after, __ATOMIC_SEQ_CST) == 0);
	interrupts(true, 0);
	FAILS(gaia_munmap(p, PAGE), EINTR); /* the mapping stays */
	interrupts(false, 0);
	CHECK(gaia_madvise(p, PAGE, GAIA_MADV_NORMAL) == 0);
	say_and_wait("ran"); /* the daemon answers */
	CHECK(cu.stream_wait(s1) == 0 && after == 1);
	CHECK(gaia_async_error(p) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
	CHECK(cu.stream_destroy(s1) == 0 && cu.stream_destroy(s2) == 0);
}

static int unmapping, unmapped;

static void *unmap_main(void *p)
{
	__atomic_store_n(&unmapping, 1, __ATOMIC_RELEASE);
	CHECK(gaia_munmap(p, PAGE) == 0);
	__atomic_store_n(&unmapped, 1, __ATOMIC_RELEASE);
	return NULL;
}

/* munmap waits for queued calls. */
static void munmap_waits(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	struct gate gate = { 0 };
	pthread_t thread;
	stream s;
	char got[3];

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	device_memory = p;
	CHECK(cu.stream_create(&s, 0) == 0);
	CHECK(cu.host_func(s, pass, &gate) == 0);
	CHECK(cu.host_func(s, store_one, NULL) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(pthread_create(&thread, NULL, unmap_main, p) == 0);
	while (!__atomic_load_n(&unmapping, __ATOMIC_ACQUIRE) || !__atomic_load_n(&gate.entered, __ATOMIC_ACQUIRE))
		sched_yield();
	for (int i = 0; i < 1000; i++) { /* long enough for a munmap that does not wait */
		CHECK(!__atomic_load_n(&unmapped, __ATOMIC_ACQUIRE));
		CHECK(gaia_macquire(p, PAGE, 0) == 0); /* the mapping is still in use */
	}
	open_gate(&gate);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(pread(fd, got, 3, 0) == 3 && memcmp(got, "one", 3) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

/* A lost context never runs queued calls: munmap reports that and does not hang. The environment makes queries fail. */
static void lost_context(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	struct gate gate = { 0 };
	stream s;
	char got[3];

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s, 0) == 0);
	CHECK(cu.host_func(s, pass, &gate) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(gaia_macquire_async(p, PAGE, 0, s) == 0);
	memcpy(p, "end", 3);
	FAILS(gaia_munmap(p, PAGE), EIO);
	CHECK(strstr(gaia_error(), "was never done") != NULL);
	CHECK(pread(fd, got, 3, 0) == 3 && memcmp(got, "end", 3) == 0); /* the daemon released it as usual */
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
	open_gate(&gate); /* if they do run now, they do nothing */
	CHECK(cu.stream_destroy(s) == 0);
}

/* No more calls wait in streams than the library allows. Those that wait are done. */
static void bounded(const char *path)
{
	int fd = open_file(path, O_RDWR), n = 0;
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0);
	struct gate gate = { 0 };
	stream s;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s, 0) == 0);
	for (int round = 0; round < 2; round++) {
		gate.open = 0;
		CHECK(cu.host_func(s, pass, &gate) == 0);
		for (n = 0; gaia_mrelease_async(p, PAGE, 0, s) == 0; n++)
			CHECK(n < 1 << 20);
		CHECK(errno == EAGAIN && n == 16384);
		open_gate(&gate);
		CHECK(cu.stream_wait(s) == 0);
		CHECK(gaia_async_error(p) == 0);
		CHECK(gaia_mrelease(p, PAGE, 0) == 0);
	}
	CHECK(gaia_munmap(p, PAGE) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

/* Work that a stream runs while its mapping ends. */
static void store_late(void *unused)
{
	(void)unused;
	for (int i = 0; i < 5000; i++) /* runs for a while */
		sched_yield();
	memcpy(device_memory, "late", 4);
}

static uint8_t *map_writable(int fd)
{
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	load_cuda();
	device_memory = p;
	return p;
}

/* release, msync and munmap wait for the work that was begun, in any stream or in the named one. */
static void release_waits(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = map_writable(fd);
	struct gaia_call call = { 0 };
	char got[4];
	stream s;

	use(0);
	CHECK(cu.stream_create(&s, 1) == 0);
	for (int how = 0; how < 5; how++) {
		CHECK(pwrite(fd, "----", 4, 0) == 4 && gaia_macquire(p, PAGE, 0) == 0);
		CHECK(cu.host_func(s, store_late, NULL) == 0);
		if (how == 0)
			CHECK(gaia_mrelease(p, PAGE, 0) == 0);
		else if (how == 1)
			CHECK(gaia_msync(p, PAGE, MS_SYNC) == 0);
		else if (how == 4)
			CHECK(gaia_munmap(p, PAGE) == 0); /* the store does not hit unmapped memory */
		else
			CHECK(gaia_start(&call, GAIA_DO_RELEASE, p, PAGE, 0, how == 2 ? s : GAIA_ALL_STREAMS) == 0 &&
			      gaia_wait(&call, -1) == 0 && call.pages == 1);
		CHECK(pread(fd, got, 4, 0) == 4 && memcmp(got, "late", 4) == 0);
	}
	CHECK(cu.stream_destroy(s) == 0);
}

/* gaia_drop waits for kernels, too, and neither gaia_drop nor munmap ends a capture. */
static void drop(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = map_writable(fd), *q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
	const struct gaia_copy one = { 0, p, 10 };
	stream s;
	graph g;
	uint8_t b = 0;

	CHECK(q != MAP_FAILED);
	use(0);
	uint8_t *c = gaia_copies(p, 10, &one, 1);
	CHECK(c != MAP_FAILED);
	CHECK(cu.stream_create(&s, 1) == 0);
	CHECK(cu.host_func(s, store_late, NULL) == 0);
	gaia_drop(p, PAGE);
	while (b != 'l') /* the daemon may not have handled it yet */
		CHECK(pread(fd, &b, 1, 0) == 1);
	CHECK(cu.begin_capture(s, 0) == 0);
	p = map_writable(fd);
	CHECK(gaia_write(p, "captured", 8) == 0);
	gaia_drop(p, PAGE);
	gaia_drop(c, 10);
	CHECK(gaia_munmap(q, PAGE) == 0);
	CHECK(cu.end_capture(s, &g) == 0 && cu.destroy_graph(g) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

/* The device is full. The library does nothing that would end a capture, and the program keeps the memory. */
static void full_device(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = map_writable(fd), *q = map_writable(fd);
	stream s;
	graph g;

	use(0);
	CHECK(cu.stream_create(&s, 1) == 0 && cu.begin_capture(s, 0) == 0);
	gaia_drop(p, PAGE);
	p[0]++;
	CHECK(cu.end_capture(s, &g) == 0 && cu.destroy_graph(g) == 0);
	CHECK(cu.host_func(s, store_late, NULL) == 0);
	CHECK(gaia_munmap(q, PAGE) == 0); /* which may wait in another way */
	CHECK(cu.stream_destroy(s) == 0);
}

/* Copied bytes are there, and copies within the device belong to the program. */
static void copies(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = map_writable(fd);
	const struct gaia_copy list[] = { { 0, p + 7, 3 }, { 256, p + 100, 4 } };
	struct gaia_info info;
	char got[5];

	CHECK(gaia_write(p + 7, "bytes", 5) == 0 && memcmp(p + 7, "bytes", 5) == 0);
	CHECK(gaia_read(p + 7, got, 5) == 0 && memcmp(got, "bytes", 5) == 0);
	uint8_t *c = gaia_copies(p, 5000, list, 2);
	CHECK(c != MAP_FAILED && current() == NULL);
	CHECK(gaia_info(c, &info, sizeof info) == 0 && info.kind == GAIA_KIND_CUDA && info.length == 5000);
	CHECK(gaia_read(c, got, 3) == 0 && memcmp(got, "byt", 3) == 0);
	CHECK(gaia_read(c + 256, got, 4) == 0 && memcmp(got, p + 100, 4) == 0);
	FAILS(gaia_munmap(c, PAGE), EINVAL);
	CHECK(gaia_munmap(p, PAGE) == 0); /* the copies do not need it */
	CHECK(gaia_read(c, got, 3) == 0 && memcmp(got, "byt", 3) == 0);
	FAILS(gaia_macquire_async(c, 1, 0, NULL), EINVAL);
	CHECK(gaia_munmap(c, 5000) == 0);
	CHECK(settled(0));
}

/* A held mapping needs no context in the process. */
static void held(const char *path)
{
	struct gaia_map_args a = { .length = PAGE, .flags = GAIA_MAP_HOLD | GAIA_MAP_LAZY, .fd = open_file(path, O_RDWR),
				   .prot = PROT_READ, .device = 1 };
	uint8_t *p = gaia_map(&a, sizeof a);

	CHECK(p != MAP_FAILED);
	load_cuda();
	CHECK(gaia_macquire(p, PAGE, 1) == 0 && !retained(1));
	CHECK(gaia_munmap(p, PAGE) == 0 && !retained(1));
	a.device = 2;
	MMAP_FAILS(gaia_map(&a, sizeof a), ENODEV);
}

static void *lent_main(void *lent)
{
	int fd = work_fd;

	CHECK(gaia_context() == NULL && !retained(1));
	gaia_lend_context(lent);
	CHECK(gaia_context() == lent);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	CHECK(p != MAP_FAILED && current() == NULL);
	CHECK(gaia_munmap(p, PAGE) == 0);
	p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 1); /* the context is of another device */
	CHECK(p != MAP_FAILED && retained(1) && current() == NULL);
	CHECK(gaia_munmap(p, PAGE) == 0);
	gaia_lend_context(NULL);
	CHECK(gaia_context() == NULL);
	return NULL;
}

static void lent_context(const char *path)
{
	pthread_t thread;

	work_fd = open_file(path, O_RDWR);
	CHECK(gaia_context() == NULL);
	CHECK(gaia_munmap(map_writable(work_fd), PAGE) == 0);
	context c = use(0);
	CHECK(gaia_context() == c);
	CHECK(pthread_create(&thread, NULL, lent_main, c) == 0 && pthread_join(thread, NULL) == 0);
}

/* The daemon stops between the call and its turn in the stream. */
static void late_failure(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	struct gate gate = { 0 };
	stream s;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s, 0) == 0);
	CHECK(cu.host_func(s, pass, &gate) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(gaia_macquire_async(p, PAGE, 0, s) == 0);
	say_and_wait("queued");
	CHECK(gaia_async_error(p) == 0);
	open_gate(&gate);
	CHECK(cu.stream_wait(s) == 0);
	FAILS(gaia_async_error(p + 5), ENOTCONN); /* reported once */
	CHECK(gaia_async_error(p) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	CHECK(cu.stream_wait(s) == 0);
	FAILS(gaia_munmap(p, PAGE), ENOTCONN);
	CHECK(cu.stream_destroy(s) == 0);
}

/* The daemon refuses the first acquire. msync succeeds itself, and reports that failure once. */
static void late_failure_at_msync(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(gaia_macquire_async(p, PAGE, 0, NULL) == 0);
	CHECK(cu.stream_wait(NULL) == 0);
	CHECK(gaia_mrelease(p, PAGE, 0) == 0); /* reports only its own failures */
	CHECK(gaia_macquire(p, PAGE, 0) == 0);
	FAILS(gaia_msync(p, PAGE, MS_SYNC), EIO);
	CHECK(gaia_msync(p, PAGE, MS_SYNC) == 0);
	CHECK(gaia_async_error(p) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

/* fork and threads */

static void forks(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	struct gate gate = { 0 };
	stream s;
	uint8_t b;

	CHECK(p != MAP_FAILED);
	load_cuda();
	use(0);
	CHECK(cu.stream_create(&s, 0) == 0);
	CHECK(cu.host_func(s, pass, &gate) == 0);
	CHECK(gaia_mrelease_async(p, PAGE, 0, s) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		FAILS(gaia_macquire(p, 1, 0), ECHILD);
		FAILS(gaia_mrelease_async(p, 1, 0, s), ECHILD);
		FAILS(gaia_async_error(p), ECHILD);
		CHECK(gaia_munmap(p, PAGE) == 0); /* does not wait, and does not call CUDA, which would fail */
		FAILS(gaia_macquire(p, 1, 0), ENOMEM);
		MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0), ENODEV);
		CHECK(strstr(gaia_error(), "fork") != NULL);
		_exit(0);
	}
	wait_for(child);
	p[5] = 77;
	open_gate(&gate);
	CHECK(cu.stream_wait(s) == 0);
	CHECK(pread(fd, &b, 1, 5) == 1 && b == 77);
	CHECK(gaia_munmap(p, PAGE) == 0);
	CHECK(cu.stream_destroy(s) == 0);
}

/* A child may use CUDA if its parent did not. */
static void forks_before(const char *path)
{
	int fd = open_file(path, O_RDWR);
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
		CHECK(p != MAP_FAILED && p[8] == at(8));
		CHECK(gaia_munmap(p, PAGE) == 0);
		_exit(0);
	}
	wait_for(child);
}

enum { THREADS = 8, ROUNDS = 15 };

static uint8_t *shared_map;

static void *thread_main(void *argument)
{
	size_t me = (size_t)argument;
	int dev = (int)(me % 2);
	stream s;

	use((int)(me / 2 % 2));
	use(dev);
	CHECK(cu.stream_create(&s, 0) == 0);
	for (int i = 0; i < ROUNDS; i++) {
		uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, work_fd, (off_t)(me * PAGE), dev);
		CHECK(p != MAP_FAILED);
		p[i] = (uint8_t)(me + 1);
		CHECK(gaia_mrelease_async(p, PAGE, dev, s) == 0);
		if (i % 2 == 0)
			CHECK(cu.stream_wait(s) == 0);
		CHECK(gaia_munmap(p, PAGE) == 0);
		CHECK(gaia_macquire_async(shared_map + me * PAGE, PAGE, 0, NULL) == 0);
		CHECK(gaia_macquire(shared_map + me * PAGE, PAGE, 0) == 0);
		CHECK(shared_map[me * PAGE + (size_t)i] == (uint8_t)(me + 1));
	}
	CHECK(cu.stream_destroy(s) == 0);
	CHECK(cu.set_current(NULL) == 0);
	return NULL;
}

static void threads(const char *path)
{
	pthread_t all[THREADS];

	work_fd = open_file(path, O_RDWR);
	shared_map = gaia_mmap(NULL, THREADS * PAGE, PROT_READ, 0, work_fd, 0, 0);
	CHECK(shared_map != MAP_FAILED);
	load_cuda();
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&all[i], NULL, thread_main, (void *)i) == 0);
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	CHECK(gaia_async_error(shared_map) == 0);
	CHECK(gaia_munmap(shared_map, THREADS * PAGE) == 0);
}

/* Prints why a mapping on a device fails. */
static void refused(const char *path, const char *device)
{
	int fd = open_file(path, O_RDWR);

	CHECK(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, atoi(device)) == MAP_FAILED);
	printf("%d %s\n", errno, gaia_error());
}

/*
 * Memory that moves. The file has 32 extents of 2 MiB, the device has room for 12 of them, and there is no pinned
 * memory.
 */
enum { EXTENT = 2 << 20, FILE_EXTENTS = 32, ROOM = 12 };
#define PER_THREAD ((stream)2)
static uint8_t *movable;

/* A kernel that runs until its word is 1. */
static int kernel(stream s, uint32_t *word)
{
	return cu.wait_value(s, (uintptr_t)word, 1, 0);
}

static void end_kernel(uint32_t *word)
{
	__atomic_store_n(word, 1, __ATOMIC_RELEASE);
}

static int bracket(int from, int n, stream s, unsigned patience)
{
	const struct gaia_range r = { movable + (size_t)from * EXTENT, (uint64_t)n * EXTENT };

	return gaia_use_for(&r, 1, s, patience);
}

static void map_movable(const char *path)
{
	const int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | GAIA_MOVABLE;

	movable = gaia_mmap(NULL, (size_t)FILE_EXTENTS * EXTENT, prot, flags, open_file(path, O_RDWR), 0, 0);
	CHECK(movable != MAP_FAILED);
	load_cuda();
	use(0);
}

/*
 * Kernels still use all kept brackets when the daemon asks for them. Stream-ordered calls go on all the same, the
 * memory stays, and it goes once the kernels are done.
 */
static void kernels_use_kept(const char *path)
{
	uint32_t word = 0;
	uint8_t *q;
	stream s, t;

	map_movable(path);
	q = gaia_mmap(NULL, PAGE, PROT_WRITE, MAP_SHARED, open_file(path, O_RDWR), (off_t)(FILE_EXTENTS - 1) * EXTENT, 0);
	CHECK(q != MAP_FAILED);
	CHECK(cu.stream_create(&s, 1) == 0 && cu.stream_create(&t, 1) == 0);
	CHECK(bracket(0, 1, s, 0) == 0 && kernel(s, &word) == 0 && gaia_done(s) == 0);
	for (int i = 1; i < ROOM - 1; i++)
		CHECK(bracket(i, 1, s, 0) == 0 && gaia_done(s) == 0);
	FAILS(bracket(16, ROOM - 1, GAIA_NO_STREAM, 200), ETIMEDOUT);
	CHECK(gaia_macquire_async(q, PAGE, 0, t) == 0 && cu.stream_wait(t) == 0);
	for (int i = 0; i < ROOM - 1; i++)
		CHECK(writable(movable + (size_t)i * EXTENT));
	end_kernel(&word);
	CHECK(bracket(16, ROOM - 1, GAIA_NO_STREAM, 0) == 0 && gaia_done(GAIA_NO_STREAM) == 0);
	CHECK(gaia_munmap(movable, (size_t)FILE_EXTENTS * EXTENT) == 0 && gaia_munmap(q, PAGE) == 0);
	CHECK(cu.stream_destroy(s) == 0 && cu.stream_destroy(t) == 0);
}

/* A thread uses the bracket that a kernel of another thread uses, in a stream with the same handle. */
static void *use_in_own_stream(void *unused)
{
	(void)unused;
	use(0);
	CHECK(bracket(0, 1, PER_THREAD, 0) == 0 && gaia_done(PER_THREAD) == 0);
	CHECK(cu.stream_wait(PER_THREAD) == 0);
	return NULL;
}

static void streams_of_threads(const char *path)
{
	uint32_t word = 0;
	pthread_t other;

	map_movable(path);
	CHECK(bracket(0, 1, PER_THREAD, 0) == 0 && kernel(PER_THREAD, &word) == 0 && gaia_done(PER_THREAD) == 0);
	CHECK(pthread_create(&other, NULL, use_in_own_stream, NULL) == 0 && pthread_join(other, NULL) == 0);
	FAILS(bracket(16, ROOM, GAIA_NO_STREAM, 200), ETIMEDOUT);
	CHECK(writable(movable));
	end_kernel(&word);
	CHECK(bracket(16, ROOM, GAIA_NO_STREAM, 0) == 0 && gaia_done(GAIA_NO_STREAM) == 0);
	CHECK(gaia_munmap(movable, (size_t)FILE_EXTENTS * EXTENT) == 0);
}

/* gaia_drop and gaia_munmap of movable memory end no capture, and wait for the kernels that use it. */
static void drop_movable(const char *path)
{
	stream s, t;
	graph g;

	for (int how = 0; how < 2; how++) {
		map_movable(path);
		device_memory = movable;
		CHECK(cu.stream_create(&s, 1) == 0 && cu.stream_create(&t, 1) == 0);
		CHECK(bracket(1, 1, s, 0) == 0 && gaia_done(s) == 0 && bracket(2, 1, s, 0) == 0);
		CHECK(bracket(0, 1, s, 0) == 0 && cu.host_func(s, store_late, NULL) == 0 && gaia_done(s) == 0);
		CHECK(cu.begin_capture(t, 0) == 0);
		if (how == 0)
			gaia_drop(movable, (size_t)FILE_EXTENTS * EXTENT);
		else
			CHECK(gaia_munmap(movable, (size_t)FILE_EXTENTS * EXTENT) == 0);
		CHECK(gaia_done(s) == 0);
		CHECK(cu.end_capture(t, &g) == 0 && cu.destroy_graph(g) == 0);
		CHECK(cu.stream_destroy(s) == 0 && cu.stream_destroy(t) == 0);
	}
}

/* A range is used in ever new streams, and mapped until the last moment. Its memory goes once the kernels are done. */
static void many_streams(const char *path)
{
	stream s;

	map_movable(path);
	device_memory = movable;
	for (int i = 0; i < 20; i++) {
		CHECK(cu.stream_create(&s, 1) == 0);
		CHECK(bracket(0, 1, s, 0) == 0 && cu.host_func(s, store_late, NULL) == 0 && gaia_done(s) == 0);
		CHECK(cu.stream_destroy(s) == 0);
	}
	CHECK(bracket(16, ROOM, GAIA_NO_STREAM, 0) == 0 && gaia_done(GAIA_NO_STREAM) == 0);
	CHECK(bracket(0, 1, GAIA_NO_STREAM, 0) == 0 && gaia_done(GAIA_NO_STREAM) == 0);
	CHECK(gaia_munmap(movable, (size_t)FILE_EXTENTS * EXTENT) == 0);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(const char *path);
	} scenarios[] = {
		{ "basic", basic },
		{ "bad", bad },
		{ "many", many },
		{ "failing-unmap", failing_unmap },
		{ "stream-order", stream_order },
		{ "default-stream", default_stream },
		{ "null-stream", null_stream },
		{ "wrong-stream", wrong_stream },
		{ "graphs", graphs },
		{ "failing-capture", failing_capture },
		{ "old-driver", old_driver },
		{ "munmap-waits", munmap_waits },
		{ "callbacks-do-not-wait", callbacks_do_not_wait },
		{ "lost-context", lost_context },
		{ "late-failure", late_failure },
		{ "late-failure-at-msync", late_failure_at_msync },
		{ "forks", forks },
		{ "bounded", bounded },
		{ "release-waits", release_waits },
		{ "drop", drop },
		{ "full-device", full_device },
		{ "copies", copies },
		{ "held", held },
		{ "lent-context", lent_context },
		{ "forks-before", forks_before },
		{ "threads", threads },
		{ "kernels-use-kept", kernels_use_kept },
		{ "streams-of-threads", streams_of_threads },
		{ "many-streams", many_streams },
		{ "drop-movable", drop_movable },
	};

	CHECK(argc >= 3);
	if (getenv("GAIAFS_TEST_GRANTS") != NULL)
		gaiafs_request_grant = ask_for_grant;
	if (strcmp(argv[1], "failing") == 0 && argc == 4)
		return failing(argv[2], argv[3]), 0;
	if (strcmp(argv[1], "no-launch") == 0 && argc == 4)
		return no_launch(argv[2], argv[3]), 0;
	if (strcmp(argv[1], "refused") == 0 && argc == 4)
		return refused(argv[2], argv[3]), 0;
	for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++)
		if (strcmp(argv[1], scenarios[i].name) == 0)
			return scenarios[i].run(argv[2]), 0;
	CHECK(!"a scenario of that name");
	return 1;
}
