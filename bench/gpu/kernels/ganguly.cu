/*
 * The kernels of Ganguly's paper on memory that is too small, written anew, in brackets: bfs, sssp, nw and ra (random
 * access), which are irregular, and backprop, fdtd, hotspot and srad, which are regular.
 *
 *   ganguly KERNEL MIB KIND WAY FILE REFERENCES
 *
 * KERNEL is one of them, or all. Its arrays have MIB together. KIND is movable (of FILE, on a mount), pinned (memory of
 * the host, which kernels reach over the bus), managed, or copy (memory of the device). WAY is whole, where each launch
 * uses all arrays that it may reach, or tiled, where a launch uses a 32nd of them at a time: what does not fit moves
 * always. With kind copy it writes a sum of what the kernel left to REFERENCES/KERNEL.MIB, and with others it compares.
 * It prints a line: kernel, kind, way, seconds, brackets, microseconds of a gaia_use, when it began and ended, and
 * whether the sum is right. Environment: KEEP=BYTES leaves no more than that of the device free, for managed memory;
 * GATE=FILE makes FILE.PID when all is filled, and begins once there is FILE; PAUSE=MICROSECONDS is what the program
 * does after each bracket without the GPU; ROUNDS=N has fdtd, hotspot and srad do N times as many rounds, so their sums
 * are others.
 *
 * Built by a C++ compiler without CUDA, it runs on the CPU: kind copy, or movable on an emulated device. Sums are the
 * same, since it only adds, multiplies and divides, without contraction (nvcc -fmad=false, g++ -ffp-contract=off).
 */
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "gaiafs.h"

