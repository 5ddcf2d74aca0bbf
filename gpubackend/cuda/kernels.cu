// The page kernels of gaiafs. `make ptx` compiles this file into kernels.ptx, which the program embeds.
//
// Programs of other processes may be storing into the pages while a kernel reads them. Every word of a page is
// therefore loaded once, by a load that the compiler can neither repeat nor drop and that no L1 cache answers.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A run is pages side by side in memory. Its first page has number `first` among the pages of the call.
struct Run {
	u64 address;
	u64 first;
};

constexpr u32 pageShift = 12;
constexpr u32 laneWords = 16;  // the words of a page that one lane of a warp works on
constexpr u64 foldPrime = (1ull << 61) - 1;

static __device__ __forceinline__ void loadPair(u64 address, u64 &a, u64 &b)
{
	asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(address));
}

// addFold returns a+b mod foldPrime, for a and b up to it.
static __device__ __forceinline__ u64 addFold(u64 a, u64 b)
{
	u64 s = a + b;
	return s >= foldPrime ? s - foldPrime : s;
}

// mulFold returns a·b mod foldPrime, for a and b below it.
static __device__ __forceinline__ u64 mulFold(u64 a, u64 b)
{
	u64 lo = a * b, hi = __umul64hi(a, b);
	return addFold(lo & foldPrime, hi << 3 | lo >> 61);
}

// findPage returns the address of page number `page` of the call: in the last run that does not begin after it.
static __device__ __forceinline__ u64 findPage(const Run *runs, u32 count, u64 page)
{
	u32 low = 0;
	while (count > 1) {
		u32 half = count / 2;
		if (runs[low + half].first <= page) {
			low += half;
			count -= half;
		} else {
			count = half;
		}
	}
	return runs[low].address + ((page - runs[low].first) << pageShift);
}

// In the kernels of digests one warp works on a page. Word pair i*32+lane of it is lane's, so that a warp loads 512
// bytes at a time, and a lane has its words of the key in registers for all pages that its warp comes to.

// loadWords loads lane's words of a page.
static __device__ __forceinline__ void loadWords(u64 page, u32 lane, u64 (&word)[laneWords])
{
#pragma unroll
	for (u32 i = 0; i < laneWords / 2; i++) {
		loadPair(page + (i * 32 + lane) * 16, word[2 * i], word[2 * i + 1]);
	}
}

struct Digester {
	u64 key[laneWords];
	u64 fold[3];

	__device__ __forceinline__ void load(const u64 *words, u32 lane)
	{
#pragma unroll
		for (u32 i = 0; i < laneWords / 2; i++) {
			key[2 * i] = words[2 * (i * 32 + lane)];
			key[2 * i + 1] = words[2 * (i * 32 + lane) + 1];
		}
#pragma unroll
		for (u32 i = 0; i < 3; i++) {
			fold[i] = words[512 + i];
		}
	}

	// sum returns the page's digest to every lane of the warp.
	__device__ __forceinline__ u64 sum(u64 page, u32 lane) const
	{
		u64 word[laneWords];
		loadWords(page, lane, word);
		return sum(word);
	}

	// sum of words is that of a page of which each lane has its words.
	__device__ __forceinline__ u64 sum(const u64 (&word)[laneWords]) const
	{
		u64 hi = 0, lo = 0;
#pragma unroll
		for (u32 i = 0; i < laneWords; i += 2) {
			u64 a = word[i] + key[i], b = word[i + 1] + key[i + 1];
			u64 l = a * b;
			lo += l;
			hi += __umul64hi(a, b) + (lo < l);
		}
		// Sums modulo 2^128 may be added in any order.
#pragma unroll
		for (u32 step = 16; step > 0; step /= 2) {
			u64 l = __shfl_xor_sync(0xffffffff, lo, step);
			u64 h = __shfl_xor_sync(0xffffffff, hi, step);
			lo += l;
			hi += h + (lo < l);
		}
		const u64 low60 = (1ull << 60) - 1;
		u64 s = mulFold(fold[0], lo & low60);
		s = addFold(s, mulFold(fold[1], (hi << 4 | lo >> 60) & low60));
		return addFold(s, mulFold(fold[2], hi >> 56));
	}
};

// gaiafs_digests stores the digests of the pages of the runs into sums.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_digests(const Run *runs, u64 runCount, u64 pages, const u64 *key, u64 *sums)
{
	u32 lane = threadIdx.x % 32;
	Digester d;
	d.load(key, lane);
	u64 warps = (u64)gridDim.x * (blockDim.x / 32);
	for (u64 page = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; page < pages; page += warps) {
		u64 s = d.sum(findPage(runs, (u32)runCount, page), lane);
		if (lane == 0) {
			sums[page] = s;
		}
	}
}

