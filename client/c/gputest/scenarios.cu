/*
 * Tests of the library on a real GPU. The first argument names a test, the second a folder on a mount with CUDA device
 * 0, or with 0 and 1 for the tests that say so. Each test is a process of its own. Exit status 0: passed; 77: skipped,
 * with a reason.
 */
#include "../examples/example.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <dlfcn.h>
#include <sys/wait.h>

#define CHECK(condition)                \
	do {                                \
		if (!(condition))               \
			fail(__LINE__, #condition); \
	} while (0)

/* FAILS checks that the call returns -1 with that errno and a message. */
#define FAILS(call, want)               \
	do {                                \
		errno = 0;                      \
		CHECK((call) == -1);            \
		CHECK(errno == (want));         \
		CHECK(gaia_error()[0] != '\0'); \
	} while (0)

static const std::size_t page = 4096, MiB = 1 << 20;

[[noreturn]] static void fail(int line, const char *what)
{
	std::fprintf(stderr, "line %d: %s: errno %d, \"%s\", CUDA: %s\n", line, what, errno, gaia_error(),
		     cudaGetErrorString(cudaPeekAtLastError()));
	std::_Exit(1);
}

[[noreturn]] static void skip(const char *why)
{
	std::printf("%s\n", why);
	std::exit(77);
}

/* Kernels */

__global__ void fill(unsigned *p, std::size_t n, unsigned first)
{
	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
		i += std::size_t(gridDim.x) * blockDim.x)
		p[i] = first + static_cast<unsigned>(i);
}

__global__ void differing(const unsigned *p, std::size_t n, unsigned first, unsigned long long *count)
{
	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
		i += std::size_t(gridDim.x) * blockDim.x)
		if (p[i] != first + static_cast<unsigned>(i))
			atomicAdd(count, 1ull);
}

__global__ void store(unsigned *p, unsigned value)
{
	*p = value;
}

__global__ void increase(unsigned *p, unsigned by)
{
	*p += by;
}

/* hold stores a value, signals that, and runs until it is told to end. */
__global__ void hold(unsigned *p, unsigned value, volatile int *flags)
{
	*p = value;
	__threadfence_system();
	flags[0] = 1;
	while (flags[1] == 0)
		;
}

/* await runs until the value is there. */
__global__ void await(volatile unsigned *p, unsigned value, volatile int *flags)
{
	flags[0] = 1;
	while (*p != value && flags[1] == 0)
		;
	flags[2] = *p == value;
}

__global__ void store_where_flag(unsigned *p, volatile int *flags)
{
	while (flags[1] == 0)
		;
	*p = 1;
}

static void finish()
{
	CUDA(cudaGetLastError());
	CUDA(cudaDeviceSynchronize());
}

/* flags are ints that the host and kernels share. */
static volatile int *make_flags()
{
	void *p;

	CUDA(cudaHostAlloc(&p, 3 * sizeof(int), cudaHostAllocDefault));
	std::memset(p, 0, 3 * sizeof(int));
	return static_cast<volatile int *>(p);
}

static unsigned long long wrong(const unsigned *p, std::size_t n, unsigned first)
{
	unsigned long long *count, got;

	CUDA(cudaMalloc(&count, sizeof *count));
	CUDA(cudaMemset(count, 0, sizeof *count));
	differing<<<256, 256>>>(p, n, first, count);
	finish();
	CUDA(cudaMemcpy(&got, count, sizeof got, cudaMemcpyDeviceToHost));
	CUDA(cudaFree(count));
	return got;
}

/* Files */

static std::vector<unsigned> numbers(std::size_t n, unsigned first)
{
	std::vector<unsigned> v(n);

	for (std::size_t i = 0; i < n; i++)
		v[i] = first + static_cast<unsigned>(i);
	return v;
}

