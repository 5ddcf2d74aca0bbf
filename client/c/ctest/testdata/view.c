/*
 * A client that makes views, for the tests. The first argument names a scenario, the second a folder with the files a
 * and b, whose bytes are byte_a and byte_b. On GPUs it needs the tests' libcuda, whose device memory is at addresses
 * that the CPU can use.
 */
#include "check.h"

#include <sys/resource.h>

enum { SIZE_A = (5 << 20) + 123, SIZE_B = 3 * PAGE + 7, DEFAULT_ALIGN = 256 };

static uint8_t byte_a(uint64_t i)
{
	return (uint8_t)(i / 7 + i);
}

static uint8_t byte_b(uint64_t i)
{
	return (uint8_t)(i * 31 + 7);
}

static int kind = GAIA_KIND_ANY;

static int open_in(const char *folder, const char *name, int flags)
{
	char path[4096];

	snprintf(path, sizeof path, "%s/%s", folder, name);
	return open_file(path, flags);
}

/* Pseudo-random numbers below n. */
static uint64_t seed = 1;

static uint64_t below(uint64_t n)
{
	seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
	return (seed >> 33) % n;
}

static uint64_t rows_of(const struct gaia_segment *s)
{
	return s->count == 0 ? 1 : s->count;
}

static size_t aligned(size_t n, size_t align)
{
	while (n % align != 0)
		n++;
	return n;
}

/* fill computes a view's expected bytes, row by row: those that pread returns, and zeros past the end of the file. */
static uint8_t *fill(const int *fds, const uint32_t *files, const struct gaia_segment *segments, size_t n, size_t align,
		     size_t *size)
{
	uint8_t *want;
	size_t end = 0;

	for (size_t i = 0; i < n; i++)
		end = aligned(end, align) + segments[i].length * rows_of(&segments[i]);
	*size = end;
	want = calloc(1, end);
	CHECK(want != NULL);
	end = 0;
	for (size_t i = 0; i < n; i++) {
		end = aligned(end, align);
		for (uint64_t row = 0; row < rows_of(&segments[i]); row++) {
			for (size_t done = 0; done < segments[i].length;) {
				off_t at = (off_t)(segments[i].offset + row * segments[i].stride + done);
				ssize_t got =
					pread(fds[files == NULL ? 0 : files[i]], want + end + done, segments[i].length - done, at);

				CHECK(got >= 0);
				if (got == 0)
					break;
				done += (size_t)got;
			}
			end += segments[i].length;
		}
	}
	return want;
}

/* same compares a view with the expected bytes, and prints the first byte that differs. */
static void same(const uint8_t *got, const uint8_t *want, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (got[i] != want[i]) {
			fprintf(stderr, "byte %zu of %zu is %u, not %u\n", i, n, got[i], want[i]);
			_exit(1);
		}
}

struct asked {
	const int *fds;
	size_t fd_count;
	const uint32_t *files;
	const struct gaia_segment *segments;
	size_t n, align;
	uint64_t flags;
	int dev;
};

/* map makes a view and checks all of its bytes. */
static uint8_t *map(const struct asked *a, size_t *size)
{
	struct gaia_view_args args = { .segments = a->segments, .count = a->n, .fds = a->fds, .fd_count = a->fd_count,
				       .files = a->files, .align = a->align, .flags = a->flags, .device = a->dev, .kind = kind };
	size_t align = a->align == 0 ? DEFAULT_ALIGN : a->align;
	uint8_t *want = fill(a->fds, a->files, a->segments, a->n, align, size), *p = gaia_map_view(&args, sizeof args);
	struct gaia_info info;

	CHECK(p != MAP_FAILED);
	CHECK((uintptr_t)p % align == 0);
	if (a->flags & GAIA_MAP_LAZY)
		CHECK(gaia_macquire(p, *size, a->dev) == 0);
	same(p, want, *size);
	for (size_t i = *size; i % PAGE != 0; i++)
		CHECK(p[i] == 0);
	CHECK(gaia_info(p + *size - 1, &info, sizeof info) == 0);
	CHECK(info.address == p && info.length == *size && info.offset == 0 && info.prot == PROT_READ &&
		info.device == a->dev);
	CHECK(info.flags == (a->flags & (GAIA_MAP_LAZY | GAIA_MAP_PEERS)));
	free(want);
	return p;
}

static void map_and_unmap(const struct asked *a)
{
	size_t size;
	uint8_t *p = map(a, &size);

	CHECK(gaia_munmap(p, size) == 0);
	FAILS(gaia_macquire(p, 1, a->dev), ENOMEM);
}

