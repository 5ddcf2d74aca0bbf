/*
 * Brackets. gaia_use asks for the memory that a launch uses, and gaia_done gives it back. In between, move.c has mapped
 * the memory at its addresses. A bracket belongs to its thread until gaia_done. After that it belongs to no thread, and
 * only the daemon has to be told.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A bracket. */
struct gaiafs_bracket {
	struct gaiafs_job job; /* its first member */
	struct gaiafs_bracket *outer; /* the thread's bracket that was opened before */
	struct gaiafs_mapping *m; /* of the first range; NULL: nothing moves */
	gaia_stream_t stream;
	uint64_t id;
	bool may;                 /* ask the daemon whether the bracket may be kept */
	struct gaiafs_kept *kept; /* NULL: the daemon is told when the bracket ends */
	size_t n;                 /* number of spans: the ranges that move, each with a reference on its mapping */
	struct gaiafs_span spans[];
};

/* The thread's open brackets, the newest first. */
static _Thread_local struct gaiafs_bracket *open_brackets;

static uint64_t next_id; /* atomic */

void gaiafs_bracket_forget(struct gaiafs_bracket *b)
{
	for (size_t i = 0; i < b->n; i++)
		gaiafs_mapping_unref(b->spans[i].m);
	free(b);
}

void gaiafs_bracket_end(struct gaiafs_bracket *b)
{
	if (b->m != NULL && gaiafs_mapping_mine(b->m)) {
		if (b->kept != NULL)
			gaiafs_keep_done(b->kept);
		else
			gaiafs_without(b->m, b->id);
	}
	gaiafs_bracket_forget(b);
}

uint64_t gaiafs_bracket_open(struct gaiafs_bracket *b, const struct gaiafs_request *answered)
{
	if (b->may && b->kept == NULL && answered != NULL && answered->number != 0)
		b->kept = gaiafs_keep(b->id, b->spans, b->n);
	b->outer = open_brackets;
	open_brackets = b;
	return b->id;
}

static void end_job(struct gaiafs_job *j)
{
	gaiafs_bracket_end((struct gaiafs_bracket *)j);
}

/* stream_done is a CUDA host function, so it must not wait. */
static void stream_done(void *argument)
{
	gaiafs_post(argument);
}

static uint64_t offset_of(const struct gaiafs_mapping *m, const void *addr)
{
	return (uintptr_t)addr - (uintptr_t)m->base;
}

/*
 * find_moving finds the ranges that move, and checks that they are of one connection and device. The spans it found
 * have references, even after a failure.
 */
static int find_moving(const struct gaia_range *ranges, size_t n, struct gaiafs_bracket *b, struct gaiafs_fail *f)
{
	for (size_t i = 0; i < n; i++) {
		struct gaiafs_mapping *m = gaiafs_find(ranges[i].address, ranges[i].length, f);

		if (m == NULL)
			return f->errnum;
		if (!m->movable) {
			gaiafs_mapping_unref(m);
			continue;
		}
		b->spans[b->n++] = (struct gaiafs_span){ m, offset_of(m, ranges[i].address), ranges[i].length };
		b->m = b->spans[0].m;
		if (m->conn != b->m->conn || m->dev != b->m->dev)
			return gaiafs_failed(f, EINVAL, "a bracket uses mappings of one mount on one device: not of device %d and %d",
					     b->m->dev, m->dev);
	}
	return 0;
}

int gaiafs_take_use(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	if (frame->header.type != GAIAFS_NUMBERED)
		return gaiafs_take_result(frame, fail);
	return gaiafs_get_numbered(frame->body, frame->body_len, &r->number) ? 0 : gaiafs_failed(fail, EPROTO, "NUMBERED is too short");
}

/* request_of returns the body of the request for a bracket, from malloc, or NULL. */
static uint8_t *request_of(
	uint64_t id, bool may, const struct gaiafs_span *spans, size_t n, uint32_t patience, size_t *size)
{
	size_t at = GAIAFS_USE_HEAD;
	uint8_t *body;

	*size = GAIAFS_USE_HEAD + n * GAIAFS_USE_RANGE;
	body = malloc(*size);
	if (body == NULL)
		return NULL;
	gaiafs_put_use(body, id, (open_brackets != NULL ? GAIAFS_USE_NESTED : 0) | (may ? GAIAFS_USE_KEEP : 0), patience,
		(uint32_t)n);
	for (size_t i = 0; i < n; i++)
		at += gaiafs_put_use_range(body + at, spans[i].m->id, spans[i].off, spans[i].len);
	return body;
}