#define CHECK(ok) \
	do { \
		if (!(ok)) { \
			fprintf(stderr, "ganguly: line %d: %s: %s; %s\n", __LINE__, #ok, strerror(errno), gaia_error()); \
			exit(1); \
		} \
	} while (0)

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define GPU __device__
#define CUDA(call) \
	do { \
		cudaError_t e_ = (call); \
		if (e_ != cudaSuccess) { \
			fprintf(stderr, "ganguly: line %d: %s: %s; %s\n", __LINE__, #call, cudaGetErrorString(e_), gaia_error()); \
			exit(1); \
		} \
	} while (0)
static cudaStream_t stream;
template <class F> __global__ void each(size_t n, F f)
{
	for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
		f(i);
}
template <class F> static void launch(size_t n, F f)
{
	each<<<unsigned(std::min((n + 255) / 256, size_t(4096))), 256, 0, stream>>>(n, f);
	CUDA(cudaGetLastError());
}
static void finish() { CUDA(cudaStreamSynchronize(stream)); }
static void clear(u64 *p, size_t n) { CUDA(cudaMemsetAsync(p, 0, n * 8, stream)); }
static u64 fetch(const u64 *p)
{
	u64 v = 0;

	CUDA(cudaMemcpyAsync(&v, p, 8, cudaMemcpyDeviceToHost, stream));
	finish();
	return v;
}
GPU static void least(u32 *p, u32 v) { atomicMin(p, v); }
GPU static void sum(u64 *p, u64 v) { atomicAdd(reinterpret_cast<unsigned long long *>(p), v); }
GPU static void mix(u64 *p, u64 v) { atomicXor(reinterpret_cast<unsigned long long *>(p), v); }
#else
#define GPU
static gaia_stream_t stream = GAIA_NO_STREAM;
template <class F> static void launch(size_t n, F f)
{
	for (size_t i = 0; i < n; i++)
		f(i);
}
static void finish() {}
static void clear(u64 *p, size_t n) { memset(p, 0, n * 8); }
static u64 fetch(const u64 *p) { return *p; }
static void least(u32 *p, u32 v) { *p = std::min(*p, v); }
static void sum(u64 *p, u64 v) { *p += v; }
static void mix(u64 *p, u64 v) { *p ^= v; }
#endif
#ifdef __CUDACC__
#define BOTH __host__ __device__
#else
#define BOTH
#endif

BOTH static u64 hash(u64 i)
{
	i = (i ^ i >> 31) * 0x9e3779b97f4a7c15u;
	i = (i ^ i >> 29) * 0xbf58476d1ce4e5b9u;
	return i ^ i >> 32;
}

static double now()
{
	using namespace std::chrono;
	return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static const size_t ALIGN = 2 << 20, TILES = 32;

static bool movable, tiled;
static u8 *base; /* of all arrays */
static size_t used, room;
static u64 *scratch; /* words of the program's own, for what kernels find out */
static size_t brackets;
static double using_it;

/* bracket has the ranges' memory be there until end. */
static void bracket(std::vector<gaia_range> ranges)
{
	if (!movable)
		return;
	double t = now();
	CHECK(gaia_use(ranges.data(), ranges.size(), stream) == 0);
	using_it += now() - t;
	brackets++;
}
static unsigned pause_us; /* in the work that is measured */
static void end()
{
	if (movable)
		CHECK(gaia_done(stream) == 0);
	if (pause_us != 0) {
		finish();
		usleep(pause_us);
	}
}

/* Array is n elements of what the program works on. */
template <class T> struct Array {
	T *p;
	size_t n;
	explicit Array(size_t n_) : n(n_)
	{
		p = reinterpret_cast<T *>(base + used);
		used += (n * sizeof(T) + ALIGN - 1) / ALIGN * ALIGN;
		CHECK(used <= room);
	}
	/* part is elements from to to, as far as there are. */
	gaia_range part(long from, long to) const
	{
		size_t a = size_t(std::max(from, 0L)), b = std::min(size_t(to), n);

		return { p + a, (b - a) * sizeof(T) };
	}
	gaia_range all() const { return { p, n * sizeof(T) }; }
};

/* repeats is n, multiplied by ROUNDS. */
static int repeats(int n)
{
	const char *rounds = getenv("ROUNDS");

	return rounds != nullptr ? n * atoi(rounds) : n;
}

/* step_of is how much of n is worked on at a time. */
static size_t step_of(size_t n) { return tiled ? (n + TILES - 1) / TILES : n; }

/* fill sets each element of a to what is hashed of its number, below most; 0: all of it. Always by parts. */
template <class T> static void fill(Array<T> a, u64 salt, u64 most, T plus = 0)
{
	size_t step = (a.n + TILES - 1) / TILES;
	T *p = a.p;

	for (size_t from = 0; from < a.n; from += step) {
		size_t to = std::min(from + step, a.n);

		bracket({ a.part(long(from), long(to)) });
		launch(to - from, [=] GPU(size_t k) {
			u64 h = hash((from + k) ^ salt << 40);
			p[from + k] = T(T(most != 0 ? h % most : h) + plus);
		});
		end();
	}
}
template <class T> static void set(Array<T> a, T value) { fill<T>(a, 0, 1, value); }

/* digest adds up what an array has, with the places of its elements. */
template <class T> static u64 digest(Array<T> a)
{
	size_t step = (a.n + TILES - 1) / TILES;
	T *p = a.p;
	u64 *to = scratch;

	clear(to, 1);
	for (size_t from = 0; from < a.n; from += step) {
		size_t end_ = std::min(from + step, a.n), threads = std::min(size_t(65536), end_ - from);

		bracket({ a.part(long(from), long(end_)) });
		launch(threads, [=] GPU(size_t k) {
			u64 s = 0;
			for (size_t i = from + k; i < end_; i += threads) {
				u64 w = 0;
				T v = p[i];
				if (v == v) /* CPU and GPU have different NaNs */
					memcpy(&w, &v, sizeof(T));
				s += hash(w ^ i << 20);
			}
			sum(to, s);
		});
		end();
	}
	return fetch(to);
}

/* ready is called between filling and the work that is measured, over after it. */
static double began, ended, use_us;
static size_t asked;
static void ready()
{
	const char *gate = getenv("GATE"), *pause_ = getenv("PAUSE");

	finish();
	if (movable)
		CHECK(gaia_msync(base, room, MS_ASYNC) == 0);
	if (gate != nullptr) {
		FILE *f = fopen((std::string(gate) + "." + std::to_string(getpid())).c_str(), "w");

		CHECK(f != nullptr && fclose(f) == 0);
		while (access(gate, F_OK) != 0)
			usleep(1000);
	}
	pause_us = pause_ != nullptr ? unsigned(atoi(pause_)) : 0;
	brackets = 0;
	using_it = 0;
	began = now();
}
static void over()
{
	finish();
	ended = now();
	asked = brackets;
	use_us = brackets != 0 ? using_it / double(brackets) * 1e6 : 0;
	pause_us = 0;
}

static u64 ra(size_t bytes)
{
	Array<u64> table(bytes / 8);
	u64 *t = table.p;
	size_t n = table.n, updates = n / 16;

	fill<u64>(table, 1, 0);
	ready();
	for (u64 round = 0; round < 4; round++) {
		size_t step = step_of(n);

		for (size_t from = 0; from < n; from += step) {
			size_t to = std::min(from + step, n);

			bracket({ table.part(long(from), long(to)) });
			launch(updates, [=] GPU(size_t i) {
				u64 h = hash(i + round * updates + 99), at = (h >> 8) % n;
				if (at >= from && at < to)
					mix(&t[at], h);
			});
			end();
		}
	}
	over();
	return digest(table);
}

static const u32 DEGREE = 16, FAR = 0xffffffffu;

static u64 bfs(size_t bytes)
{
	size_t n = bytes / (4 * DEGREE + 4 + 1);
	Array<u32> edges(n * DEGREE), level(n);
	u32 *e = edges.p, *l = level.p;
	u64 *found = scratch;

	fill<u32>(edges, 2, n);
	set<u32>(level, FAR);
	bracket({ level.all() });
	launch(1, [=] GPU(size_t) { l[0] = 0; });
	end();
	ready();
	for (u32 now_ = 0;; now_++) {
		size_t step = step_of(n);

		clear(found, 1);
		for (size_t from = 0; from < n; from += step) {
			size_t to = std::min(from + step, n);

			bracket({ level.all(), edges.part(long(from * DEGREE), long(to * DEGREE)) });
			launch(to - from, [=] GPU(size_t k) {
				size_t v = from + k;
				if (l[v] != now_)
					return;
				for (u32 j = 0; j < DEGREE; j++)
					least(&l[e[v * DEGREE + j]], now_ + 1);
				*found = 1; /* all who store there store the same */
			});
			end();
		}
		if (fetch(found) == 0)
			break;
	}
	over();
	return digest(level);
}

static u64 sssp(size_t bytes)
{
	size_t n = bytes / (8 * DEGREE + 9 + 1);
	Array<u32> edges(n * DEGREE), weights(n * DEGREE), dist(n), next(n);
	Array<u8> changed(n);
	u32 *e = edges.p, *w = weights.p, *d = dist.p, *x = next.p;
	u8 *c = changed.p;

	fill<u32>(edges, 3, n);
	fill<u32>(weights, 4, 15, 1);
	set<u32>(dist, FAR);
	set<u32>(next, FAR);
	set<u8>(changed, 0);
	bracket({ dist.all(), next.all(), changed.all() });
	launch(1, [=] GPU(size_t) { d[0] = x[0] = 0, c[0] = 1; });
	end();
	ready();
	for (int round = 0; round < 12; round++) {
		size_t step = step_of(n);

		for (size_t from = 0; from < n; from += step) {
			size_t to = std::min(from + step, n);
			long a = long(from * DEGREE), b = long(to * DEGREE);

			bracket({ next.all(), dist.part(long(from), long(to)), changed.part(long(from), long(to)), edges.part(a, b),
				  weights.part(a, b) });
			launch(to - from, [=] GPU(size_t k) {
				size_t v = from + k;
				if (c[v] == 0)
					return;
				for (u32 j = 0; j < DEGREE; j++)
					least(&x[e[v * DEGREE + j]], d[v] + w[v * DEGREE + j]);
			});
			end();
		}
		for (size_t from = 0; from < n; from += step) {
			size_t to = std::min(from + step, n);

			bracket({ next.part(long(from), long(to)), dist.part(long(from), long(to)),
				changed.part(long(from), long(to)) });
			launch(to - from, [=] GPU(size_t k) {
				size_t v = from + k;
				c[v] = x[v] < d[v];
				d[v] = x[v] < d[v] ? x[v] : d[v];
			});
			end();
		}
	}
	over();
	return digest(dist);
}

/* nw: a cell needs its neighbours above, to the left and between them. So the cells of a diagonal are worked on at
 * once. */
static u64 nw(size_t bytes)
{
	long n = 64;
	while (2 * (n + 64) * (n + 64) * 4 <= long(bytes))
		n += 64;
	Array<int32_t> score(size_t(n * n)), match(size_t(n * n));
	int32_t *s = score.p, *m = match.p;

	set<int32_t>(score, 0);
	fill<int32_t>(match, 5, 21, -10);
	ready();
	long step = long(step_of(size_t(n)));
	for (long from = 0; from < n; from += step) {
		long to = std::min(from + step, n), rows = to - from;

		bracket({ score.part((from - 1) * n, to * n), match.part(from * n, to * n) });
		for (long diagonal = 0; diagonal < n + rows - 1; diagonal++) {
			long first = std::max(0L, diagonal - n + 1), last = std::min(rows - 1, diagonal);

			launch(size_t(last - first + 1), [=] GPU(size_t k) {
				long r = from + first + long(k), q = diagonal - first - long(k);
				long above = r > 0 ? s[(r - 1) * n + q] : -10 * (q + 1),
					 left = q > 0 ? s[r * n + q - 1] : -10 * (r + 1);
				long between = r > 0 && q > 0 ? s[(r - 1) * n + q - 1] : -10 * (r + q);
				long best = between + m[r * n + q];
				best = best > above - 10 ? best : above - 10;
				s[r * n + q] = int32_t(best > left - 10 ? best : left - 10);
			});
		}
		end();
	}
	over();
	return digest(score);
}

/* backprop: a layer of many inputs and 16 hidden units, forward and back, in fixed point. */
static u64 backprop(size_t bytes)
{
	const u32 HIDDEN = 16;
	size_t n = bytes / (4 + 8 * HIDDEN + 1);
	Array<u32> in(n), w(n * HIDDEN), old(n * HIDDEN);
	u32 *i_ = in.p, *w_ = w.p, *o_ = old.p;
	u64 *hidden = scratch;

	fill<u32>(in, 6, 1000);
	fill<u32>(w, 7, 1000);
	fill<u32>(old, 8, 1000);
	ready();
	clear(hidden, HIDDEN);
	size_t step = step_of(n);
	for (size_t from = 0; from < n; from += step) {
		size_t to = std::min(from + step, n), threads = std::min(size_t(1) << 17, (to - from) * HIDDEN);

		bracket({ in.part(long(from), long(to)), w.part(long(from * HIDDEN), long(to * HIDDEN)) });
		launch(threads, [=] GPU(size_t k) {
			u64 s = 0; /* threads is a multiple of 16, so that a thread has one hidden unit */
			for (size_t at = from * HIDDEN + k; at < to * HIDDEN; at += threads)
				s += u64(i_[at / HIDDEN]) * w_[at];
			sum(&hidden[k % HIDDEN], s);
		});
		end();
	}
	for (size_t from = 0; from < n; from += step) {
		size_t to = std::min(from + step, n);

		bracket({ in.part(long(from), long(to)), w.part(long(from * HIDDEN), long(to * HIDDEN)),
			  old.part(long(from * HIDDEN), long(to * HIDDEN)) });
		launch((to - from) * HIDDEN, [=] GPU(size_t k) {
			size_t at = from * HIDDEN + k;
			u32 change = u32(hidden[at % HIDDEN] % 1021) * i_[at / HIDDEN] + o_[at] / 3;
			w_[at] += change;
			o_[at] = change;
		});
		end();
	}
	over();
	return digest(w) ^ digest(old);
}

static const long WIDTH = 2048; /* of the grids that follow */

/* rows_of is how many rows each of so many grids of floats has. */
static long rows_of(size_t bytes, size_t grids) { return long((bytes / grids - ALIGN) / (WIDTH * 4)); }

/* bands works on rows from to to of grids, and has those next to them, before and behind, there. */
template <class F> static void bands(long rows, const std::vector<Array<float>> &grids, F f)
{
	long step = long(step_of(size_t(rows)));

	for (long from = 0; from < rows; from += step) {
		long to = std::min(from + step, rows);
		std::vector<gaia_range> ranges;

		for (const auto &g : grids)
			ranges.push_back(g.part((from - 1) * WIDTH, (to + 1) * WIDTH));
		bracket(ranges);
		f(from, to);
		end();
	}
}

static void fdtd_ey(long from, long to, float *y, const float *h)
{
	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k);
		y[at] = at < WIDTH ? 1.0f : y[at] - 0.5f * (h[at] - h[at - WIDTH]);
	});
}
static void fdtd_ex(long from, long to, float *x, const float *h)
{
	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k);
		if (at % WIDTH != 0)
			x[at] = x[at] - 0.5f * (h[at] - h[at - 1]);
	});
}
static void fdtd_hz(long from, long to, long rows, const float *x, const float *y, float *h)
{
	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k);
		if (at / WIDTH < rows - 1 && at % WIDTH < WIDTH - 1)
			h[at] = h[at] - 0.7f * (x[at + 1] - x[at] + y[at + WIDTH] - y[at]);
	});
}