static int descriptors(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* The layout */

static void layout_is(
	const struct gaia_segment *segments, size_t n, size_t align, const uint64_t *want, uint64_t want_size)
{
	uint64_t offsets[8] = { 0 }, size = 0;

	CHECK(gaia_view_layout(segments, n, align, offsets, &size) == 0);
	CHECK(size == want_size && memcmp(offsets, want, n * sizeof *want) == 0);
	CHECK(gaia_view_layout(segments, n, align, NULL, NULL) == 0);
}

#define LAYOUT(align, size, ...)                                                                                       \
	layout_is(s, sizeof s / sizeof s[0], align, (const uint64_t[]){ __VA_ARGS__ }, size)

static void refuse_layout(
	int line, const struct gaia_segment *segments, size_t n, size_t align, int want, const char *words)
{
	uint64_t offset = 77, size = 77;

	errno = 0;
	if (gaia_view_layout(segments, n, align, n == 1 ? &offset : NULL, &size) != -1 || errno != want ||
	    strstr(gaia_error(), words) == NULL || size != 77) {
		fprintf(stderr, "line %d: errno %d, \"%s\"\n", line, errno, gaia_error());
		_exit(1);
	}
}

#define NO_LAYOUT(want, words, ...)                                                                                    \
	refuse_layout(__LINE__, (const struct gaia_segment[]){ __VA_ARGS__ },                                          \
		      sizeof (const struct gaia_segment[]){ __VA_ARGS__ } / sizeof(struct gaia_segment), 0, want, words)

static void layout(const char *folder)
{
	const uint64_t largest = INT64_MAX;
	struct gaia_segment *many = calloc((1 << 19) + 1, sizeof *many);

	(void)folder;
	{
		const struct gaia_segment s[] = { { .offset = 1000, .length = 1 }, { .length = 256 },
			{ .offset = 3, .length = 257, .count = 1 }, { .length = 3, .stride = 3, .count = 5 },
			{ .length = 1, .stride = 9, .count = 2 } };
		LAYOUT(0, 1282, 0, 256, 512, 1024, 1280);
		LAYOUT(256, 1282, 0, 256, 512, 1024, 1280);
		LAYOUT(1, 1 + 256 + 257 + 15 + 2, 0, 1, 257, 514, 529);
		LAYOUT(2 << 20, (UINT64_C(8) << 20) + 2, 0, 2 << 20, 4 << 20, 6 << 20, 8 << 20);
	}
	{ /* the largest ones */
		const struct gaia_segment s[] = { { .offset = largest - 1, .length = 1 },
			{ .length = (UINT64_C(1) << 62) - 256 } };
		LAYOUT(0, UINT64_C(1) << 62, 0, 256);
	}
	{ /* the stride of a single row is ignored */
		const struct gaia_segment s[] = { { .length = 4, .stride = 1 },
			{ .length = 4, .stride = UINT64_MAX, .count = 1 } };
		LAYOUT(0, 260, 0, 256);
	}
	{
		const struct gaia_segment s[] = { { .length = 1, .stride = largest >> 24, .count = 1 << 24 } };
		LAYOUT(0, 1 << 24, 0);
	}
	NO_LAYOUT(EINVAL, "segment 0 has a length of 0", { .offset = 1 });
	NO_LAYOUT(EINVAL, "segment 1 has rows of 8 bytes, and a stride of only 7", { .length = 1 }, { .length = 8, .stride = 7, .count = 2 });
	NO_LAYOUT(EINVAL, "segment 0 has 16777217 rows", { .length = 1, .stride = 1, .count = (1 << 24) + 1 });
	NO_LAYOUT(EINVAL, "segment 0 has 18446744073709551615 rows", { .length = 1, .stride = 1, .count = UINT64_MAX });
	NO_LAYOUT(EINVAL, "segment 1: the view has more than 16777216 rows", { .length = 1, .stride = 1, .count = 1 << 24 }, { .length = 1 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past the largest file", { .offset = largest, .length = 1 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .offset = UINT64_MAX, .length = 1 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .length = UINT64_MAX });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .offset = 2, .length = largest - 1 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .length = 1, .stride = UINT64_MAX, .count = 2 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .length = 1, .stride = UINT64_C(1) << 62, .count = 3 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .length = 1, .stride = UINT64_C(1) << 41, .count = 1 << 23 });
	NO_LAYOUT(EOVERFLOW, "segment 0 ends past", { .offset = largest - 10, .length = 1, .stride = 10, .count = 2 });
	NO_LAYOUT(EINVAL, "segment 0: the view is larger than 2^62", { .length = (UINT64_C(1) << 62) + 1 });
	NO_LAYOUT(EINVAL, "segment 1: the view is larger than 2^62", { .length = UINT64_C(1) << 62 }, { .length = 1 });
	NO_LAYOUT(EINVAL, "segment 1: the view is larger than 2^62", { .length = UINT64_C(1) << 61 }, { .length = (UINT64_C(1) << 61) + 1 });

	/* Their number, and the alignment. */
	CHECK(many != NULL);
	for (size_t i = 0; i <= 1 << 19; i++)
		many[i].length = 1;
	uint64_t size;
	CHECK(gaia_view_layout(many, 1 << 19, 0, NULL, &size) == 0 && size == 256 * ((UINT64_C(1) << 19) - 1) + 1);
	refuse_layout(__LINE__, many, (1 << 19) + 1, 0, EINVAL, "524289 segments");
	refuse_layout(__LINE__, many, SIZE_MAX, 0, EINVAL, "segments");
	refuse_layout(__LINE__, many, 0, 0, EINVAL, "no segments");
	refuse_layout(__LINE__, NULL, 1, 0, EINVAL, "no segments");
	refuse_layout(__LINE__, many, 1, 3, EINVAL, "alignment 3 is not a power of two");
	refuse_layout(__LINE__, many, 1, 4 << 20, EINVAL, "alignment 4194304");
	refuse_layout(__LINE__, many, 1, SIZE_MAX, EINVAL, "alignment");
	free(many);
}

/* Failures that need no daemon, without one. */
static void bad(const char *folder)
{
	int a = open_in(folder, "a", O_RDWR), write_only = open_in(folder, "a", O_WRONLY),
		by_path = open_in(folder, "a", O_PATH);
	int dir = open_file(folder, O_RDONLY | O_DIRECTORY);
	const struct gaia_segment one = { .length = 1 };
	const uint32_t second = 1;
	struct {
		struct gaia_view_args args;
		uint8_t more[40];
	} l;
	const struct gaia_view_args good = { .segments = &one, .count = 1, .fds = &a, .fd_count = 1 };
	struct gaia_view_args v;
	int *many = calloc((1 << 14) + 1, sizeof *many);

	CHECK(many != NULL);
	MMAP_FAILS(gaia_mview(a, &one, 1, 0, 0), ENOTTY);
	MMAP_FAILS(gaia_mview(-1, &one, 1, 0, 0), EBADF);
	MMAP_FAILS(gaia_mview(by_path, &one, 1, 0, 0), EBADF);
	MMAP_FAILS(gaia_mview(write_only, &one, 1, 0, 0), EACCES);
	MMAP_FAILS(gaia_mview(dir, &one, 1, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mview(a, NULL, 1, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mview(a, &one, 0, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mview(a, &one, 1, 24, 0), EINVAL);
	MMAP_FAILS(gaia_mview(a, &one, 1, 0, -1), ENODEV);
	MMAP_FAILS(gaia_mview(a, &(struct gaia_segment){ 0 }, 1, 0, 0), EINVAL);
	CHECK(strcmp(gaia_error(), "segment 0 has a length of 0") == 0);
	MMAP_FAILS(gaia_mview(a, &(struct gaia_segment){ .offset = INT64_MAX, .length = 1 }, 1, 0, 0), EOVERFLOW);

	MMAP_FAILS(gaia_map_view(&good, sizeof good), ENOTTY);
	MMAP_FAILS(gaia_map_view(&good, sizeof good - 1), EINVAL);
	MMAP_FAILS(gaia_map_view(NULL, sizeof good), EINVAL);
	memset(&l, 0, sizeof l);
	l.args = good;
	MMAP_FAILS(gaia_map_view(&l.args, sizeof l), ENOTTY);
	l.more[39] = 1;
	MMAP_FAILS(gaia_map_view(&l.args, sizeof l), E2BIG);
	v = good, v.fd_count = 0;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v = good, v.fds = NULL;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v = good, v.files = &second;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	CHECK(strcmp(gaia_error(), "segment 0 is of file 1, and there are 1") == 0);
	for (size_t i = 0; i < 1025; i++)
		many[i] = a;
	v = good, v.fds = many, v.fd_count = (1 << 14) + 1;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v.fd_count = UINT64_MAX;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v.fd_count = 3;
	many[2] = dir;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v = good, v.flags = MAP_PRIVATE;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v = good, v.kind = 9;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	v = good, v.flags = MAP_FIXED, v.address = (void *)(uintptr_t)PAGE, v.align = 2 * PAGE;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EINVAL);
	CHECK(strstr(gaia_error(), "the alignment 8192") != NULL);

	/* Running out of descriptors leaves none open. */
	struct rlimit limit = { 32, 32 };
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (size_t i = 0; i < 64; i++)
		many[i] = a;
	v = good, v.fds = many, v.fd_count = 64;
	for (int i = 0; i < 3; i++)
		MMAP_FAILS(gaia_map_view(&v, sizeof v), EMFILE);
	MMAP_FAILS(gaia_mview(a, &one, 1, 0, 0), ENOTTY);
	free(many);
}

/* A daemon of recorded frames gives a view of 0x1234 bytes. */
static void recorded(const char *folder)
{
	struct gaia_segment s = { .offset = 0x5678, .length = 0x1234, .stride = 77 };
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_view_args v = { .segments = &s,
		.count = 1,
		.fds = &a,
		.fd_count = 1,
		.flags = GAIA_MAP_LAZY,
		.device = 3,
		.kind = GAIA_KIND_EMULATED };
	uint8_t *p = gaia_map_view(&v, sizeof v);
	struct gaia_info info;

	CHECK(p != MAP_FAILED && (uintptr_t)p % DEFAULT_ALIGN == 0 && p[0x1233] == 0);
	CHECK(gaia_info(p, &info, sizeof info) == 0 && info.length == 0x1234 && info.prot == PROT_READ);
	CHECK(gaia_munmap(p, 0x1234) == 0);
	s.length++; /* differs from the size in the reply */
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EPROTO);
}

/* Prints why a view fails. */
static void refused(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s = { .length = 1 };
	const struct gaia_view_args v = {
		.segments = &s, .count = 1, .fds = &a, .fd_count = 1, .kind = GAIA_KIND_EMULATED
	};

	CHECK(gaia_map_view(&v, sizeof v) == MAP_FAILED);
	printf("%d %s\n", errno, gaia_error());
}

/* On a mount */

static void bytes(const char *folder)
{
	const int fds[] = { open_in(folder, "a", O_RDONLY), open_in(folder, "b", O_RDONLY), open_in(folder, "a", O_RDWR) };
	const struct gaia_segment s[] = {
		{ .offset = 5, .length = 1 },
		{ .offset = PAGE - 1, .length = 2 },
		{ .offset = 0, .length = 3 << 20 },                              /* long */
		{ .offset = 8, .length = 12, .stride = 5000, .count = 900 },     /* strided, over page ends */
		{ .offset = 100, .length = 64, .stride = 64, .count = 100 },     /* rows that touch */
		{ .offset = PAGE, .length = PAGE },
		{ .offset = PAGE, .length = PAGE },                              /* repeated */
		{ .offset = PAGE + 17, .length = 3 * PAGE },                     /* overlapping */
		{ .offset = SIZE_A - 100, .length = 300 },                       /* over the end of the file */
		{ .offset = SIZE_A, .length = 10 },                              /* past it */
		{ .offset = UINT64_C(1) << 40, .length = 5000 },                 /* far past it */
		{ .offset = SIZE_A - 5000, .length = 7, .stride = 3000, .count = 5 },
		{ .offset = 1, .length = 1 },                                    /* before others */
	};
	const size_t n = sizeof s / sizeof s[0];
	uint32_t files[sizeof s / sizeof s[0]];

	uint8_t last[2]; /* checks that fill's bytes are those that the test wrote */
	CHECK(pread(fds[0], last, 2, SIZE_A - 1) == 1 && last[0] == byte_a(SIZE_A - 1));
	CHECK(pread(fds[1], last, 2, SIZE_B - 1) == 1 && last[0] == byte_b(SIZE_B - 1));
	int before = descriptors();
	for (size_t i = 0; i < n; i++) {
		map_and_unmap(&(struct asked){ .fds = fds, .fd_count = 1, .segments = s + i, .n = 1, .align = 1 });
		files[i] = (uint32_t)(i % 3);
	}
	for (size_t align = 1; align <= 2 << 20; align *= 8)
		map_and_unmap(&(struct asked){ .fds = fds, .fd_count = 1, .segments = s, .n = n, .align = align });
	map_and_unmap(&(struct asked){ .fds = fds, .fd_count = 3, .files = files, .segments = s, .n = n, .dev = 1 });
	map_and_unmap(
		&(struct asked){ .fds = fds, .fd_count = 3, .files = files, .segments = s, .n = n, .flags = GAIA_MAP_LAZY });
	map_and_unmap(
		&(struct asked){ .fds = fds, .fd_count = 3, .segments = s, .n = 1, .flags = GAIA_MAP_PEERS, .align = 2 << 20 });

	/* Random ones. */
	for (int round = 0; round < 40; round++) {
		struct gaia_segment r[20];
		uint32_t of[20];
		size_t many = 1 + below(20);

		for (size_t i = 0; i < many; i++) {
			uint64_t length = 1 + below(round % 2 == 0 ? 300 : 20000), rows = below(4) == 0 ? 1 + below(50) : below(2);

			r[i] = (struct gaia_segment){ .offset = below(below(2) == 0 ? SIZE_B : SIZE_A + 1000), .length = length,
						      .stride = length + below(3) * below(9000), .count = rows };
			of[i] = (uint32_t)below(3);
		}
		map_and_unmap(&(struct asked){ .fds = fds, .fd_count = 3, .files = of, .segments = r, .n = many,
					       .align = (size_t)1 << below(14), .dev = (int)below(2) });
	}
	CHECK(descriptors() < before + 10); /* connections keep theirs, and libcuda may keep a few */
}

/* After an acquire, a view shows what others wrote. Nothing can be stored into it. */
static void coherent(const char *folder)
{
	const int fds[] = { open_in(folder, "a", O_RDWR), open_in(folder, "b", O_RDWR) };
	const struct gaia_segment s[] = { { .offset = 1000, .length = 10000 },
					  { .offset = 5050, .length = 20, .stride = 200, .count = 20 },
					  { .offset = 3, .length = 9000 },
					  { .offset = 1000, .length = 10000 } };
	const uint32_t files[] = { 0, 1, 1, 0 };
	const struct asked asked = { .fds = fds, .fd_count = 2, .files = files, .segments = s, .n = 4 };
	uint64_t at[4];
	size_t size;
	uint8_t *p = map(&asked, &size), *want, zero;

	CHECK(gaia_view_layout(s, 4, 0, at, NULL) == 0);
	CHECK(pwrite(fds[0], "written", 7, 1005) == 7 && pwrite(fds[1], "b", 1, 5255) == 1);
	CHECK(gaia_macquire(p, size, 0) == 0);
	CHECK(memcmp(p + 5, "written", 7) == 0 && memcmp(p + at[3] + 5, "written", 7) == 0 && p[at[1] + 25] == 'b');
	want = fill(fds, files, s, 4, DEFAULT_ALIGN, &size);
	same(p, want, size);
	free(want);

	/* Stores of this and of another device; one range is released without an acquire of the rest. */
	for (int dev = 0; dev < 2; dev++) {
		struct gaia_map_args args = { .length = 4 * PAGE, .fd = fds[0], .prot = PROT_READ | PROT_WRITE, .device = dev,
					      .kind = kind };
		uint8_t *q = gaia_map(&args, sizeof args);

		CHECK(q != MAP_FAILED);
		memcpy(q + 2000, dev == 0 ? "here " : "there", 5);
		CHECK(gaia_mrelease(q, 4 * PAGE, dev) == 0);
		CHECK(gaia_macquire(p + 1000, 5, 0) == 0);
		CHECK(memcmp(p + 1000, dev == 0 ? "here " : "there", 5) == 0);
		CHECK(gaia_macquire_async(p + at[3], 10000, 0, NULL) == 0);
		if (kind == GAIA_KIND_EMULATED)
			CHECK(memcmp(p + at[3] + 1000, dev == 0 ? "here " : "there", 5) == 0);
		CHECK(gaia_munmap(q, 4 * PAGE) == 0);
	}

	/* A store of a program that mapped the file is only in the kernel. */
	uint8_t *mapped = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	CHECK(mapped != MAP_FAILED);
	memcpy(mapped + 3000, "stored", 6);
	CHECK(gaia_macquire(p, size, 0) == 0);
	CHECK(memcmp(p + 2000, "stored", 6) == 0 && memcmp(p + at[3] + 2000, "stored", 6) == 0);
	memcpy(mapped + 3000, "STORED", 6);
	size_t again_size;
	uint8_t *again = map(&asked, &again_size); /* a new map flushes it, too */
	CHECK(memcmp(again + 2000, "STORED", 6) == 0);
	CHECK(gaia_munmap(again, again_size) == 0);
	CHECK(munmap(mapped, 4 * PAGE) == 0);
	mapped = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0); /* ends of its part of b */
	CHECK(mapped != MAP_FAILED);
	mapped[3] = 'X', mapped[9002] = 'Y';
	CHECK(gaia_macquire(p, size, 0) == 0);
	CHECK(p[at[2]] == 'X' && p[at[2] + 8999] == 'Y');
	CHECK(munmap(mapped, 3 * PAGE) == 0);

	/* A file that is cut and made longer. */
	CHECK(ftruncate(fds[1], 5000) == 0);
	CHECK(gaia_macquire(p, size, 0) == 0);
	want = fill(fds, files, s, 4, DEFAULT_ALIGN, &size);
	CHECK(want[at[2] + 4996] != 0 && want[at[2] + 4997] == 0);
	same(p, want, size);
	free(want);
	CHECK(pwrite(fds[1], "far", 3, SIZE_B - 3) == 3);
	CHECK(gaia_macquire(p, size, 0) == 0);
	want = fill(fds, files, s, 4, DEFAULT_ALIGN, &size);
	same(p, want, size);
	free(want);

	/* A view is read-only. */
	CHECK(gaia_mrelease(p, size, 0) == 0);
	CHECK(gaia_mrelease_async(p, 1, 0, NULL) == 0);
	CHECK(gaia_msync(p, size, MS_SYNC) == 0 && gaia_msync(p, size, MS_ASYNC) == 0 &&
		gaia_msync(p, size, MS_INVALIDATE) == 0);
	for (int advice = GAIA_MADV_NORMAL; advice <= GAIA_MADV_DONTNEED; advice++)
		CHECK(gaia_madvise(p, size, advice) == 0);
	CHECK(gaia_async_error(p) == 0);
	if (kind == GAIA_KIND_EMULATED) {
		CHECK(mprotect(p, PAGE, PROT_READ | PROT_WRITE) == -1);
		int zeros = open_file("/dev/zero", O_RDONLY);
		CHECK(read(zeros, p, 1) == -1 && errno == EFAULT); /* the kernel stores no more than the program could */
		close(zeros);
	}
	CHECK(pread(fds[0], &zero, 1, 1000) == 1 && p[0] == zero);
	FAILS(gaia_macquire(p, size, 1), ENODEV);
	FAILS(gaia_macquire(p, 64 * PAGE, 0), EINVAL);
	FAILS(gaia_munmap(p, PAGE), EINVAL);
	close(fds[0]); /* the view has its own descriptors */
	close(fds[1]);
	CHECK(gaia_macquire(p, size, 0) == 0);
	CHECK(gaia_munmap(p, size) == 0);
}

/* address_space returns how many bytes of address space the process uses. */
static size_t address_space(void)
{
	FILE *f = fopen("/proc/self/statm", "r");
	size_t pages = 0;

	CHECK(f != NULL && fscanf(f, "%zu", &pages) == 1);
	fclose(f);
	return pages * PAGE;
}

static void addresses(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s = { .offset = 77, .length = 3 * PAGE };
	const size_t align = 2 << 20;
	uint8_t *range = mmap(NULL, 3 * align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	uint8_t *place = range + (align - (uintptr_t)range % align) % align;
	struct gaia_view_args v = { .segments = &s, .count = 1, .fds = &a, .fd_count = 1, .align = align, .address = place,
				    .flags = MAP_FIXED };
	uint8_t *p = gaia_map_view(&v, sizeof v), *q;

	CHECK(p == place && p[0] == byte_a(77) && p[3 * PAGE - 1] == byte_a(77 + 3 * PAGE - 1));
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EEXIST); /* over a mapping of ours */
	v.flags = MAP_FIXED_NOREPLACE;
	v.address = place + align;
	MMAP_FAILS(gaia_map_view(&v, sizeof v), EEXIST);
	v.flags = 0;
	v.address = place + PAGE; /* a hint that cannot be used as it is */
	v.align = 1 << 20;
	size_t before = address_space();
	for (int i = 0; i < 1000; i++) {
		q = gaia_map_view(&v, sizeof v);
		CHECK(q != MAP_FAILED && (uintptr_t)q % v.align == 0 && q[1] == byte_a(78));
		CHECK(gaia_munmap(q, 3 * PAGE) == 0);
	}
	/* The 1 MiB that each alignment took was given back. Threads of the library take some address space, too. */
	CHECK(address_space() < before + (400 << 20));
	CHECK(gaia_munmap(p, 3 * PAGE) == 0);
}

/* As many segments as a view may have, of 8 bytes each, from the last to the first; and as many rows as it may have. */
static void many(const char *folder)
{
	enum { N = 1 << 19 };
	int a = open_in(folder, "a", O_RDONLY);
	struct gaia_segment *s = calloc(N, sizeof *s);
	uint8_t *p;

	CHECK(s != NULL);
	for (uint64_t i = 0; i < N; i++)
		s[i] = (struct gaia_segment){ .offset = 8 * (N - 1 - i) + 1, .length = 8 };
	p = gaia_mview(a, s, N, 16, 0);
	CHECK(p != MAP_FAILED);
	for (uint64_t i = 0; i < N; i++)
		for (uint64_t j = 0; j < 8; j++)
			CHECK(p[16 * i + j] == byte_a(s[i].offset + j) && (i == N - 1 || p[16 * i + 8 + j] == 0));
	CHECK(gaia_macquire(p, 16 * N - 8, 0) == 0);
	CHECK(gaia_munmap(p, 16 * N - 8) == 0);
	free(s);

	/* As many rows, most of them past the end of the file. */
	const struct gaia_segment rows = { .offset = 2, .length = 1, .stride = 3, .count = 1 << 24 };
	p = gaia_mview(a, &rows, 1, 0, 0);
	CHECK(p != MAP_FAILED);
	for (uint64_t i = 0; i < 1 << 24; i++)
		CHECK(p[i] == (2 + 3 * i < SIZE_A ? byte_a(2 + 3 * i) : 0));
	CHECK(gaia_munmap(p, 1 << 24) == 0);
}

/* Makes as many concurrent views of the same bytes as asked for, and waits. */
static void stay(const char *folder, int views)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s[] = { { .offset = 12345, .length = 2 << 20 },
		{ .offset = 7, .length = 99, .stride = 1000, .count = 30 } };

	for (int i = 0; i < views; i++) {
		size_t size;

		(void)map(&(struct asked){ .fds = &a, .fd_count = 1, .segments = s, .n = 2 }, &size);
	}
	say_and_wait("mapped");
}

static const char *thread_folder;

static void *thread_main(void *argument)
{
	const int fds[] = { open_in(thread_folder, "a", O_RDONLY), open_in(thread_folder, "b", O_RDONLY) };
	const uint32_t files[] = { 0, 1, 0 };
	const struct gaia_segment s[] = { { .offset = 100 * (uintptr_t)argument, .length = 70000 },
		{ .offset = 9, .length = 5000 }, { .offset = 1, .length = 2, .stride = 4, .count = 100 } };

	for (int i = 0; i < 10; i++) {
		size_t size;
		uint8_t *p = map(
			&(struct asked){ .fds = fds, .fd_count = 2, .files = files, .segments = s, .n = 3, .dev = i % 2 }, &size);

		CHECK(gaia_macquire(p, size, i % 2) == 0);
		CHECK(gaia_munmap(p, size) == 0);
	}
	close(fds[0]);
	close(fds[1]);
	return NULL;
}

static void threads(const char *folder)
{
	pthread_t all[8];

	thread_folder = folder;
	for (size_t i = 0; i < 8; i++)
		CHECK(pthread_create(&all[i], NULL, thread_main, (void *)(i / 2)) == 0);
	for (size_t i = 0; i < 8; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
}

/* A child has the memory but cannot use the calls. */
static void forks(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s = { .offset = 5, .length = 6000 };
	uint8_t *p = gaia_mview(a, &s, 1, 0, 0), *q;
	pid_t child;

	CHECK(p != MAP_FAILED);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(p[0] == byte_a(5));
		FAILS(gaia_macquire(p, 1, 0), ECHILD);
		q = gaia_mview(a, &s, 1, 0, 0);
		CHECK(q != MAP_FAILED && q[5999] == byte_a(6004));
		CHECK(gaia_munmap(q, 6000) == 0 && gaia_munmap(p, 6000) == 0);
		_exit(0);
	}
	wait_for(child);
	CHECK(gaia_macquire(p, 6000, 0) == 0 && p[5999] == byte_a(6004));
	CHECK(gaia_munmap(p, 6000) == 0);
}

/* Signals come while views are made. */
static void interrupted(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY), done = 0, tries = 0;
	struct gaia_segment *s = calloc(5000, sizeof *s);

	CHECK(s != NULL);
	for (uint64_t i = 0; i < 5000; i++)
		s[i] = (struct gaia_segment){ .offset = i, .length = 400 };
	interrupts(true, 0);
	while (done < 30) {
		size_t n = tries % 2 == 0 ? 1 : 5000;
		uint8_t *p = gaia_mview(a, s, n, 512, 0);

		CHECK(++tries < 3000);
		CHECK(p != MAP_FAILED || errno == EINTR);
		if (p == MAP_FAILED)
			continue;
		CHECK(p[512 * (n - 1)] == byte_a(n - 1));
		done++;
		CHECK(gaia_munmap(p, 512 * (n - 1) + 400) == 0 || errno == EINPROGRESS);
	}
	interrupts(false, 0);
	say_and_wait("done");
	free(s);
}

/* The daemon stops at the first word and is back at the second. */
static void restart(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s = { .offset = 77, .length = 5000 };
	uint8_t *p = gaia_mview(a, &s, 1, 0, 0), *q;

	CHECK(p != MAP_FAILED && p[0] == byte_a(77));
	say_and_wait("mapped");
	FAILS(gaia_macquire(p, 5000, 0), ENOTCONN);
	CHECK(p[4999] == byte_a(77 + 4999)); /* the memory is still there */
	say_and_wait("lost");
	q = gaia_mview(a, &s, 1, 0, 0);
	CHECK(q != MAP_FAILED && q[0] == byte_a(77) && gaia_macquire(q, 5000, 0) == 0);
	FAILS(gaia_munmap(p, 5000), ENOTCONN);
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
	say_and_wait("mapped again"); /* the daemon is replaced while the connection is kept and unused */
	p = gaia_mview(a, &s, 1, 4096, 1);
	CHECK(p != MAP_FAILED && p[1] == byte_a(78) && gaia_munmap(p, 5000) == 0);
	FAILS(gaia_munmap(q, 5000), ENOTCONN);
}

/* The file changes directly in SOURCE before each word is answered. */
static void source(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment s[] = { { .offset = 1 << 20, .length = 100000 },
					  { .offset = 0, .length = 3, .stride = 999, .count = 2000 },
					  { .offset = SIZE_A - 50, .length = 100 } };
	size_t size;
	uint8_t *p = map(&(struct asked){ .fds = &a, .fd_count = 1, .segments = s, .n = 3 }, &size), *want;

	for (int i = 0; i < 4; i++) {
		say_and_wait("waiting");
		CHECK(gaia_macquire(p, size, 0) == 0);
		want = fill(&a, NULL, s, 3, DEFAULT_ALIGN, &size);
		same(p, want, size);
		free(want);
	}
	CHECK(gaia_munmap(p, size) == 0);
}

/* The device is lost before the word is answered. */
static void lost(const char *folder)
{
	int a = open_in(folder, "a", O_RDWR);
	const struct gaia_segment s = { .length = 5000 };
	uint8_t *p = gaia_mview(a, &s, 1, 0, 0), *q = gaia_mview(a, &s, 1, 0, 1);

	CHECK(p != MAP_FAILED && q != MAP_FAILED);
	say_and_wait("mapped");
	CHECK(pwrite(a, "new", 3, 0) == 3); /* so that there is something to copy */
	FAILS(gaia_macquire(p, 5000, 0), ENODEV);
	MMAP_FAILS(gaia_mview(a, &s, 1, 512, 0), ENODEV);
	CHECK(gaia_munmap(p, 5000) == 0); /* there is nothing to release */
	CHECK(gaia_macquire(q, 5000, 1) == 0 && q[4999] == byte_a(4999) && gaia_munmap(q, 5000) == 0);
}

/* The files of the second folder are of another mount. */
static void two_mounts(const char *folder, const char *other)
{
	const int fds[] = { open_in(folder, "a", O_RDONLY), open_in(other, "a", O_RDONLY) };
	const struct gaia_segment s = { .length = 1 };
	const struct gaia_view_args v = { .segments = &s, .count = 1, .fds = fds, .fd_count = 2 };

	MMAP_FAILS(gaia_map_view(&v, sizeof v), EXDEV);
}

/* The device's budget is 64 MiB. */
static void too_large(const char *folder)
{
	int a = open_in(folder, "a", O_RDONLY);
	const struct gaia_segment large = { .length = UINT64_C(1) << 36 }, small = { .length = 1 };
	uint8_t *p;

	MMAP_FAILS(gaia_mview(a, &large, 1, 0, 0), ENOMEM);
	MMAP_FAILS(gaia_mview(a, &small, 1, 0, 9), ENODEV);
	p = gaia_mview(a, &small, 1, 0, 0);
	CHECK(p != MAP_FAILED && p[0] == byte_a(0) && gaia_munmap(p, 1) == 0);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(const char *folder);
	} scenarios[] = {
		{ "layout", layout }, { "bad", bad }, { "recorded", recorded }, { "refused", refused }, { "bytes", bytes },
		{ "coherent", coherent }, { "addresses", addresses }, { "many", many }, { "threads", threads }, { "forks", forks },
		{ "interrupted", interrupted }, { "too-large", too_large }, { "restart", restart }, { "source", source },
		{ "lost", lost },
	};

	CHECK(argc >= 3);
	if (getenv("GAIAFS_TEST_GRANTS") != NULL)
		gaiafs_request_grant = ask_for_grant;
	kind = getenv("GAIAFS_TEST_CUDA") != NULL ? GAIA_KIND_CUDA : GAIA_KIND_EMULATED;
	if (argc == 4 && strcmp(argv[1], "stay") == 0)
		stay(argv[2], atoi(argv[3]));
	else if (argc == 4 && strcmp(argv[1], "two-mounts") == 0)
		two_mounts(argv[2], argv[3]);
	else {
		for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++)
			if (strcmp(argv[1], scenarios[i].name) == 0) {
				scenarios[i].run(argv[2]);
				return 0;
			}
		CHECK(!"a scenario of that name");
	}
	return 0;
}
