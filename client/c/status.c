/* gaia_status: the daemon's status document. */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A STATUS in progress. Its document grows with each frame. */
struct status_request {
	struct gaiafs_request request; /* its first member */
	char *text;                    /* zero-terminated */
	size_t len;
};

static int take_status(struct gaiafs_request *request, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct status_request *r = (struct status_request *)request;
	char *longer;

	if (frame->header.type != GAIAFS_DOCUMENT)
		return gaiafs_take_result(frame, f) != 0 ? f->errnum : gaiafs_failed(f, EPROTO, "the daemon answered STATUS with nothing");
	longer = realloc(r->text, r->len + frame->body_len + 1);
	if (longer == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	memcpy(longer + r->len, frame->body, frame->body_len);
	r->text = longer;
	r->len += frame->body_len;
	longer[r->len] = '\0';
	return 0;
}

static int ask(int fd, char **text, struct gaiafs_fail *f)
{
	struct status_request r = { .request = { .take = take_status } };
	struct gaiafs_grant grant;
	struct gaiafs_conn *c;

	if (gaiafs_request_grant(fd, &grant, f) != 0)
		return f->errnum;
	if (!grant.status)
		return gaiafs_failed(f, EINVAL, "it is not a mountpoint of gaiafs");
	c = gaiafs_conn_open(grant.socket, f);
	if (c == NULL)
		return f->errnum;
	pthread_mutex_lock(&c->looking);
	(void)gaiafs_call(c, GAIAFS_STATUS, grant.token, sizeof grant.token, &r.request);
	pthread_mutex_unlock(&c->looking);
	gaiafs_conn_unref(c);
	*f = r.request.fail;
	if (f->errnum == 0)
		*text = r.text;
	else
		free(r.text);
	return f->errnum;
}

char *gaia_status(int fd)
{
	struct gaiafs_fail f = { 0 };
	char *text = NULL;
	int state, err;

	gaiafs_enter(&state);
	err = gaiafs_prepare_fork();
	if (err != 0)
		(void)gaiafs_failed(&f, err, "pthread_atfork: %s", strerror(err));
	else
		err = ask(fd, &text, &f);
	if (err == ENOTCONN) { /* a kept connection was dead: try once more with a new one */
		f = (struct gaiafs_fail){ 0 };
		err = ask(fd, &text, &f);
	}
	(void)gaiafs_leave(state, err, &f);
	return text;
}