struct gaiafs_bracket *gaiafs_bracket_of(const struct gaia_range *ranges, size_t n, gaia_stream_t stream,
	uint32_t patience, struct gaiafs_want *want, struct gaiafs_fail *f)
{
	struct gaiafs_bracket *b = NULL;

	*want = (struct gaiafs_want){ 0 };
	if (n == 0 || ranges == NULL || n > GAIAFS_MOST_RANGES)
		(void)gaiafs_failed(f, EINVAL, "a bracket of %zu ranges; it has 1 to %d", ranges == NULL ? 0 : n,
				    GAIAFS_MOST_RANGES);
	else if (gaiafs_prepare_work(f) == 0 && (b = malloc(sizeof *b + n * sizeof b->spans[0])) == NULL)
		(void)gaiafs_failed(f, ENOMEM, "out of memory");
	if (b == NULL)
		return NULL;
	*b = (struct gaiafs_bracket){ .job = { .run = end_job }, .stream = stream };
	b->id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);
	if (find_moving(ranges, n, b, f) == 0 && b->m != NULL) {
		b->may = b->n <= GAIAFS_MOST_SPANS && (gaiafs_conn_features(b->m->conn) & GAIAFS_FEATURE_KEEP) != 0;
		if (b->may)
			b->kept = gaiafs_keep_find(b->spans, b->n);
		if (b->kept == NULL) {
			want->m = b->m;
			want->body = request_of(b->id, b->may, b->spans, b->n, patience, &want->size);
			if (want->body == NULL)
				(void)gaiafs_failed(f, ENOMEM, "out of memory");
		}
	}
	if (f->errnum == 0)
		return b;
	gaiafs_bracket_forget(b);
	return NULL;
}

static void use(
	const struct gaia_range *ranges, size_t n, gaia_stream_t stream, uint32_t patience, struct gaiafs_fail *f)
{
	struct gaiafs_request r = { .take = gaiafs_take_use };
	struct gaiafs_want want;
	struct gaiafs_bracket *b = gaiafs_bracket_of(ranges, n, stream, patience, &want, f);

	if (b == NULL)
		return;
	if (want.m != NULL && gaiafs_call_long(want.m->conn, GAIAFS_USE, want.body, want.size, &r) != 0)
		*f = r.fail;
	free(want.body);
	if (f->errnum == 0) {
		(void)gaiafs_bracket_open(b, &r);
		return;
	}
	if (f->errnum == EINTR) { /* the daemon may still grant it */
		gaiafs_bracket_end(b);
		return;
	}
	gaiafs_bracket_forget(b);
}

int gaiafs_within(struct gaiafs_mapping *m, const void *addr, size_t len, uint64_t *bracket, struct gaiafs_fail *f)
{
	const struct gaiafs_span all = { m, offset_of(m, addr), len };
	uint8_t *body;
	size_t size;
	int err;

	*bracket = 0;
	if (!m->movable)
		return 0;
	*bracket = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);
	body = request_of(*bracket, false, &all, 1, 0, &size);
	if (body == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	err = gaiafs_simple_long(m->conn, GAIAFS_USE, body, size, f);
	free(body);
	if (err == EINTR)
		gaiafs_without(m, *bracket);
	return err;
}

void gaiafs_without(struct gaiafs_mapping *m, uint64_t bracket)
{
	if (bracket != 0)
		gaiafs_tell_done(m, (struct gaiafs_ended){ bracket, 0 });
}

void gaiafs_tell_done(struct gaiafs_mapping *m, struct gaiafs_ended ended)
{
	uint8_t body[GAIAFS_MAX_BODY];

	if ((gaiafs_conn_features(m->conn) & GAIAFS_FEATURE_USES) == 0)
		ended.uses = 0; /* an older daemon */
	gaiafs_tell(m->conn, GAIAFS_DONE, body, gaiafs_put_done(body, ended));
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
	use(ranges, n, stream, patience, &f);
	return gaiafs_leave(state, f.errnum, &f);
}

/*
 * done ends a bracket of the thread's after the work of its stream. If the end cannot be queued there, the bracket
 * stays open.
 */
static void done(struct gaiafs_bracket **p, struct gaiafs_fail *f)
{
	struct gaiafs_fail unmarked = { 0 };
	struct gaiafs_bracket *b = *p, *outer = b->outer;

	if (b->m != NULL && b->m->kind->after != NULL && b->stream != GAIA_NO_STREAM && gaiafs_mapping_mine(b->m)) {
		if (b->stream == GAIA_ALL_STREAMS) {
			(void)b->m->kind->quiesce(b->m, b->stream, f);
		} else if (b->kept != NULL && gaiafs_keep_mark(b->kept, b->stream, &unmarked) == 0) {
			/* The mark tells when the stream's work is done; no host function is needed. */
		} else if (b->m->kind->after(b->m->gpu, b->stream, stream_done, &b->job, f) == 0) {
			*p = outer; /* b may be freed now */
			return;
		}
	}
	if (f->errnum == 0) {
		*p = outer;
		gaiafs_bracket_end(b);
	}
}

int gaia_done(gaia_stream_t stream)
{
	struct gaiafs_bracket **p = &open_brackets;
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	while (*p != NULL && (*p)->stream != stream)
		p = &(*p)->outer;
	if (*p == NULL)
		(void)gaiafs_failed(&f, EINVAL, "this thread has no bracket with that stream");
	else
		done(p, &f);
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_done_use(uint64_t bracket)
{
	struct gaiafs_bracket **p = &open_brackets;
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	while (*p != NULL && (*p)->id != bracket)
		p = &(*p)->outer;
	if (*p == NULL)
		(void)gaiafs_failed(&f, EINVAL, "this thread has no bracket %llu", (unsigned long long)bracket);
	else
		done(p, &f);
	return gaiafs_leave(state, f.errnum, &f);
}
