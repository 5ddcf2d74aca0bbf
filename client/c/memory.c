/*
 * The kinds of device memory, and the memory of emulated devices. A kind is a table of functions in its own file.
 * kinds.h lists the kinds.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <string.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Emulated devices: an extent is a memfd, or a read-only descriptor of one. */

static void *take_addresses(void *addr, size_t n, int fixed)
{
	return mmap(addr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

/* reserve_aligned reserves more than n bytes of address space, and gives back the excess. */
static int reserve_aligned(size_t n, size_t align, void **base)
{
	uint8_t *p = take_addresses(NULL, n + align, 0), *begin;

	if (p == MAP_FAILED)
		return errno;
	begin = p + (align - (uintptr_t)p % align) % align;
	if (begin > p)
		munmap(p, (size_t)(begin - p));
	munmap(begin + n, align - (size_t)(begin - p));
	*base = begin;
	return 0;
}

static int host_reserve(void *addr, size_t n, size_t align, int flags, void **base)
{
	int fixed = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
	void *p = take_addresses(addr, n, fixed);

	if (p == MAP_FAILED)
		return errno;
	if (align > GAIAFS_PAGE && (uintptr_t)p % align != 0) { /* not with MAP_FIXED: the address was checked */
		munmap(p, n);
		return reserve_aligned(n, align, base);
	}
	if ((flags & MAP_FIXED_NOREPLACE) && p != addr) { /* kernels before 4.17 treat addr as a hint */
		munmap(p, n);
		return EEXIST;
	}
	*base = p;
	return 0;
}

/* host_begin reserves the addresses first, so that extents can be mapped as they arrive. */
static int host_begin(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f)
{
	void *base = NULL;
	int err;

	pthread_mutex_lock(&gaiafs_table_lock);
	err = gaiafs_table_room_locked();
	/* MAP_FIXED replaces the program's own mappings, but none of ours, which other threads may be using. */
	if (err == 0 && (flags & MAP_FIXED) && gaiafs_table_overlaps_locked(addr, m->size))
		err = EEXIST;
	if (err == 0)
		err = host_reserve(addr, (size_t)m->size, (size_t)m->align, flags, &base);
	if (err == 0) {
		m->base = base;
		gaiafs_table_add_locked(m);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (err == EEXIST)
		return gaiafs_failed(f, EEXIST, "something is mapped at the address already");
	if (err != 0)
		return gaiafs_failed(f, err, "no %llu bytes of address space: %s", (unsigned long long)m->size, strerror(err));
	return 0;
}

/* host_add maps the part of the extent that lies in the mapping. The program does not know the addresses yet. */
static int host_add(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	int64_t begin = (int64_t)m->off, end = begin + (int64_t)m->size;
	int64_t from = extent->off > begin ? extent->off : begin;
	int64_t to = extent->off + extent->size < end ? extent->off + extent->size : end;
	int prot = m->writable ? PROT_READ | PROT_WRITE : PROT_READ;

	if (from >= to)
		return 0;
	if (mmap(m->base + (from - begin), (size_t)(to - from), prot, MAP_SHARED | MAP_FIXED, fd,
			(off_t)(from - extent->off)) == MAP_FAILED)
		return gaiafs_failed(f, errno, "an extent could not be mapped: %s", strerror(errno));
	return 0;
}

/* host_move maps other memory, or a hole, in the place of an extent. */
static int host_move(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	int64_t begin = (int64_t)m->off, end = begin + (int64_t)m->size;
	int64_t from = extent->off > begin ? extent->off : begin;
	int64_t to = extent->off + extent->size < end ? extent->off + extent->size : end;
	int err;

	if (from >= to)
		return gaiafs_failed(f, ERANGE, "an extent is outside of its mapping");
	if (fd >= 0 && host_add(m, extent, fd, f) == 0)
		return 0;
	err = fd >= 0 ? f->errnum : 0;
	if (take_addresses(m->base + (from - begin), (size_t)(to - from), MAP_FIXED) == MAP_FAILED && err == 0)
		err = gaiafs_failed(f, errno, "an extent could not be given back: %s", strerror(errno));
	return err;
}

static int host_finish(struct gaiafs_mapping *m, void *addr, struct gaiafs_fail *f)
{
	(void)m, (void)addr, (void)f;
	return 0;
}

static void host_leave(struct gaiafs_mapping *m)
{
	(void)munmap(m->base, (size_t)m->size);
}

static int host_drop(struct gaiafs_mapping *m, bool gently, struct gaiafs_fail *f)
{
	(void)m, (void)gently, (void)f;
	return 0;
}

/* CPU stores are done when their instruction is, so there is nothing to wait for. */
static int host_quiesce(struct gaiafs_mapping *m, gaia_stream_t stream, struct gaiafs_fail *f)
{
	(void)m, (void)stream, (void)f;
	return 0;
}

static int host_copy(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f)
{
	(void)m, (void)f;
	memcpy(to, from, n);
	return 0;
}

static int host_copies(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list,
	size_t count, struct gaiafs_fail *f)
{
	void *p = mmap(NULL, (size_t)m->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)of;
	if (p == MAP_FAILED)
		return gaiafs_failed(f, errno, "no memory for copies of %llu bytes: %s", (unsigned long long)m->size, strerror(errno));
	m->base = p;
	for (size_t i = 0; i < count; i++)
		memcpy(m->base + list[i].to, list[i].from, list[i].length);
	if (gaiafs_table_add(m, f) == 0)
		return 0;
	(void)munmap(p, (size_t)m->size);
	return f->errnum;
}

const struct gaiafs_kind gaiafs_emulated_kind = {
	.number = GAIAFS_KIND_EMULATED,
	.begin = host_begin,
	.add = host_add,
	.finish = host_finish,
	.move = host_move,
	.leave = host_leave,
	.drop = host_drop,
	.quiesce = host_quiesce,
	.read = host_copy,
	.write = host_copy,
	.copies = host_copies,
};

/* Held memory: addresses that the program must not touch. It needs no context on a GPU. */

static int held_add(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f)
{
	(void)m, (void)extent, (void)fd, (void)f;
	return 0;
}

static int held_drop(struct gaiafs_mapping *m, bool gently, struct gaiafs_fail *f)
{
	return m->gpu != NULL ? m->of->drop(m, gently, f) : 0;
}

static int held_copy(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f)
{
	(void)m, (void)to, (void)from, (void)n;
	return gaiafs_failed(f, EINVAL, "the mapping has no memory in this process");
}

static int held_copies(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list,
	size_t count, struct gaiafs_fail *f)
{
	(void)of, (void)list;
	return held_copy(m, NULL, NULL, count, f);
}

const struct gaiafs_kind gaiafs_held_kind = {
	.begin = host_begin,
	.add = held_add,
	.finish = host_finish,
	.leave = host_leave,
	.drop = held_drop,
	.quiesce = host_quiesce,
	.read = held_copy,
	.write = held_copy,
	.copies = held_copies,
};

#define SAME_NUMBER(name, NAME) _Static_assert(GAIA_KIND_##NAME == GAIAFS_KIND_##NAME, "gaiafs.h has another number");
GAIAFS_KINDS(SAME_NUMBER)

#define ROW(name, NAME) &gaiafs_##name##_kind,
static const struct gaiafs_kind *const kinds[] = { GAIAFS_KINDS(ROW) };

const struct gaiafs_kind *gaiafs_kind_of(uint32_t number)
{
	for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
		if (kinds[i]->number == number)
			return kinds[i];
	return NULL;
}

const struct gaiafs_kind *gaiafs_kind_among(int number, uint32_t among)
{
	for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
		if ((number == GAIA_KIND_ANY || kinds[i]->number == (uint32_t)number) &&
			(among & (1u << (kinds[i]->number - 1))) != 0)
			return kinds[i];
	return NULL;
}