/* make writes a file of n numbers and opens it. */
static int make(const std::string &path, std::size_t n, unsigned first = 0)
{
	int fd;

	write_file(path, numbers(n, first));
	fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

static unsigned home(int fd, std::size_t i)
{
	unsigned v = 0;

	CHECK(pread(fd, &v, sizeof v, static_cast<off_t>(i * sizeof v)) == sizeof v);
	return v;
}

static void set_home(int fd, std::size_t i, unsigned v)
{
	CHECK(pwrite(fd, &v, sizeof v, static_cast<off_t>(i * sizeof v)) == sizeof v);
}

static unsigned *map(
	int fd, std::size_t len, int prot = PROT_READ | PROT_WRITE, off_t off = 0, int flags = MAP_SHARED, int dev = 0)
{
	void *p = gaia_mmap(nullptr, len, prot, flags, fd, off, dev);

	CHECK(p != MAP_FAILED);
	return static_cast<unsigned *>(p);
}

static unsigned peek(const unsigned *p)
{
	unsigned v;

	CUDA(cudaMemcpy(&v, p, sizeof v, cudaMemcpyDeviceToHost));
	return v;
}

static int gpus()
{
	int n = 0;

	CUDA(cudaGetDeviceCount(&n));
	return n;
}

/* The scenarios */

/* Everything that CUDA does with a device pointer, on a mapping that begins and ends inside extents. */
static void pointer(const std::string &dir)
{
	const std::size_t n = 10 * MiB / sizeof(unsigned), off = 3 * MiB + page, len = 5 * MiB;
	int fd = make(dir + "/pointer", n, 7);
	unsigned *p = map(fd, len, PROT_READ | PROT_WRITE, static_cast<off_t>(off));
	const unsigned first = 7 + static_cast<unsigned>(off / sizeof(unsigned));
	const std::size_t count = len / sizeof(unsigned);
	std::vector<unsigned> host(count);
	cudaPointerAttributes what;

	CUDA(cudaPointerGetAttributes(&what, p));
	CHECK(what.type == cudaMemoryTypeDevice && what.device == 0);
	CHECK(wrong(p, count, first) == 0);
	CUDA(cudaMemcpy(host.data(), p, len, cudaMemcpyDeviceToHost));
	CHECK(host == numbers(count, first));
	CUDA(cudaMemcpy(p, numbers(count, 1000).data(), len, cudaMemcpyHostToDevice));
	CHECK(wrong(p, count, 1000) == 0);
	CHECK(gaia_mrelease(p, len, 0) == 0);
	CHECK(home(fd, off / 4) == 1000 && home(fd, (off + len) / 4 - 1) == 1000 + count - 1);
	CHECK(home(fd, off / 4 - 1) == first - 1 && home(fd, (off + len) / 4) == first + count);
	CUDA(cudaMemset(p, 0xff, page));
	CUDA(cudaMemcpy(p + 2048, p, page, cudaMemcpyDeviceToDevice));
	CUDA(cudaDeviceSynchronize());
	CHECK(gaia_munmap(p, len) == 0);
	CHECK(home(fd, off / 4) == 0xffffffff && home(fd, off / 4 + 2048) == 0xffffffff &&
		home(fd, off / 4 + 1024) == 1000 + 1024);
	CHECK(gaia_macquire(p, 1, 0) == -1);
}

/* Extents in more than one frame. */
static void many_extents(const std::string &dir)
{
	const std::size_t len = 600 * MiB;
	int fd = make(dir + "/many", 1024);
	unsigned *small = map(fd, page); /* fixes the size of the file's extents: small ones */

	CHECK(ftruncate(fd, static_cast<off_t>(len)) == 0);
	unsigned *p = map(fd, len - page, PROT_READ | PROT_WRITE, page);
	const std::size_t count = (len - page) / sizeof(unsigned);
	fill<<<1024, 256>>>(p, count, 5);
	finish();
	CHECK(gaia_mrelease(p, len - page, 0) == 0);
	for (std::size_t i = 0; i < count; i += 500009)
		CHECK(home(fd, 1024 + i) == 5 + i);
	CHECK(gaia_munmap(p, len - page) == 0);
	CHECK(gaia_munmap(small, page) == 0);
}

/* A store into a read-only mapping is an error of this process only. The file stays unchanged. */
static void read_only(const std::string &dir)
{
	int fd = make(dir + "/read-only", 1024, 3);
	unsigned *p = map(fd, page, PROT_READ);

	CHECK(wrong(p, 1024, 3) == 0);
	CHECK(gaia_mrelease(p, page, 0) == 0);
	store<<<1, 1>>>(p, 99);
	CHECK(cudaGetLastError() == cudaSuccess);
	CHECK(cudaDeviceSynchronize() != cudaSuccess);
	/* The context is useless now, but nothing hangs. */
	(void)gaia_munmap(p, page);
	CHECK(home(fd, 0) == 3);
	std::_Exit(0);
}

/* Numbers at arbitrary places of the file, aligned in a view. An acquire brings what the CPU wrote and the device
 * released. */
static void views(const std::string &dir)
{
	const std::size_t n = 10 * MiB / sizeof(unsigned), count = n - 5, size = sizeof(unsigned), stride = 1000;
	const std::string path = dir + "/views";
	int fd = make(path, n);
	gaiafs::view v(path, { { 5 * size, count * size }, { 7 * size, size, stride * size, 100 }, { n * size, 64 } });
	gaiafs::mapping<unsigned> m(path);
	std::vector<unsigned> rows(100);

	CHECK(reinterpret_cast<std::uintptr_t>(v.data()) % 256 == 0 && v.offset(1) % 256 == 0 && v.offset(2) % 256 == 0);
	CHECK(wrong(v.at<unsigned>(0), count, 5) == 0);
	CUDA(cudaMemcpy(rows.data(), v.at<unsigned>(1), v.length(1), cudaMemcpyDeviceToHost));
	for (std::size_t i = 0; i < rows.size(); i++)
		CHECK(rows[i] == 7 + i * stride);
	CHECK(peek(v.at<unsigned>(2)) == 0 && peek(v.at<unsigned>(2) + 15) == 0);

	set_home(fd, 7 + 3 * stride, 33);
	v.acquire_segment(1);
	CHECK(peek(v.at<unsigned>(1) + 3) == 33 && peek(v.at<unsigned>(1) + 4) == 7 + 4 * stride);
	fill<<<256, 256>>>(m.data(), n, 1000);
	m.release_async(nullptr);
	v.acquire_async(nullptr);
	CHECK(wrong(v.at<unsigned>(0), count, 1005) == 0);
	CHECK(peek(v.at<unsigned>(1) + 99) == 1000 + 7 + 99 * stride);
	v.check_async();
	v.close();
	m.close();
	CHECK(home(fd, n - 1) == 1000 + n - 1);
	close(fd);
}

/* A context of the device that is not the primary one, and a thread without a context. */
static void own_context(const std::string &dir)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned) = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
	int (*create)(void **, unsigned, int) = reinterpret_cast<int (*)(void **, unsigned, int)>(dlsym(library, "cuCtxCreate_v2"));
	int (*current)(void **) = reinterpret_cast<int (*)(void **)>(dlsym(library, "cuCtxGetCurrent"));
	int fd = make(dir + "/own-context", 1024, 3);
	void *own = nullptr, *now = nullptr;

	CHECK(init != nullptr && create != nullptr && current != nullptr);
	CHECK(init(0) == 0 && create(&own, 0, 0) == 0);
	unsigned *p = map(fd, page);
	CHECK(current(&now) == 0 && now == own);
	CHECK(wrong(p, 1024, 3) == 0);
	store<<<1, 1>>>(p, 98);
	CHECK(gaia_mrelease_async(p, page, 0, nullptr) == 0); /* the default stream of that context */
	finish();
	CHECK(home(fd, 0) == 98);
	std::thread([&] { /* this thread has no context */
		CHECK(gaia_munmap(p, page) == 0);
		void *none = own;
		CHECK(current(&none) == 0 && none == nullptr);
	}).join();
	CHECK(current(&now) == 0 && now == own);
}