static u64 fdtd(size_t bytes)
{
	long rows = rows_of(bytes, 3);
	Array<float> ex(size_t(rows * WIDTH)), ey(size_t(rows * WIDTH)), hz(size_t(rows * WIDTH));

	fill<float>(ex, 9, 1000);
	fill<float>(ey, 10, 1000);
	fill<float>(hz, 11, 1000);
	ready();
	for (int round = 0; round < repeats(4); round++) {
		bands(rows, { ey, hz }, [&](long from, long to) { fdtd_ey(from, to, ey.p, hz.p); });
		bands(rows, { ex, hz }, [&](long from, long to) { fdtd_ex(from, to, ex.p, hz.p); });
		bands(rows, { hz, ex, ey }, [&](long from, long to) { fdtd_hz(from, to, rows, ex.p, ey.p, hz.p); });
	}
	over();
	return digest(ex) ^ digest(ey) ^ digest(hz);
}

static void hotspot_step(long from, long to, long rows, const float *in, const float *power, float *out)
{
	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k), r = at / WIDTH, c = at % WIDTH;
		float t = in[at], n = r > 0 ? in[at - WIDTH] : t, s = r < rows - 1 ? in[at + WIDTH] : t;
		float w = c > 0 ? in[at - 1] : t, e = c < WIDTH - 1 ? in[at + 1] : t;
		out[at] = t + 0.1f * (power[at] + (n + s - 2 * t) * 0.3f + (e + w - 2 * t) * 0.4f + (80.0f - t) * 0.01f);
	});
}

