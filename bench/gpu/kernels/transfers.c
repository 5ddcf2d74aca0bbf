/*
 * A program that reads from a device while others keep the link to it busy.
 *
 *   transfers make FILE MIB
 *   transfers load FILE MIB SECONDS   maps one 64 MiB part of the file after another, and prints GB/s, and the
 *                                     milliseconds that mapping and unmapping took on average
 *   transfers read FILE READS         stores into the file on the device, releases, and reads 2 MiB at a time with
 *                                     read(2); prints median, 95th percentile and maximum in microseconds
 *
 * FILE is on a mount. Building it does not need CUDA.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

static void load(const char *path, size_t mib, double seconds)
{
	int fd = open(path, O_RDONLY);
	const size_t part = 64;
	double begin, took, mapping = 0, unmapping = 0;
	size_t n = 0;

	CHECK(fd >= 0 && mib >= part);
	for (begin = now(); (took = now() - begin) < seconds; n++) {
		size_t at = n % (mib / part) * part * MIB;
		double asked = now(), mapped;
		void *p = gaia_mmap(NULL, part * MIB, PROT_READ, MAP_SHARED, fd, (off_t)at, 0);

		CHECK(p != MAP_FAILED);
		mapped = now();
		CHECK(gaia_munmap(p, part * MIB) == 0);
		mapping += mapped - asked;
		unmapping += now() - mapped;
	}
	printf("load %.2f GB/s, map %.2f ms, unmap %.2f ms\n", (double)(n * part * MIB) / took / 1e9,
	       1e3 * mapping / (double)n, 1e3 * unmapping / (double)n);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void read_back(const char *path, size_t reads)
{
	const size_t piece = 2 * MIB;
	uint8_t *block = malloc(piece), *got = malloc(piece);
	double *took = calloc(reads, sizeof *took);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	uint8_t *p;

	CHECK(fd >= 0 && block != NULL && got != NULL && took != NULL && ftruncate(fd, (off_t)(reads * piece)) == 0);
	p = gaia_mmap(NULL, reads * piece, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0, 0);
	CHECK(p != MAP_FAILED);
	for (size_t i = 0; i < reads; i++) {
		memset(block, (int)(i % 251 + 1), piece);
		CHECK(gaia_write(p + i * piece, block, piece) == 0);
	}
	CHECK(gaia_mrelease(p, reads * piece, 0) == 0);
	for (size_t i = 0; i < reads; i++) {
		double begin = now();

		CHECK(pread(fd, got, piece, (off_t)(i * piece)) == (ssize_t)piece);
		took[i] = (now() - begin) * 1e6;
		memset(block, (int)(i % 251 + 1), piece);
		CHECK(memcmp(block, got, piece) == 0);
		usleep(2000);
	}
	qsort(took, reads, sizeof *took, ascending);
	printf("read 2 MiB: median %.0f us, 95 of 100 %.0f us, longest %.0f us\n", took[reads / 2],
	       took[reads * 95 / 100], took[reads - 1]);
	CHECK(gaia_munmap(p, reads * piece) == 0);
}

int main(int argc, char **argv)
{
	if (argc == 4 && strcmp(argv[1], "make") == 0)
		make(argv[2], strtoul(argv[3], NULL, 10));
	else if (argc == 5 && strcmp(argv[1], "load") == 0)
		load(argv[2], strtoul(argv[3], NULL, 10), atof(argv[4]));
	else if (argc == 4 && strcmp(argv[1], "read") == 0)
		read_back(argv[2], strtoul(argv[3], NULL, 10));
	else
		return fprintf(stderr, "transfers make FILE MIB | load FILE MIB SECONDS | read FILE READS\n"), 2;
	return 0;
}