static void forks(const std::string &dir)
{
	int fd = make(dir + "/forks", 1024, 3), status;
	unsigned *p = map(fd, page);
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		FAILS(gaia_macquire(p, 1, 0), ECHILD);
		FAILS(gaia_mrelease_async(p, 1, 0, nullptr), ECHILD);
		CHECK(gaia_munmap(p, page) == 0);
		CHECK(gaia_mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, 0, 0) == MAP_FAILED && errno == ENODEV);
		CHECK(std::strstr(gaia_error(), "fork") != nullptr);
		std::_Exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	store<<<1, 1>>>(p, 97);
	finish();
	CHECK(gaia_mrelease(p, page, 0) == 0 && home(fd, 0) == 97);
	CHECK(gaia_munmap(p, page) == 0);
}

/* A file that shrinks while it is mapped keeps the bytes before its new end, and nothing faults. */
static void shrinks(const std::string &dir)
{
	const std::size_t len = 8 * MiB;
	int fd = make(dir + "/shrinks", len / 4, 3);
	unsigned *p = map(fd, len);

	CHECK(ftruncate(fd, static_cast<off_t>(page)) == 0);
	fill<<<256, 256>>>(p, len / 4, 40);
	finish();
	CHECK(gaia_mrelease(p, len, 0) == 0);
	struct stat st;
	CHECK(fstat(fd, &st) == 0 && st.st_size == static_cast<off_t>(page));
	CHECK(home(fd, 0) == 40 && home(fd, 1023) == 40 + 1023);
	CHECK(ftruncate(fd, static_cast<off_t>(len)) == 0);
	CHECK(home(fd, 1024) == 0 && home(fd, len / 4 - 1) == 0);
	CHECK(gaia_macquire(p, len, 0) == 0);
	CHECK(peek(p + 1023) == 40 + 1023);
	CHECK(gaia_munmap(p, len) == 0);
	CHECK(home(fd, 0) == 40);
}

