// What GPU programs of the bench do. `make bench-ptx` compiles this file into kernels.ptx, which the program embeds.
//
// Stores are single bytes, each through volatile, so that the compiler cannot make one store of neighbours: a wider
// one would write what belongs to another writer of the page.

typedef unsigned char u8;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 threads() { return (u64)gridDim.x * blockDim.x; }

// bench_touch adds value to n bytes, the first at address and each step bytes after the one before.
extern "C" __global__ void bench_touch(u64 address, u64 step, u64 n, u64 value)
{
	for (u64 i = thread(); i < n; i += threads()) {
		volatile u8 *byte = (volatile u8 *)(address + i * step);
		*byte = (u8)(*byte + value);
	}
}

// bench_stripes stores every writers-th stripe of the n bytes at address, from stripe `first` on. A stripe is `width`
// bytes. What byte i gets depends on i and seed only, and changes with every seed.
extern "C" __global__ void bench_stripes(u64 address, u64 n, u64 width, u64 first, u64 writers, u64 seed)
{
	u64 stripes = (n + width - 1) / width;
	u64 own = stripes > first ? (stripes - first + writers - 1) / writers : 0;
	for (u64 k = thread(); k < own * width; k += threads()) {
		u64 i = (first + k / width * writers) * width + k % width;
		if (i < n) {
			*(volatile u8 *)(address + i) = (u8)((i ^ i >> 8 ^ i >> 16) + seed);
		}
	}
}
