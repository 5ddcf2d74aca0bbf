/*
 * What memory that moves costs: kernels that each use one block of a file, in brackets, over a movable mapping.
 *
 *   moving make FILE SIZE
 *   moving run FILE SIZE KIND ORDER ACCESSES PASSES
 *   moving check FILE SIZE ACCESSES
 *
 * SIZE is in MiB. KIND is movable, mapping (it stays where it is), copy (in memory of its own), pinned (of the host,
 * which kernels reach over the bus) or managed. ORDER is stream, random, or skewed: of ten accesses nine go to a tenth
 * of the blocks. A kernel reads its block PASSES times. "run" prints one line: kind, order, seconds, GB/s of what
 * kernels read, microseconds of a gaia_use and of a gaia_done, and fails where a sum is wrong. "check" has kernels
 * store in blocks at random and compares the file with what is expected. RANGES=2 in the environment has brackets of
 * two halves of a block, which the library does not keep, so that each asks the daemon.
 */
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>

#include "gaiafs.h"

static const size_t BLOCK = 32 << 20, WORDS = BLOCK / 8, PAGE_WORDS = 512;

#define CHECK(ok) \
	do { \
		if (!(ok)) { \
			fprintf(stderr, "moving: line %d: %s: %s; %s\n", __LINE__, #ok, strerror(errno), gaia_error()); \
			exit(1); \
		} \
	} while (0)
#define CUDA(call) \
	do { \
		cudaError_t e_ = (call); \
		if (e_ != cudaSuccess) { \
			fprintf(stderr, "moving: line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(e_)); \
			exit(1); \
		} \
	} while (0)

__host__ __device__ static uint64_t word(uint64_t i)
{
	i *= 0x9e3779b97f4a7c15u;
	return i ^ i >> 29;
}

__device__ static uint64_t warp_sum(uint64_t v)
{
	for (int d = 16; d > 0; d /= 2)
		v += __shfl_down_sync(0xffffffffu, v, d);
	return v;
}

/* sum adds up a block, as often as it is told, into out. */
__global__ void sum(const ulonglong2 *block, int passes, unsigned long long *out)
{
	uint64_t total = 0;

	for (int pass = 0; pass < passes; pass++)
		for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < WORDS / 2;
			i += size_t(gridDim.x) * blockDim.x) {
			ulonglong2 w = __ldcv(block + i);

			total += w.x + w.y;
		}
	total = warp_sum(total);
	if (threadIdx.x % 32 == 0)
		atomicAdd(out, static_cast<unsigned long long>(total));
}

/* expect adds up what a block should have. */
__global__ void expect(size_t from, unsigned long long *out)
{
	uint64_t total = 0;

	for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < WORDS; i += size_t(gridDim.x) * blockDim.x)
		total += word(from + i);
	total = warp_sum(total);
	if (threadIdx.x % 32 == 0)
		atomicAdd(out, static_cast<unsigned long long>(total));
}

/* add increments the first word of each page of a block. */
__global__ void add(unsigned long long *block)
{
	size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;

	if (i < WORDS / PAGE_WORDS)
		block[i * PAGE_WORDS]++;
}

static double now()
{
	using namespace std::chrono;
	return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static void make(const char *path, size_t size)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	std::vector<uint64_t> block(WORDS);
	for (size_t b = 0; b < size / BLOCK; b++) {
		for (size_t i = 0; i < WORDS; i++)
			block[i] = word(b * WORDS + i);
		CHECK(write(fd, block.data(), BLOCK) == ssize_t(BLOCK));
	}
	close(fd);
}

static void read_all(int fd, uint8_t *to, size_t size)
{
	for (size_t at = 0; at < size;) {
		ssize_t n = pread(fd, to + at, std::min(size - at, size_t(64) << 20), off_t(at));

		CHECK(n > 0);
		at += size_t(n);
	}
}

/* memory returns where kernels find the file. */
static uint8_t *memory(const std::string &kind, int fd, size_t size)
{
	void *p, *host;

	if (kind == "movable" || kind == "mapping") {
		p = gaia_mmap(nullptr, size, PROT_READ, MAP_SHARED | (kind == "movable" ? GAIA_MOVABLE : 0), fd, 0, 0);
		CHECK(p != MAP_FAILED);
		return static_cast<uint8_t *>(p);
	}
	if (kind == "managed") {
		CUDA(cudaMallocManaged(&p, size));
		read_all(fd, static_cast<uint8_t *>(p), size);
		return static_cast<uint8_t *>(p);
	}
	CUDA(cudaHostAlloc(&host, size, cudaHostAllocMapped));
	read_all(fd, static_cast<uint8_t *>(host), size);
	if (kind == "pinned") {
		CUDA(cudaHostGetDevicePointer(&p, host, 0));
		return static_cast<uint8_t *>(p);
	}
	CHECK(kind == "copy");
	CUDA(cudaMalloc(&p, size));
	CUDA(cudaMemcpy(p, host, size, cudaMemcpyHostToDevice));
	CUDA(cudaFreeHost(host));
	return static_cast<uint8_t *>(p);
}

static std::vector<size_t> order_of(const std::string &order, size_t blocks, size_t accesses)
{
	std::mt19937_64 r(7);
	std::vector<size_t> list(accesses), shuffled(blocks);
	size_t hot = std::max(blocks / 10, size_t(1));

	for (size_t i = 0; i < blocks; i++)
		shuffled[i] = i;
	std::shuffle(shuffled.begin(), shuffled.end(), r);
	for (size_t i = 0; i < accesses; i++)
		if (order == "stream")
			list[i] = i % blocks;
		else if (order == "random")
			list[i] = r() % blocks;
		else
			list[i] = shuffled[r() % 10 != 0 ? r() % hot : r() % blocks];
	return list;
}

static void run(
	const char *path, size_t size, const std::string &kind, const std::string &order, size_t accesses, int passes)
{
	int fd = open(path, O_RDONLY);
	size_t blocks = size / BLOCK, ranges = getenv("RANGES") != nullptr ? strtoull(getenv("RANGES"), nullptr, 10) : 1;
	unsigned long long *out;
	std::vector<unsigned long long> got(accesses + blocks);
	double using_it = 0, done = 0;
	cudaStream_t stream;

	CHECK(fd >= 0);
	CUDA(cudaSetDevice(0));
	CUDA(cudaStreamCreate(&stream));
	CUDA(cudaMalloc(&out, got.size() * sizeof *out));
	CUDA(cudaMemset(out, 0, got.size() * sizeof *out));
	for (size_t b = 0; b < blocks; b++)
		expect<<<264, 512, 0, stream>>>(b * WORDS, out + accesses + b);
	uint8_t *p = memory(kind, fd, size);
	CUDA(cudaDeviceSynchronize());
	std::vector<size_t> list = order_of(order, blocks, 2 * accesses);
	/* The first half is not measured: it brings what is used most to where it will be. */
	double begin = 0;
	for (size_t i = 0; i < 2 * accesses; i++) {
		if (i == accesses) {
			CUDA(cudaStreamSynchronize(stream));
			CUDA(cudaMemset(out, 0, accesses * sizeof *out));
			using_it = done = 0;
			begin = now();
		}
		uint8_t *block = p + list[i] * BLOCK;
		std::vector<gaia_range> r;
		for (size_t k = 0; k < ranges; k++)
			r.push_back({ block + k * (BLOCK / ranges), BLOCK / ranges });
		double t = now();
		if (kind == "movable")
			CHECK(gaia_use(r.data(), r.size(), stream) == 0);
		using_it += now() - t;
		sum<<<264, 512, 0, stream>>>(reinterpret_cast<const ulonglong2 *>(block), passes, out + i % accesses);
		CUDA(cudaGetLastError());
		t = now();
		if (kind == "movable")
			CHECK(gaia_done(stream) == 0);
		done += now() - t;
		if (kind != "movable" && i % 64 == 63)
			CUDA(cudaStreamSynchronize(stream));
	}
	CUDA(cudaStreamSynchronize(stream));
	double seconds = now() - begin;
	CUDA(cudaMemcpy(got.data(), out, got.size() * sizeof *out, cudaMemcpyDeviceToHost));
	size_t wrong = 0;
	for (size_t i = 0; i < accesses; i++)
		wrong += got[i] != got[accesses + list[accesses + i]] * passes;
	printf("%-8s %-7s %8.3f s %8.1f GB/s use %7.1f us done %6.1f us wrong %zu\n", kind.c_str(), order.c_str(), seconds,
	       double(accesses) * BLOCK * passes / seconds / 1e9, using_it / accesses * 1e6, done / accesses * 1e6, wrong);
	if (wrong != 0)
		exit(1);
	if (kind == "movable" || kind == "mapping")
		CHECK(gaia_munmap(p, size) == 0);
}

static void check(const char *path, size_t size, size_t accesses)
{
	int fd = open(path, O_RDWR);
	size_t blocks = size / BLOCK, wrong = 0;
	std::vector<uint64_t> added(blocks), block(WORDS);
	cudaStream_t stream;

	CHECK(fd >= 0);
	CUDA(cudaSetDevice(0));
	CUDA(cudaStreamCreate(&stream));
	uint8_t *p =
		static_cast<uint8_t *>(gaia_mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | GAIA_MOVABLE, fd, 0, 0));
	CHECK(p != MAP_FAILED);
	for (size_t b : order_of("random", blocks, accesses)) {
		struct gaia_range r = { p + b * BLOCK, BLOCK };

		CHECK(gaia_use(&r, 1, stream) == 0);
		add<<<WORDS / PAGE_WORDS / 256 + 1, 256, 0, stream>>>(reinterpret_cast<unsigned long long *>(p + b * BLOCK));
		CUDA(cudaGetLastError());
		CHECK(gaia_done(stream) == 0);
		added[b]++;
	}
	CUDA(cudaStreamSynchronize(stream));
	CHECK(gaia_msync(p, size, MS_SYNC) == 0);
	for (size_t b = 0; b < blocks; b++) {
		CHECK(pread(fd, block.data(), BLOCK, off_t(b * BLOCK)) == ssize_t(BLOCK));
		for (size_t i = 0; i < WORDS; i++)
			wrong += block[i] != word(b * WORDS + i) + (i % PAGE_WORDS == 0 ? added[b] : 0);
	}
	printf("check: %zu brackets, %zu words wrong\n", accesses, wrong);
	CHECK(gaia_munmap(p, size) == 0);
	if (wrong != 0)
		exit(1);
}

int main(int argc, char **argv)
{
	const std::string what = argc > 3 ? argv[1] : "";

	if (what == "make" && argc == 4)
		make(argv[2], strtoull(argv[3], nullptr, 10) << 20);
	else if (what == "run" && argc == 8)
		run(argv[2], strtoull(argv[3], nullptr, 10) << 20, argv[4], argv[5], strtoull(argv[6], nullptr, 10),
			atoi(argv[7]));
	else if (what == "check" && argc == 5)
		check(argv[2], strtoull(argv[3], nullptr, 10) << 20, strtoull(argv[4], nullptr, 10));
	else
		return fprintf(stderr, "moving make FILE MIB | run FILE MIB KIND ORDER ACCESSES PASSES | check FILE MIB ACCESSES\n"), 2;
}