/* Releases and acquires work while a kernel runs. */
static void while_running(const std::string &dir)
{
	int fd = make(dir + "/while-running", 2048, 3);
	unsigned *p = map(fd, 2 * page);
	volatile int *flags = make_flags();

	hold<<<1, 1>>>(p, 77, flags);
	CUDA(cudaGetLastError());
	while (flags[0] == 0)
		std::this_thread::yield();
	CHECK(home(fd, 0) == 3);
	struct gaia_call call = {}; /* gaia_mrelease would wait for the kernel */
	CHECK(gaia_start(&call, GAIA_DO_RELEASE, p, page, 0, GAIA_NO_STREAM) == 0);
	CHECK(gaia_wait(&call, -1) == 0);
	CHECK(home(fd, 0) == 77);
	CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady); /* it runs all the while */
	(void)cudaGetLastError();                             /* which that is not */
	flags[1] = 1;
	finish();

	flags[0] = flags[1] = 0;
	await<<<1, 1>>>(p + 1024, 4711, flags);
	CUDA(cudaGetLastError());
	while (flags[0] == 0)
		std::this_thread::yield();
	set_home(fd, 1024, 4711);
	CHECK(gaia_macquire(p + 1024, page, 0) == 0);
	for (int i = 0; i < 20000 && flags[2] == 0; i++)
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	flags[1] = 1; /* ends a kernel that never saw it, and the check fails */
	finish();
	CHECK(flags[2] == 1);
	CHECK(gaia_munmap(p, 2 * page) == 0);
}

/* Stream order, with kernels. */
static void stream_order(const std::string &dir)
{
	int fd = make(dir + "/stream-order", 1024, 3);
	unsigned *p = map(fd, page);
	volatile int *flags = make_flags();
	cudaStream_t s;

	CUDA(cudaStreamCreate(&s));
	hold<<<1, 1, 0, s>>>(p, 77, flags);
	CHECK(gaia_mrelease_async(p, page, 0, s) == 0);
	CHECK(gaia_macquire_async(p, page, 0, s) == 0);
	increase<<<1, 1, 0, s>>>(p + 5, 1000);
	CHECK(gaia_mrelease_async(p, page, 0, s) == 0);
	while (flags[0] == 0)
		std::this_thread::yield();
	CHECK(home(fd, 0) == 3); /* the kernel still runs, so the release has not begun */
	set_home(fd, 5, 50);
	flags[1] = 1;
	CUDA(cudaStreamSynchronize(s));
	CHECK(gaia_async_error(p) == 0);
	CHECK(home(fd, 0) == 77);
	CHECK(home(fd, 5) == 1050); /* acquired before the second kernel, and released after it */

	/* The default streams. */
	for (cudaStream_t which : { static_cast<cudaStream_t>(nullptr), cudaStreamLegacy, cudaStreamPerThread }) {
		store<<<1, 1, 0, which>>>(p + 6, 60 + static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(which)));
		CHECK(gaia_mrelease_async(p, page, 0, which) == 0);
		CUDA(cudaStreamSynchronize(which));
		CHECK(home(fd, 6) == 60 + reinterpret_cast<std::uintptr_t>(which));
	}

	/* munmap waits for queued calls. */
	flags[0] = flags[1] = 0;
	hold<<<1, 1, 0, s>>>(p, 78, flags);
	CHECK(gaia_mrelease_async(p, page, 0, s) == 0);
	std::atomic<bool> unmapped{false};
	std::thread t([&] {
		CHECK(gaia_munmap(p, page) == 0);
		unmapped = true;
	});
	while (flags[0] == 0)
		std::this_thread::yield();
	for (int i = 0; i < 100; i++) {
		CHECK(!unmapped);
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	}
	flags[1] = 1;
	t.join();
	CHECK(home(fd, 0) == 78);
	CUDA(cudaStreamDestroy(s));
}

