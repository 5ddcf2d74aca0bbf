/* The kinds of device memory. A kind is a row of functions, so that another one is another row. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Emulated devices: an extent is a memfd, or a read-only descriptor of one. */

static int host_reserve(void *addr, size_t n, int flags, void **base)
{
	int fixed = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
	void *p = mmap(addr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);

	if (p == MAP_FAILED)
		return errno;
	if ((flags & MAP_FIXED_NOREPLACE) && p != addr) { /* kernels before 4.17 take it for a hint */
		munmap(p, n);
		return EEXIST;
	}
	*base = p;
	return 0;
}

/* host_place replaces part of a range that host_reserve made and that no program knows of yet. */
static int host_place(void *at, size_t n, bool writable, int fd, int64_t from)
{
	int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;

	return mmap(at, n, prot, MAP_SHARED | MAP_FIXED, fd, (off_t)from) == MAP_FAILED ? errno : 0;
}

static int host_drop(void *base, size_t n)
{
	return munmap(base, n) == 0 ? 0 : errno;
}

static const struct gaiafs_kind kinds[] = {
	{ .number = 1, .reserve = host_reserve, .place = host_place, .drop = host_drop },
};

const struct gaiafs_kind *gaiafs_kind_of(uint32_t number)
{
	for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
		if (kinds[i].number == number)
			return &kinds[i];
	return NULL;
}
