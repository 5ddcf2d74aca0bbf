/* Groups: stores into several ranges that are released together, and acquires of several ranges at one version. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANGES = 1 << 17, WAIT_SLICE = 500 /* milliseconds that the daemon waits for one request */ };

struct gaia_group {
	struct gaiafs_conn *conn; /* of the first mapping, which has a reference on it */
	uint64_t number;
	size_t n;
	struct part {
		struct gaiafs_mapping *m; /* with a reference */
		uint64_t off, len;
	} part[];
};

static void free_group(struct gaia_group *g)
{
	if (g == NULL)
		return;
	for (size_t i = 0; i < g->n; i++)
		gaiafs_mapping_unref(g->part[i].m);
	free(g);
}

/* find_all finds the mappings of ranges, and checks that they are of one mount. NULL: *f says why. */
static struct gaia_group *find_all(const struct gaia_range *ranges, size_t n, struct gaiafs_fail *f)
{
	struct gaia_group *g;

	if (ranges == NULL || n == 0 || n > MAX_RANGES) {
		(void)gaiafs_failed(f, EINVAL, "there are %zu ranges, and a request has 1 to %d", n, MAX_RANGES);
		return NULL;
	}
	g = calloc(1, sizeof *g + n * sizeof g->part[0]);
	if (g == NULL) {
		(void)gaiafs_failed(f, ENOMEM, "out of memory");
		return NULL;
	}
	for (; g->n < n && f->errnum == 0; g->n++) {
		const struct gaia_range *r = &ranges[g->n];
		struct gaiafs_mapping *m = gaiafs_find(r->address, r->length, f);

		if (m == NULL)
			break;
		g->part[g->n] = (struct part){ m, (uintptr_t)r->address - (uintptr_t)m->base, r->length };
		if (m->conn == NULL)
			(void)gaiafs_failed(f, EINVAL, "the memory is this process's alone: there is nobody to ask about it");
		else if (g->n > 0 && m->conn != g->conn)
			(void)gaiafs_failed(f, EXDEV, "the mappings are of several mounts");
		else if ((gaiafs_conn_features(m->conn) & GAIAFS_FEATURE_GROUP) == 0)
			(void)gaiafs_failed(f, ENOTSUP, "the daemon of the mount is older than this library, and has no groups");
		g->conn = m->conn;
	}
	if (f->errnum == 0)
		return g;
	free_group(g);
	return NULL;
}

/* A request that NUMBERED answers. */
struct numbered {
	struct gaiafs_request r; /* its first member */
	uint64_t number;
};

static int take_numbered(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	if (frame->header.type == GAIAFS_RESULT && gaiafs_take_result(frame, fail) != 0)
		return fail->errnum;
	if (frame->header.type != GAIAFS_NUMBERED ||
		!gaiafs_get_numbered(frame->body, frame->body_len, &((struct numbered *)r)->number))
		return gaiafs_failed(fail, EPROTO, "the daemon answered with type %#x", frame->header.type);
	return 0;
}

/* call_whole is gaiafs_call, but no signal interrupts it: an interrupted caller would not know what it began. */
static int call_whole(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r)
{
	if (gaiafs_call_begin(c, type, body, n, r) == 0)
		while (gaiafs_call_wait(c, r, -1) != 0)
			;
	return r->fail.errnum;
}

/* call_ranges sends a request with a head and the list of g's ranges. */
static int call_ranges(const struct gaia_group *g, uint16_t type, const uint8_t *head, size_t n, struct numbered *k)
{
	struct gaiafs_rest rest = { .n = n + GAIAFS_RANGES_HEAD + GAIAFS_RANGE * g->n, .memfd = -1 };
	uint8_t body[GAIAFS_MAX_BODY], *b;
	size_t size = 0;
	int err = 0;

	k->r.take = take_numbered;
	b = rest.bytes = malloc(rest.n);
	if (b == NULL)
		return gaiafs_failed(&k->r.fail, ENOMEM, "out of memory");
	memcpy(b, head, n);
	b += n;
	b += gaiafs_put_ranges(b, (uint32_t)g->n);
	for (size_t i = 0; i < g->n; i++)
		b += gaiafs_put_group_range(b, g->part[i].m->id, g->part[i].off, g->part[i].len);
	if (rest.n > GAIAFS_MAX_REQUEST - GAIAFS_HEADER) {
		err = gaiafs_memfd_of(rest.bytes, rest.n, &rest.memfd, &k->r.fail);
		size = gaiafs_put_large(body, rest.n);
	}
	if (err == 0) {
		k->r.rest = &rest;
		err = type == GAIAFS_BEGINGROUP ? call_whole(g->conn, type, body, size, &k->r) :
						  gaiafs_call(g->conn, type, body, size, &k->r);
		k->r.rest = NULL;
	}
	if (rest.memfd >= 0)
		close(rest.memfd);
	free(rest.bytes);
	return err;
}