/* A graph acquires and releases each time that it runs. */
static void graphs(const std::string &dir)
{
	int fd = make(dir + "/graphs", 2048, 3);
	unsigned *p = map(fd, page), *q;
	cudaStream_t s;
	cudaGraph_t graph;
	cudaGraphExec_t exec, late;

	CUDA(cudaStreamCreate(&s));
	CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
	CHECK(gaia_macquire_async(p, page, 0, s) == 0);
	increase<<<1, 1, 0, s>>>(p, 1000);
	CHECK(gaia_mrelease_async(p, page, 0, s) == 0);
	q = map(fd, page, PROT_READ | PROT_WRITE, page); /* does not end the capture */
	CUDA(cudaStreamEndCapture(s, &graph));
	CHECK(home(fd, 0) == 3); /* nothing was done yet */
	CUDA(cudaGraphInstantiate(&exec, graph, 0));
	CUDA(cudaGraphDestroy(graph));
	for (unsigned i = 0; i < 20; i++) {
		set_home(fd, 0, i);
		CUDA(cudaGraphLaunch(exec, s));
		CUDA(cudaStreamSynchronize(s));
		CHECK(gaia_async_error(p) == 0);
		CHECK(home(fd, 0) == i + 1000);
	}

	/* A graph may be launched after its mapping has gone. That is an error, and it is reported. */
	CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	CHECK(gaia_mrelease_async(q, page, 0, s) == 0);
	CUDA(cudaStreamEndCapture(s, &graph));
	CUDA(cudaGraphInstantiate(&late, graph, 0));
	CUDA(cudaGraphDestroy(graph));
	CHECK(gaia_munmap(q, page) == 0); /* a graph that does not run keeps no mapping */
	CHECK(gaia_async_error(nullptr) == 0);
	CUDA(cudaGraphLaunch(late, s));
	CUDA(cudaStreamSynchronize(s));
	FAILS(gaia_async_error(nullptr), ENOMEM);
	CHECK(gaia_async_error(nullptr) == 0);
	CUDA(cudaGraphExecDestroy(late));
	CUDA(cudaGraphExecDestroy(exec));
	CHECK(gaia_munmap(p, page) == 0);
	CUDA(cudaStreamDestroy(s));
}

/* After a kernel faults, the calls queued behind it never run: munmap does not hang, and reports it. */
static void lost_context(const std::string &dir)
{
	int fd = make(dir + "/lost-context", 1024, 3);
	unsigned *p = map(fd, page);
	volatile int *flags = make_flags();

	store_where_flag<<<1, 1>>>(reinterpret_cast<unsigned *>(16), flags);
	CHECK(gaia_mrelease_async(p, page, 0, nullptr) == 0);
	flags[1] = 1;
	CHECK(cudaDeviceSynchronize() != cudaSuccess);
	FAILS(gaia_munmap(p, page), EIO);
	std::printf("%s\n", gaia_error());
	CHECK(home(fd, 0) == 3);
	std::_Exit(0);
}

/* A mapping larger than the device moves. A bracket of all of it is refused with a message, and leaves room for one
that
 * fits. */
