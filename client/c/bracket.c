/*
 * Brackets: gaia_use asks for the memory of what a launch uses, gaia_done gives it back, and move.c has it at its
 * addresses in between. A bracket is its thread's until gaia_done, and then nobody's: what is left to do is to tell the
 * daemon.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A bracket. */
struct bracket {
	struct gaiafs_job job;
	struct bracket *outer; /* the thread's, opened before */
	struct gaiafs_mapping *m; /* one that it uses; NULL: nothing moves */
	gaia_stream_t stream;
	uint64_t id;
};

/* The thread's open brackets, the last one first. */
static _Thread_local struct bracket *open_brackets;

static uint64_t next_id; /* atomic */

static void end(struct bracket *b)
{
	if (b->m != NULL) {
		if (gaiafs_mapping_mine(b->m))
			gaiafs_without(b->m, b->id);
		gaiafs_mapping_unref(b->m);
	}
	free(b);
}

static void end_job(struct gaiafs_job *j)
{
	end((struct bracket *)j); /* its first member */
}

/* stream_done is a host function of CUDA's, which waits for nothing. */
static void stream_done(void *argument)
{
	gaiafs_post(argument);
}

/* find_all finds the mappings of the ranges, with references, which the caller gives back, also after a failure. *moving is how
 * many move; they are of one connection and device. */
static int find_all(const struct gaia_range *ranges, size_t n, struct gaiafs_mapping **all, size_t *moving, struct gaiafs_fail *f)
{
	const struct gaiafs_mapping *first = NULL;

	*moving = 0;
	for (size_t i = 0; i < n; i++) {
		all[i] = gaiafs_find(ranges[i].address, ranges[i].length, f);
		if (all[i] == NULL)
			return f->errnum;
		if (!all[i]->movable)
			continue;
		if (first == NULL)
			first = all[i];
		if (all[i]->conn != first->conn || all[i]->dev != first->dev)
			return gaiafs_failed(f, EINVAL, "a bracket uses mappings of one mount on one device: not of device %d and %d",
					     first->dev, all[i]->dev);
		(*moving)++;
	}
	return 0;
}

/* ask has the daemon begin a bracket. */
static int ask(struct bracket *b, const struct gaia_range *ranges, size_t n, struct gaiafs_mapping *const *all, size_t moving,
	       uint32_t patience, struct gaiafs_fail *f)
{
	size_t size = GAIAFS_USE_HEAD + moving * GAIAFS_USE_RANGE, at = GAIAFS_USE_HEAD;
	uint8_t *body = malloc(size);
	int err;

	if (body == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	gaiafs_put_use(body, b->id, open_brackets != NULL ? GAIAFS_USE_NESTED : 0, patience, (uint32_t)moving);
	for (size_t i = 0; i < n; i++)
		if (all[i]->movable)
			at += gaiafs_put_use_range(body + at, all[i]->id, (uint64_t)((uintptr_t)ranges[i].address - (uintptr_t)all[i]->base),
						   ranges[i].length);
	err = gaiafs_simple_long(b->m->conn, GAIAFS_USE, body, size, f);
	free(body);
	return err;
}

static int use(const struct gaia_range *ranges, size_t n, gaia_stream_t stream, uint32_t patience, struct gaiafs_fail *f)
{
	struct gaiafs_mapping **all;
	struct bracket *b;
	size_t moving = 0;
	int err;

	if (n == 0 || ranges == NULL)
		return gaiafs_failed(f, EINVAL, "a bracket uses at least one range");
	if (n > GAIAFS_MOST_RANGES)
		return gaiafs_failed(f, EINVAL, "a bracket of %zu ranges; it has at most %d", n, GAIAFS_MOST_RANGES);
	if (gaiafs_prepare_work(f) != 0)
		return f->errnum;
	all = calloc(n, sizeof *all);
	b = calloc(1, sizeof *b);
	if (all == NULL || b == NULL) {
		free(all);
		free(b);
		return gaiafs_failed(f, ENOMEM, "out of memory");
	}
	*b = (struct bracket){ .job = { .run = end_job }, .stream = stream };
	b->id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);
	err = find_all(ranges, n, all, &moving, f);
	for (size_t i = 0; i < n && all[i] != NULL; i++) {
		if (err == 0 && b->m == NULL && all[i]->movable)
			b->m = all[i];
	}
	if (err == 0 && moving > 0) {
		err = ask(b, ranges, n, all, moving, patience, f);
		if (err == EINTR) /* it may be granted all the same */
			gaiafs_without(b->m, b->id);
	}
	for (size_t i = 0, kept = err != 0; i < n && all[i] != NULL; i++)
		if (all[i] == b->m && !kept)
			kept = 1; /* the bracket's */
		else
			gaiafs_mapping_unref(all[i]);
	free(all);
	if (err != 0) {
		free(b);
		return err;
	}
	b->outer = open_brackets;
	open_brackets = b;
	return 0;
}

int gaiafs_within(struct gaiafs_mapping *m, const void *addr, size_t len, uint64_t *bracket, struct gaiafs_fail *f)
{
	const struct gaia_range r = { (void *)(uintptr_t)addr, len };
	struct bracket b = { .m = m };
	int err;

	*bracket = 0;
	if (!m->movable)
		return 0;
	b.id = *bracket = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);
	err = ask(&b, &r, 1, &m, 1, 0, f);
	if (err == EINTR)
		gaiafs_without(m, b.id);
	return err;
}

void gaiafs_without(struct gaiafs_mapping *m, uint64_t bracket)
{
	uint8_t body[GAIAFS_MAX_BODY];

	if (bracket != 0)
		gaiafs_tell(m->conn, GAIAFS_DONE, body, gaiafs_put_unmap(body, bracket));
}

int gaia_use(const struct gaia_range *ranges, size_t n, gaia_stream_t stream)
{
	return gaia_use_for(ranges, n, stream, 0);
}

int gaia_use_for(const struct gaia_range *ranges, size_t n, gaia_stream_t stream, unsigned patience)
{
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	(void)use(ranges, n, stream, patience, &f);
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_done(gaia_stream_t stream)
{
	struct gaiafs_fail f = { 0 };
	struct bracket **p = &open_brackets, *b;
	int state;

	gaiafs_enter(&state);
	while (*p != NULL && (*p)->stream != stream)
		p = &(*p)->outer;
	b = *p;
	if (b == NULL) {
		(void)gaiafs_failed(&f, EINVAL, "this thread has no bracket with that stream");
		return gaiafs_leave(state, f.errnum, &f);
	}
	/* A bracket whose end cannot be put into the stream stays open. */
	if (b->m != NULL && b->m->kind == &gaiafs_cuda_kind && stream != GAIA_NO_STREAM && gaiafs_mapping_mine(b->m)) {
		if (stream == GAIA_ALL_STREAMS) {
			(void)b->m->kind->settle(b->m, stream, &f);
		} else if (gaiafs_cuda_after(b->m->cuda, stream, stream_done, &b->job, &f) == 0) {
			*p = b->outer;
			return gaiafs_leave(state, 0, &f);
		}
	}
	if (f.errnum == 0) {
		*p = b->outer;
		end(b);
	}
	return gaiafs_leave(state, f.errnum, &f);
}