struct gaia_group *gaia_group_begin(const struct gaia_range *ranges, size_t n)
{
	struct gaiafs_fail f = { 0 };
	struct numbered k = { 0 };
	struct gaia_group *g;
	static const uint8_t none[1];
	int state;

	gaiafs_enter(&state);
	g = find_all(ranges, n, &f);
	if (g != NULL && call_ranges(g, GAIAFS_BEGINGROUP, none, 0, &k) != 0) {
		f = k.r.fail;
		free_group(g);
		g = NULL;
	}
	if (g != NULL)
		g->number = k.number;
	return gaiafs_leave(state, f.errnum, &f) == 0 ? g : NULL;
}

/* check_group checks that this process may release g. */
static int check_group(const struct gaia_group *g, struct gaiafs_fail *f)
{
	for (size_t i = 0; i < g->n; i++) {
		const struct gaiafs_mapping *m = g->part[i].m;

		if (i > 0 && m == g->part[i - 1].m)
			continue;
		if (!gaiafs_mapping_mine(m))
			return gaiafs_failed(f, ECHILD, "the group belongs to the process that this one was forked from");
		if (!gaiafs_table_has(m->conn, m->id))
			return gaiafs_failed(f, ECANCELED, "a mapping of the group was unmapped, which aborted it");
	}
	return 0;
}

int gaia_group_release(struct gaia_group *g, uint64_t *version)
{
	struct gaiafs_fail f = { 0 };
	struct numbered k = { .r = { .take = take_numbered } };
	uint8_t body[GAIAFS_MAX_BODY];
	int state;

	gaiafs_enter(&state);
	if (g == NULL)
		(void)gaiafs_failed(&f, EINVAL, "there is no group");
	else
		(void)check_group(g, &f);
	for (size_t i = 0; f.errnum == 0 && i < g->n; i++) {
		struct gaiafs_mapping *m = g->part[i].m;

		if (i == 0 || m != g->part[i - 1].m)
			(void)m->kind->quiesce(m, GAIA_ALL_STREAMS, &f);
		if (m->writable)
			gaiafs_start_flush(m->fd, m->off + g->part[i].off, g->part[i].len);
	}
	if (f.errnum == 0 && call_whole(g->conn, GAIAFS_RELEASEGROUP, body, gaiafs_put_unmap(body, g->number), &k.r) != 0)
		f = k.r.fail;
	if (f.errnum == 0) {
		if (version != NULL)
			*version = k.number;
		free_group(g);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

void gaia_group_abort(struct gaia_group *g)
{
	struct gaiafs_fail f = { 0 };
	uint8_t body[GAIAFS_MAX_BODY];
	struct gaiafs_request r = { 0 };
	int state;

	if (g == NULL)
		return;
	gaiafs_enter(&state);
	if (gaiafs_mapping_mine(g->part[0].m)) {
		r.take = gaiafs_take_simple;
		(void)call_whole(g->conn, GAIAFS_ABORTGROUP, body, gaiafs_put_unmap(body, g->number), &r);
	}
	free_group(g);
	(void)gaiafs_leave(state, 0, &f);
}

static int64_t now_ms(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* acquire_all acquires g's ranges. It waits for version least for at most wait milliseconds. */
static int acquire_all(const struct gaia_group *g, uint64_t least, uint32_t wait, struct numbered *k)
{
	uint8_t head[GAIAFS_MAX_BODY];
	bool launder = false, any = false;

	for (size_t i = 0; i < g->n; i++) {
		if (gaiafs_flush(g->part[i].m, g->part[i].off, g->part[i].len, &launder, &k->r.fail) != 0)
			return k->r.fail.errnum;
		any = any || launder;
	}
	return call_ranges(
		g, GAIAFS_ACQUIREALL, head, gaiafs_put_acquire_all(head, least, wait, any ? GAIAFS_ACQUIRE_LAUNDER : 0), k);
}

int gaia_acquire_all(const struct gaia_range *ranges, size_t n, uint64_t least, int timeout, uint64_t *version)
{
	int64_t until = now_ms() + timeout, left = timeout;
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	for (;; left = until - now_ms()) { /* finds the mappings again each time, because they may end */
		struct numbered k = { 0 };
		struct gaia_group *g;
		uint32_t wait = timeout < 0 || left > WAIT_SLICE ? WAIT_SLICE : left > 0 ? (uint32_t)left : 0;

		f = (struct gaiafs_fail){ 0 };
		g = find_all(ranges, n, &f);
		if (g != NULL && acquire_all(g, least, wait, &k) != 0)
			f = k.r.fail;
		if (f.errnum == 0 && version != NULL)
			*version = k.number;
		free_group(g);
		if (f.errnum != ETIMEDOUT || (timeout >= 0 && left <= WAIT_SLICE))
			break;
	}
	return gaiafs_leave(state, f.errnum, &f);
}