static void too_large(const std::string &dir)
{
	int fd = make(dir + "/too-large", 1024, 3);

	CHECK(ftruncate(fd, static_cast<off_t>(1) << 42) == 0);
	for (int i = 0; i < 3; i++) {
		void *all = gaia_mmap(nullptr, std::size_t(1) << 42, PROT_READ, MAP_SHARED, fd, 0, 0);
		struct gaia_range whole = { all, std::uint64_t(1) << 42 }, first = { all, page };

		CHECK(all != MAP_FAILED);
		FAILS(gaia_use(&whole, 1, nullptr), ENOMEM);
		CHECK(gaia_error()[0] != '\0');
		CHECK(gaia_use(&first, 1, nullptr) == 0 && wrong(static_cast<unsigned *>(all), 1024, 3) == 0);
		CHECK(gaia_done(nullptr) == 0 && gaia_munmap(all, std::size_t(1) << 42) == 0);
	}
	unsigned *p = map(fd, page);
	CHECK(wrong(p, 1024, 3) == 0);
	CHECK(gaia_munmap(p, page) == 0);
	CHECK(unlink((dir + "/too-large").c_str()) == 0);
}

/* Hundreds of views of one file use the memory of one. Each has a descriptor. */
static void many_mappings(const std::string &dir)
{
	const std::size_t len = 16 * MiB;
	int fd = make(dir + "/many-mappings", len / 4, 3);
	std::vector<unsigned *> all;
	std::size_t before, after, total;

	all.push_back(map(fd, len));
	CUDA(cudaMemGetInfo(&before, &total));
	for (int i = 1; i < 500; i++)
		all.push_back(map(fd, len, i % 2 == 0 ? PROT_READ : PROT_READ | PROT_WRITE));
	CUDA(cudaMemGetInfo(&after, &total));
	CHECK(before < after + 256 * MiB); /* page tables, not 8 GB */
	store<<<1, 1>>>(all[1], 55);
	finish();
	for (unsigned *p : all) {
		CHECK(peek(p) == 55);
		CHECK(gaia_munmap(p, len) == 0);
	}
	CHECK(home(fd, 0) == 55);
}

/* A second process that maps a file uses no additional memory, and sees the first one's stores at once. */
static void sharing(const std::string &dir)
{
	const std::size_t len = 512 * MiB;
	const std::string path = dir + "/sharing";
	int to[2], from[2], status;
	std::size_t before, after, total;
	char c = 0;

	write_file(path, numbers(len / 4, 9));
	CHECK(pipe(to) == 0 && pipe(from) == 0);
	pid_t child = fork(); /* before CUDA */
	CHECK(child >= 0);
	if (child == 0) {
		close(to[1]);
		close(from[0]);
		CUDA(cudaSetDevice(0));
		(void)wrong(nullptr, 0, 0); /* loads the kernels */
		CHECK(write(from[1], "r", 1) == 1 && read(to[0], &c, 1) == 1);
		int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
		unsigned *p = map(fd, len, PROT_READ);
		CHECK(wrong(p + 1, len / 4 - 1, 10) == 0);
		CHECK(peek(p) == 4242);
		CHECK(write(from[1], "m", 1) == 1 && read(to[0], &c, 1) == 1);
		CHECK(gaia_munmap(p, len) == 0);
		std::_Exit(0);
	}
	close(to[0]);
	close(from[1]);
	CUDA(cudaSetDevice(0));
	int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
	unsigned *p = map(fd, len);
	store<<<1, 1>>>(p, 4242);
	finish();
	CHECK(read(from[0], &c, 1) == 1 && c == 'r');
	CUDA(cudaMemGetInfo(&before, &total));
	CHECK(write(to[1], "m", 1) == 1);
	CHECK(read(from[0], &c, 1) == 1 && c == 'm');
	CUDA(cudaMemGetInfo(&after, &total));
	std::printf("%zu MiB mapped by a second process: %.1f MiB less free\n", len / MiB,
		    (static_cast<double>(before) - static_cast<double>(after)) / static_cast<double>(MiB));
	CHECK(before < after + 32 * MiB);
	CHECK(write(to[1], "e", 1) == 1);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(gaia_munmap(p, len) == 0);
}

