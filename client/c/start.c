/* gaia_start and the calls around it: requests that can be waited for in steps. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* A running request. Once abandoned, its memory belongs to call.c as a struct gaiafs_request. */
struct started {
	struct gaiafs_request request; /* its first member */
	struct gaiafs_mapping *m;      /* with a reference */
	uint64_t pages;
	struct gaiafs_bracket *bracket; /* the bracket that is asked for, whose mapping is m; NULL: another request */
	struct gaiafs_rest rest;        /* of the bracket's request */
};

static int take(struct gaiafs_request *request, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct started *s = (struct started *)request;
	struct gaiafs_result r;

	if (gaiafs_take_result(frame, f) == 0 && gaiafs_get_result(frame->body, frame->body_len, &r) && r.pages > 0)
		s->pages = (uint64_t)r.pages;
	return f->errnum;
}

static int start(struct gaia_call *call, struct gaiafs_mapping *m, const struct gaiafs_ready *r, struct gaiafs_fail *f)
{
	struct started *s = calloc(1, sizeof *s);

	if (s == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	s->request.take = take;
	if (gaiafs_call_begin(m->conn, r->type, r->body, r->n, &s->request) != 0) {
		*f = s->request.fail;
		free(s);
		return f->errnum;
	}
	s->m = m;
	call->running = s;
	return 0;
}

int gaia_start(struct gaia_call *call, int what, void *addr, size_t len, int argument, gaia_stream_t stream)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m = NULL;
	struct gaiafs_ready r;
	int state;

	gaiafs_enter(&state);
	call->pages = 0;
	if (call->running != NULL)
		(void)gaiafs_failed(&f, EBUSY, "the call runs already");
	else
		m = gaiafs_find(addr, len, &f);
	if (m != NULL && (gaiafs_prepare(m, what, addr, len, argument, stream, &r, &f) != 0 || r.type == 0 ||
			  start(call, m, &r, &f) != 0))
		gaiafs_mapping_unref(m);
	return gaiafs_leave(state, f.errnum, &f);
}

static void release_rest(const struct gaiafs_rest *rest)
{
	free(rest->bytes);
	if (rest->memfd >= 0)
		close(rest->memfd);
}

/* start_use asks for a bracket. The call owns the bracket. */
static int start_use(
	struct gaia_call *call, struct gaiafs_bracket *b, const struct gaiafs_want *want, struct gaiafs_fail *f)
{
	struct started *s = calloc(1, sizeof *s);
	uint8_t body[GAIAFS_MAX_BODY];
	size_t head = 0;

	if (s == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	*s = (struct started){ .request = { .take = gaiafs_take_use, .rest = &s->rest }, .m = want->m, .bracket = b,
			       .rest = { .bytes = want->body, .n = want->size, .memfd = -1 } };
	if (want->size > GAIAFS_MAX_REQUEST - GAIAFS_HEADER) {
		if (gaiafs_memfd_of(want->body, want->size, &s->rest.memfd, f) == 0)
			head = gaiafs_put_large(body, want->size);
	}
	if (f->errnum == 0 && gaiafs_call_begin(want->m->conn, GAIAFS_USE, body, head, &s->request) != 0)
		*f = s->request.fail;
	if (f->errnum == 0) {
		call->running = s;
		return 0;
	}
	if (s->rest.memfd >= 0)
		close(s->rest.memfd);
	free(s);
	return f->errnum;
}

int gaia_start_use(
	struct gaia_call *call, const struct gaia_range *ranges, size_t n, gaia_stream_t stream, unsigned patience)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_bracket *b = NULL;
	struct gaiafs_want want = { 0 };
	int state;

	gaiafs_enter(&state);
	call->pages = 0;
	if (call->running != NULL)
		(void)gaiafs_failed(&f, EBUSY, "the call runs already");
	else
		b = gaiafs_bracket_of(ranges, n, stream, patience, &want, &f);
	if (b != NULL && want.m == NULL) {
		call->pages = gaiafs_bracket_open(b, NULL); /* there is nothing to wait for */
	} else if (b != NULL && start_use(call, b, &want, &f) != 0) {
		free(want.body);
		gaiafs_bracket_forget(b);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

/*
 * running returns the running request. If the request is from before a fork, it forgets it: the request is the
 * parent's.
 */
static struct started *running(struct gaia_call *call)
{
	struct started *s = call->running;

	if (s != NULL && !gaiafs_mapping_mine(s->m))
		s = call->running = NULL;
	return s;
}

int gaia_wait(struct gaia_call *call, int timeout)
{
	struct gaiafs_fail f = { 0 };
	struct started *s;
	int state, err;

	gaiafs_enter(&state);
	s = running(call);
	err = s != NULL ? gaiafs_call_wait(s->m->conn, &s->request, timeout) : 0;
	if (err != 0) {
		(void)gaiafs_failed(&f, err, err == EINTR ? "a signal interrupted the wait for the daemon" : "gaiafs has not answered yet");
	} else if (s != NULL) {
		f = s->request.fail;
		call->pages = s->pages;
		call->running = NULL;
		if (s->bracket == NULL) {
			gaiafs_mapping_unref(s->m);
		} else {
			release_rest(&s->rest);
			if (f.errnum == 0)
				call->pages = gaiafs_bracket_open(s->bracket, &s->request);
			else
				gaiafs_bracket_forget(s->bracket);
		}
		free(s);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

void gaia_cancel(struct gaia_call *call)
{
	struct gaiafs_bracket *b;
	struct gaiafs_mapping *m;
	struct gaiafs_rest rest;
	struct started *s;
	int state;

	gaiafs_enter(&state);
	s = running(call);
	call->running = NULL;
	if (s != NULL) {
		m = s->m;
		b = s->bracket;
		rest = s->rest;
		gaiafs_call_abandon(m->conn, &s->request); /* s may be gone; if it was not sent yet, it never will be */
		if (b == NULL) {
			gaiafs_mapping_unref(m);
		} else {
			release_rest(&rest);
			gaiafs_bracket_end(b); /* the daemon may still grant it */
		}
	}
	(void)gaiafs_leave(state, 0, NULL);
}