// gaiafs_modified stores 1 into modified for each page of the runs with another digest than in agreed, else 0.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_modified(const Run *runs, u64 runCount, u64 pages, const u64 *key, const u64 *agreed, u8 *modified)
{
	u32 lane = threadIdx.x % 32;
	Digester d;
	d.load(key, lane);
	u64 warps = (u64)gridDim.x * (blockDim.x / 32);
	for (u64 page = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; page < pages; page += warps) {
		u64 s = d.sum(findPage(runs, (u32)runCount, page), lane);
		if (lane == 0) {
			modified[page] = s != agreed[page];
		}
	}
}

// A Patch is a page to be patched. Bit i%64 of word i/64 of changed says that the bytes [16i, 16i+16) may have to be
// stored. After `first` pairs of granules of other pages there is what these granules were, one after the other, then
// what they are to be.
struct Patch {
	u64 address;
	u64 changed[4];
	u64 first;
};

// gaiafs_patch has one block of 256 threads for each page, a granule for each thread. Neither patches nor granules
// change meanwhile; the page may. Each byte is stored on its own, through volatile, so that the compiler cannot make
// one store of neighbours: a wider one would bring back what a neighbour was before somebody's store.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_patch(const Patch *patches, const ulonglong2 *granules)
{
	const Patch *p = patches + blockIdx.x;
	u32 mine = threadIdx.x / 64;
	u64 word = p->changed[mine], bit = 1ull << (threadIdx.x % 64);
	if (!(word & bit)) {
		return;
	}
	u64 at = 2 * p->first + __popcll(word & (bit - 1)), all = 0;
#pragma unroll
	for (u32 w = 0; w < 4; w++) {
		u64 count = __popcll(p->changed[w]);
		all += count;
		at += w < mine ? count : 0;
	}
	ulonglong2 b = granules[at], n = granules[at + all];
	u64 page = p->address + threadIdx.x * 16;
	u64 has[2], was[2] = {b.x, b.y}, next[2] = {n.x, n.y};
	loadPair(page, has[0], has[1]);
	volatile u8 *mem = (volatile u8 *)page;
#pragma unroll
	for (u32 w = 0; w < 2; w++) {
#pragma unroll
		for (u32 i = 0; i < 8; i++) {
			u8 from = (u8)(was[w] >> (8 * i)), to = (u8)(next[w] >> (8 * i));
			if (from != to && (u8)(has[w] >> (8 * i)) == from) {
				mem[8 * w + i] = to;
			}
		}
	}
}

// A Refresh is a page that is to be what lies at its place in the next pages, if its digest is the agreed one.
struct Refresh {
	u64 address;
	u64 agreed;
};

// storeDiffering stores the bytes in which a word differs from what it was, each on its own as gaiafs_patch does.
static __device__ __forceinline__ void storeDiffering(u64 address, u64 was, u64 next)
{
	u64 differ = was ^ next;
	if (differ == 0) {
		return;
	}
	volatile u8 *mem = (volatile u8 *)address;
#pragma unroll
	for (u32 i = 0; i < 8; i++) {
		if (differ >> (8 * i) & 0xff) {
			mem[i] = (u8)(next >> (8 * i));
		}
	}
}

// gaiafs_refresh has one warp work on a page. A page with the agreed digest gets the bytes of the next one in which
// that differs from it: from the very words that the digest is of, which are the base then. Any other page stays as it
// is, and refused gets 1 for it instead of 0.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_refresh(const Refresh *pages, const ulonglong2 *next, u64 count, const u64 *key, u8 *refused)
{
	u32 lane = threadIdx.x % 32;
	Digester d;
	d.load(key, lane);
	u64 warps = (u64)gridDim.x * (blockDim.x / 32);
	for (u64 page = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; page < count; page += warps) {
		u64 address = pages[page].address, word[laneWords];
		loadWords(address, lane, word);
		bool agreed = d.sum(word) == pages[page].agreed;
		if (lane == 0) {
			refused[page] = !agreed;
		}
		if (!agreed) {
			continue;
		}
#pragma unroll
		for (u32 i = 0; i < laneWords / 2; i++) {
			ulonglong2 n = next[page * 256 + i * 32 + lane];
			storeDiffering(address + (i * 32 + lane) * 16, word[2 * i], n.x);
			storeDiffering(address + (i * 32 + lane) * 16 + 8, word[2 * i + 1], n.y);
		}
	}
}

// The two kernels below have one block of 256 threads for each page: at addresses[block], and page `block` of pages.

// gaiafs_scatter stores pages that lie side by side to where they belong.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_scatter(const u64 *addresses, const ulonglong2 *pages)
{
	ulonglong2 *to = (ulonglong2 *)addresses[blockIdx.x];
	to[threadIdx.x] = pages[(u64)blockIdx.x * 256 + threadIdx.x];
}

// gaiafs_gather puts pages from here and there side by side.
extern "C" __global__ void __launch_bounds__(256)
gaiafs_gather(const u64 *addresses, ulonglong2 *pages)
{
	ulonglong2 words;
	loadPair(addresses[blockIdx.x] + threadIdx.x * 16, words.x, words.y);
	pages[(u64)blockIdx.x * 256 + threadIdx.x] = words;
}