/* Two GPUs, with contexts and streams of the other one. The mount has both. */
static void two_gpus(const std::string &dir)
{
	int fd = make(dir + "/two", 1024, 3), now = -1;
	cudaStream_t other;

	if (gpus() < 2)
		skip("needs two GPUs");
	CUDA(cudaSetDevice(1));
	CUDA(cudaStreamCreate(&other));
	unsigned *p = map(fd, page), *q = map(fd, page, PROT_READ | PROT_WRITE, 0, MAP_SHARED, 1);
	CUDA(cudaGetDevice(&now));
	CHECK(now == 1);
	FAILS(gaia_mrelease_async(p, page, 0, other), EINVAL);
	CHECK(std::strstr(gaia_error(), "device 1") != nullptr);
	CHECK(gaia_async_error(p) == 0);
	store<<<1, 1, 0, other>>>(q, 31);
	CHECK(gaia_mrelease_async(q, page, 1, other) == 0);
	CUDA(cudaStreamSynchronize(other));
	CHECK(home(fd, 0) == 31);
	CHECK(gaia_macquire_async(p, page, 0, nullptr) == 0); /* device 0's default stream, from device 1's context */
	CUDA(cudaSetDevice(0));
	CUDA(cudaStreamSynchronize(nullptr));
	CHECK(peek(p) == 31);
	/* Both GPUs write one page. */
	store<<<1, 1>>>(p + 10, 100);
	finish();
	CUDA(cudaSetDevice(1));
	store<<<1, 1>>>(q + 20, 200);
	finish();
	CHECK(gaia_mrelease(p, page, 0) == 0 && gaia_mrelease(q, page, 1) == 0);
	CHECK(home(fd, 10) == 100 && home(fd, 20) == 200 && home(fd, 30) == 33);
	/* A kernel of GPU 1 stores into GPU 0's memory, if it can reach that, and GPU 0 releases it. */
	gaia_map_args a{};
	int reaches = 0;
	a.length = page;
	a.flags = GAIA_MAP_PEERS;
	a.fd = fd;
	a.prot = PROT_READ | PROT_WRITE;
	a.kind = GAIA_KIND_CUDA;
	unsigned *shared = static_cast<unsigned *>(gaia_map(&a, sizeof a));
	CHECK(shared != MAP_FAILED);
	CUDA(cudaDeviceCanAccessPeer(&reaches, 1, 0));
	if (reaches) {
		store<<<1, 1>>>(shared + 40, 400);
		finish();
		CHECK(gaia_mrelease(shared, page, 0) == 0 && home(fd, 40) == 400);
	}
	CHECK(gaia_munmap(shared, page) == 0);
	CHECK(gaia_munmap(p, page) == 0 && gaia_munmap(q, page) == 0);
}

/* With CUDA_VISIBLE_DEVICES=1, device 0 of this process is the mount's GPU 1, and there is no device 1. */
static void visible(const std::string &dir)
{
	int fd = make(dir + "/visible", 1024, 3);

	if (gpus() != 1)
		skip("needs two GPUs and CUDA_VISIBLE_DEVICES=1");
	unsigned *p = map(fd, page);
	CHECK(wrong(p, 1024, 3) == 0);
	CHECK(gaia_munmap(p, page) == 0);
	CHECK(gaia_mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, 0, 1) == MAP_FAILED && errno == ENODEV);
	CHECK(std::strstr(gaia_error(), "CUDA_VISIBLE_DEVICES=1") != nullptr);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(const std::string &dir);
	} scenarios[] = {
		{ "pointer", pointer },
		{ "many-extents", many_extents },
		{ "read-only", read_only },
		{ "views", views },
		{ "own-context", own_context },
		{ "forks", forks },
		{ "shrinks", shrinks },
		{ "while-running", while_running },
		{ "stream-order", stream_order },
		{ "graphs", graphs },
		{ "lost-context", lost_context },
		{ "too-large", too_large },
		{ "many-mappings", many_mappings },
		{ "sharing", sharing },
		{ "two-gpus", two_gpus },
		{ "visible", visible },
	};

	/* Load the kernels now: loading at the first launch would wait for a kernel that waits for this process. */
	setenv("CUDA_MODULE_LOADING", "EAGER", 1);
	if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
		for (const auto &s : scenarios)
			std::puts(s.name);
		return 0;
	}
	for (const auto &s : scenarios)
		if (argc == 3 && std::strcmp(argv[1], s.name) == 0)
			try {
				s.run(argv[2]);
				return 0;
			} catch (const std::exception &e) {
				std::fprintf(stderr, "%s: %s, \"%s\"\n", s.name, e.what(), gaia_error());
				return 1;
			}
	std::fprintf(stderr, "usage: %s SCENARIO FOLDER, or --list\n", argv[0]);
	return 2;
}