static u64 hotspot(size_t bytes)
{
	long rows = rows_of(bytes, 3);
	Array<float> a(size_t(rows * WIDTH)), b(size_t(rows * WIDTH)), power(size_t(rows * WIDTH));
	Array<float> *in = &a, *out = &b;

	fill<float>(a, 12, 100);
	set<float>(b, 0);
	fill<float>(power, 13, 10);
	ready();
	for (int round = 0; round < repeats(6); round++) {
		bands(rows, { *in, power, *out },
			[&](long from, long to) { hotspot_step(from, to, rows, in->p, power.p, out->p); });
		std::swap(in, out);
	}
	over();
	return digest(*in);
}

static void srad_first(long from, long to, long rows, const float *j, float *const *d, float *co)
{
	float *dn = d[0], *ds = d[1], *dw = d[2], *de = d[3];

	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k), r = at / WIDTH, c = at % WIDTH;
		float v = j[at];
		dn[at] = (r > 0 ? j[at - WIDTH] : v) - v;
		ds[at] = (r < rows - 1 ? j[at + WIDTH] : v) - v;
		dw[at] = (c > 0 ? j[at - 1] : v) - v;
		de[at] = (c < WIDTH - 1 ? j[at + 1] : v) - v;
		float g = (dn[at] * dn[at] + ds[at] * ds[at] + dw[at] * dw[at] + de[at] * de[at]) / (v * v);
		float l = (dn[at] + ds[at] + dw[at] + de[at]) / v, num = 0.5f * g - (1.0f / 16.0f) * (l * l),
			  den = 1 + 0.25f * l;
		float q = num / (den * den), f = 1.0f / (1.0f + (q - 0.05f) / (0.05f * 1.05f));
		co[at] = f < 0 ? 0 : f > 1 ? 1 : f;
	});
}
static void srad_second(long from, long to, long rows, float *j, float *const *d, const float *co)
{
	const float *dn = d[0], *ds = d[1], *dw = d[2], *de = d[3];

	launch(size_t((to - from) * WIDTH), [=] GPU(size_t k) {
		long at = from * WIDTH + long(k), r = at / WIDTH, c = at % WIDTH;
		float s = r < rows - 1 ? co[at + WIDTH] : co[at], e = c < WIDTH - 1 ? co[at + 1] : co[at];
		j[at] = j[at] + 0.125f * (co[at] * dn[at] + s * ds[at] + co[at] * dw[at] + e * de[at]);
	});
}

