/* Copies: bytes into and out of a mapping's memory, and device memory that belongs to this process alone. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>

/* covers reports whether m contains the n bytes at addr. n may be 0. */
static bool covers(const struct gaiafs_mapping *m, const void *addr, uint64_t n)
{
	uint64_t at = (uintptr_t)addr - (uintptr_t)m->base;

	return (uintptr_t)addr >= (uintptr_t)m->base && at <= m->size && n <= m->size - at;
}

/* How many bytes of movable memory are copied in one bracket. */
enum { PIECE = 4 << 20 };

/* copy copies bytes into or out of m, with brackets if m's memory moves. */
static int copy(struct gaiafs_mapping *m, void *to, const void *from, size_t len, bool out, struct gaiafs_fail *f)
{
	int (*by)(struct gaiafs_mapping *, void *, const void *, size_t, struct gaiafs_fail *) =
		out ? m->kind->read : m->kind->write;
	uint64_t bracket;

	if (!m->movable)
		return by(m, to, from, len, f);
	for (size_t at = 0, n; at < len; at += n) {
		uint8_t *into = (uint8_t *)to + at;
		const uint8_t *of = (const uint8_t *)from + at;

		n = len - at < PIECE ? len - at : PIECE;
		if (gaiafs_within(m, out ? of : into, n, &bracket, f) != 0)
			return f->errnum;
		(void)by(m, into, of, n, f);
		gaiafs_without(m, bracket);
		if (f->errnum != 0)
			return f->errnum;
	}
	return 0;
}

int gaia_read(const void *addr, void *to, size_t len)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = len > 0 ? gaiafs_find(addr, len, &f) : NULL;
	if (m != NULL) {
		(void)copy(m, to, addr, len, true, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_write(void *addr, const void *from, size_t len)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = len > 0 ? gaiafs_find(addr, len, &f) : NULL;
	if (m != NULL && !m->writable)
		(void)gaiafs_failed(&f, EACCES, "the mapping is read-only");
	else if (m != NULL)
		(void)copy(m, addr, from, len, false, &f);
	if (m != NULL)
		gaiafs_mapping_unref(m);
	return gaiafs_leave(state, f.errnum, &f);
}

/* make_copies returns 0 once the copies of parts of m are in the table, at *base. */
static int make_copies(const struct gaiafs_mapping *m, size_t size, const struct gaia_copy *list, size_t count,
	void **base, struct gaiafs_fail *f)
{
	struct gaiafs_fail second;
	struct gaiafs_mapping *c;

	if (m->movable)
		return gaiafs_failed(f, EINVAL, "the memory of the mapping moves: gaia_read copies from it");
	if (size == 0 || size > SIZE_MAX - GAIAFS_PAGE)
		return gaiafs_failed(f, EINVAL, "%zu bytes cannot be had", size);
	for (size_t i = 0; i < count; i++)
		if (!covers(m, list[i].from, list[i].length) || list[i].to > size || list[i].length > size - list[i].to)
			return gaiafs_failed(f, EINVAL, "copy %zu goes past the end of the mapping or of the memory", i);
	c = gaiafs_mapping_new(-1, f);
	if (c == NULL)
		return f->errnum;
	c->len = size;
	c->size = gaiafs_whole_pages(size);
	c->dev = m->dev;
	c->writable = true;
	c->kind = m->kind;
	c->of = m->of;
	if (c->kind->copies(c, m, list, count, f) != 0) {
		if (c->gpu != NULL)
			(void)c->kind->drop(c, true, &second);
		gaiafs_mapping_unref(c);
		return f->errnum;
	}
	*base = c->base;
	gaiafs_table_ready(c);
	return 0;
}

void *gaia_copies(const void *addr, size_t size, const struct gaia_copy *copies, size_t count)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	void *base = MAP_FAILED;
	int state;

	gaiafs_enter(&state);
	m = gaiafs_find(addr, 1, &f);
	if (m != NULL) {
		(void)make_copies(m, size, copies, count, &base, &f);
		gaiafs_mapping_unref(m);
	}
	(void)gaiafs_leave(state, f.errnum, &f);
	return base;
}
