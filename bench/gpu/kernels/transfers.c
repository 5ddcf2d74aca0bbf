/*
 * Urgent transfers to a device, beside seven programs that keep the link to it busy.
 *
 *   transfers make FILE MIB
 *   transfers urgent ROUNDS N FILE BULK...
 *
 * urgent starts a process for each BULK. In each round, each process maps its file lazily, and asks for all of it at
 * once with GAIA_MADV_WILLNEED. Meanwhile urgent acquires N times 2 MiB of FILE that the device does not have, checks
 * them, and pauses for a millisecond each time. It prints median, 95th percentile and maximum in microseconds, and the
 * GB/s of read-ahead, as the daemon counts it. FILE and BULK are at the top of a mount with one device; make wrote
 * them. FILE has N times 2 MiB. Building it does not need CUDA.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "gaiafs.h"

#define MIB ((size_t)1 << 20)
#define CHECK(ok) \
	do { \
		if (!(ok)) { \
			fprintf(stderr, "transfers: line %d: %s: %s; %s\n", __LINE__, #ok, strerror(errno), gaia_error()); \
			exit(1); \
		} \
	} while (0)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void make(const char *path, size_t mib)
{
	uint64_t *block = malloc(MIB);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0 && block != NULL);
	for (size_t i = 0; i < mib; i++) {
		for (size_t k = 0; k < MIB / 8; k++)
			block[k] = (i << 17 | k) * UINT64_C(0x9e3779b97f4a7c15);
		CHECK(write(fd, block, MIB) == (ssize_t)MIB);
	}
	close(fd);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* bulk is a process that has a file read ahead whenever it is told to. */
struct bulk {
	int to, from; /* pipes */
};

/* serve maps the file and sends a byte. With the next byte that it gets, it asks for the whole file; with the one after
 * that, it unmaps the file, and begins again. */
static void serve(const char *path, int to, int from)
{
	int fd = open(path, O_RDONLY);
	struct gaia_map_args args = {.fd = fd, .prot = PROT_READ, .flags = GAIA_MAP_LAZY | GAIA_MAP_HOLD};
	off_t size = lseek(fd, 0, SEEK_END);
	char byte = 0;

	CHECK(fd >= 0 && size > 0);
	args.length = (uint64_t)size;
	for (;;) {
		void *p = gaia_map(&args, sizeof args);

		CHECK(p != MAP_FAILED && gaia_madvise(p, args.length, GAIA_MADV_DONTNEED) == 0);
		CHECK(write(to, &byte, 1) == 1);
		if (read(from, &byte, 1) != 1)
			exit(0);
		CHECK(gaia_madvise(p, args.length, GAIA_MADV_WILLNEED) == 0);
		if (read(from, &byte, 1) != 1)
			exit(0);
		CHECK(gaia_munmap(p, args.length) == 0);
	}
}

static struct bulk start(const char *path)
{
	int to[2], from[2];
	pid_t pid;

	CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGTERM);
		serve(path, from[1], to[0]);
	}
	close(to[0]);
	close(from[1]);
	return (struct bulk){to[1], from[0]};
}

/* await waits until all processes have mapped their files. */
static void await(const struct bulk *bulks, size_t n)
{
	char byte;

	for (size_t i = 0; i < n; i++)
		CHECK(read(bulks[i].from, &byte, 1) == 1);
}

/* tell makes all processes go on. */
static void tell(const struct bulk *bulks, size_t n)
{
	for (size_t i = 0; i < n; i++)
		CHECK(write(bulks[i].to, "", 1) == 1);
}

/* ahead returns how many bytes read-ahead has brought to the device so far. mount is a descriptor of the mountpoint. */
static double ahead(int mount)
{
	char *status = gaia_status(mount), *at, *end;
	double bytes = 0;

	CHECK(status != NULL);
	at = strstr(status, "\"prefetch\"");
	end = at == NULL ? NULL : strchr(at, '}');
	if (end != NULL) {
		*end = 0;
		at = strstr(at, "\"way\":\"in\"") == NULL ? NULL : strstr(at, "\"bytes\":");
		bytes = at == NULL ? 0 : strtod(at + strlen("\"bytes\":"), NULL);
	}
	free(status);
	return bytes;
}