static u64 srad(size_t bytes)
{
	long rows = rows_of(bytes, 6);
	size_t n = size_t(rows * WIDTH);
	Array<float> j(n), co(n), dn(n), ds(n), dw(n), de(n);
	float *d[] = { dn.p, ds.p, dw.p, de.p };

	fill<float>(j, 14, 100, 1);
	for (const auto &a : { co, dn, ds, dw, de })
		set<float>(a, 0);
	ready();
	for (int round = 0; round < repeats(3); round++) {
		bands(rows, { j, co, dn, ds, dw, de }, [&](long from, long to) { srad_first(from, to, rows, j.p, d, co.p); });
		bands(rows, { j, co, dn, ds, dw, de }, [&](long from, long to) { srad_second(from, to, rows, j.p, d, co.p); });
	}
	over();
	return digest(j);
}

/* memory has base be room bytes of a kind. It returns the file of movable ones. */
static int memory(const std::string &kind, const char *file)
{
	void *p = nullptr;
	int fd = -1;

	used = 0;
	movable = kind == "movable";
	if (movable) {
		fd = open(file, O_RDWR | O_CREAT | O_TRUNC, 0600);
		CHECK(fd >= 0 && ftruncate(fd, off_t(room)) == 0);
		p = gaia_mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED | GAIA_MOVABLE, fd, 0, 0);
		CHECK(p != MAP_FAILED);
	}
#ifdef __CUDACC__
	else if (kind == "pinned") {
		CUDA(cudaHostAlloc(&p, room, cudaHostAllocMapped));
	} else if (kind == "managed") {
		CUDA(cudaMallocManaged(&p, room));
	} else if (kind == "copy") {
		CUDA(cudaMalloc(&p, room));
	}
#else
	else if (kind == "copy") {
		p = aligned_alloc(ALIGN, room);
	}
#endif
	CHECK(p != nullptr);
	base = static_cast<u8 *>(p);
	return fd;
}

static void give_back(const std::string &kind, int fd)
{
	if (movable) {
		CHECK(gaia_munmap(base, room) == 0);
		CHECK(ftruncate(fd, 0) == 0);
		close(fd);
		return;
	}
#ifdef __CUDACC__
	if (kind == "pinned")
		CUDA(cudaFreeHost(base));
	else
		CUDA(cudaFree(base));
#else
	(void)kind;
	free(base);
#endif
}

/* right reports whether a sum is that of the reference, which kind copy writes. */
static bool right(const std::string &path, const std::string &kind, u64 got)
{
	unsigned long long want = 0;
	FILE *f = fopen(path.c_str(), "r");

	if (f == nullptr && kind == "copy") {
		f = fopen(path.c_str(), "w");
		CHECK(f != nullptr && fprintf(f, "%llx\n", static_cast<unsigned long long>(got)) > 0 && fclose(f) == 0);
		return true;
	}
	CHECK(f != nullptr && fscanf(f, "%llx", &want) == 1);
	fclose(f);
	return got == want;
}

static void start()
{
#ifdef __CUDACC__
	CUDA(cudaSetDevice(0));
	CUDA(cudaStreamCreate(&stream));
	CUDA(cudaMalloc(&scratch, 4096));
	launch(1, [=] GPU(size_t) {});
	finish();
	if (const char *keep = getenv("KEEP")) {
		size_t spare = 0, all = 0, leave = strtoull(keep, nullptr, 10);
		void *ballast;

		CUDA(cudaMemGetInfo(&spare, &all));
		if (spare > leave)
			CUDA(cudaMalloc(&ballast, spare - leave));
	}
#else
	scratch = static_cast<u64 *>(calloc(1, 4096));
#endif
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		u64 (*run)(size_t);
	} kernels[] = { { "bfs", bfs }, { "sssp", sssp }, { "nw", nw }, { "ra", ra }, { "backprop", backprop },
			{ "fdtd", fdtd }, { "hotspot", hotspot }, { "srad", srad } };
	int wrong = 0;

	if (argc != 7)
		return fprintf(stderr, "ganguly KERNEL MIB KIND WAY FILE REFERENCES\n"), 2;
	const std::string which = argv[1], kind = argv[3];
	tiled = strcmp(argv[4], "tiled") == 0;
	room = strtoull(argv[2], nullptr, 10) << 20;
	start();
	for (const auto &k : kernels) {
		if (which != "all" && which != k.name)
			continue;
		int fd = memory(kind, argv[5]);
		u64 got = k.run(room - 16 * ALIGN);
		bool ok = right(std::string(argv[6]) + "/" + k.name + "." + argv[2], kind, got);

		printf("%-8s %-7s %-5s %8.4f s %6zu brackets %8.1f us %.4f %.4f %s\n", k.name, kind.c_str(), argv[4],
		       ended - began, asked, use_us, began, ended, ok ? "right" : "WRONG");
		fflush(stdout);
		wrong += !ok;
		give_back(kind, fd);
	}
	return wrong != 0;
}