/* acquire acquires the next piece, checks it, and returns the microseconds that it took. */
static double acquire(uint8_t *p, size_t piece, uint64_t first, uint64_t *got)
{
	double begin = now(), took;

	CHECK(gaia_macquire(p, piece, 0) == 0);
	took = (now() - begin) * 1e6;
	CHECK(gaia_read(p, got, piece) == 0);
	for (size_t k = 0; k < piece / 8; k++)
		CHECK(got[k] == (first + k) * UINT64_C(0x9e3779b97f4a7c15));
	usleep(1000);
	return took;
}

/* one_round returns the seconds that the acquires of a round took. bytes gets what read-ahead brought meanwhile. */
static double one_round(int mount, int fd, size_t n, const struct bulk *bulks, size_t count, double *took,
			double *bytes)
{
	const size_t piece = 2 * MIB;
	uint64_t *got = malloc(piece);
	uint8_t *p = gaia_mmap(NULL, n * piece, PROT_READ, MAP_SHARED | GAIA_LAZY, fd, 0, 0);
	double begin, seconds, before, after;

	CHECK(got != NULL && p != MAP_FAILED);
	CHECK(gaia_madvise(p, n * piece, GAIA_MADV_DONTNEED) == 0);
	CHECK(gaia_madvise(p, n * piece, GAIA_MADV_RANDOM) == 0); /* no read-ahead for this one */
	await(bulks, count);
	tell(bulks, count);
	usleep(10000);
	before = ahead(mount);
	begin = now();
	for (size_t i = 0; i < n; i++)
		took[i] = acquire(p + i * piece, piece, i * piece / 8, got);
	after = ahead(mount);
	seconds = now() - begin;
	usleep(10000);
	if (count > 0 && ahead(mount) == after)
		fprintf(stderr, "transfers: read-ahead was over too early\n");
	*bytes += after - before;
	tell(bulks, count);
	CHECK(gaia_munmap(p, n * piece) == 0);
	free(got);
	return seconds;
}

static void urgent(size_t rounds, size_t n, const char *path, char **files, size_t count)
{
	double *took = calloc(rounds * n, sizeof *took), seconds = 0, bytes = 0;
	struct bulk *bulks = calloc(count + 1, sizeof *bulks);
	int mount, fd;

	CHECK(took != NULL && bulks != NULL);
	for (size_t i = 0; i < count; i++)
		bulks[i] = start(files[i]);
	fd = open(path, O_RDONLY);
	mount = open(dirname(strdup(path)), O_RDONLY);
	CHECK(fd >= 0 && mount >= 0);
	for (size_t i = 0; i < rounds; i++)
		seconds += one_round(mount, fd, n, bulks, count, took + i * n, &bytes);
	n *= rounds;
	qsort(took, n, sizeof *took, ascending);
	printf("acquire 2 MiB: median %.0f us, 95 of 100 %.0f us, longest %.0f us; read-ahead %.2f GB/s\n",
	       took[n / 2], took[n * 95 / 100], took[n - 1], bytes / seconds / 1e9);
	await(bulks, count);
}

int main(int argc, char **argv)
{
	if (argc == 4 && strcmp(argv[1], "make") == 0)
		make(argv[2], strtoul(argv[3], NULL, 10));
	else if (argc >= 5 && strcmp(argv[1], "urgent") == 0)
		urgent(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10), argv[4], argv + 5, (size_t)argc - 5);
	else
		return fprintf(stderr, "transfers make FILE MIB | urgent ROUNDS N FILE BULK...\n"), 2;
	return 0;
}
