/*
 * The process's connections: one for each socket, made at the first use, kept, and shared by all threads. There is no
 * thread of the library's own: of the threads that wait for a reply, one reads for all and passes the task on when its
 * own reply is complete.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTING, READY, LOST };

/* Seconds that a daemon with a full queue, or one that does not answer HELLO, is waited for. */
enum { PATIENCE = 30 };

/* The processors from which on a thread may use one to look for a reply, and the nanoseconds for which it does. */
#ifndef GAIAFS_ENOUGH_PROCESSORS
#define GAIAFS_ENOUGH_PROCESSORS 4
#endif
enum { LOOK_FOR = 100000 };

struct gaiafs_conn {
	int fd;                            /* immutable; closed with the last reference */
	uint32_t max_requests, kinds;      /* immutable once READY */
	uint8_t *record;                   /* GAIAFS_MAX_FRAME bytes, the reading thread's */
	char socket[GAIAFS_SOCKET_PATH];   /* immutable */
	pthread_mutex_t lock, send;

	/* Guarded by gaiafs_table_lock. */
	int state;
	bool listed;
	unsigned refs;
	struct gaiafs_conn *next;

	/* Guarded by lock. */
	struct gaiafs_request *calls; /* whose reply is not complete */
	uint32_t running;
	uint64_t last_id;
	bool reading;            /* a thread reads */
	struct gaiafs_fail lost; /* errnum not 0: of no use any more */
	pthread_cond_t room;     /* running fell, or the connection was lost */
	pthread_cond_t taken;    /* the frame was, that another thread was to take */
};

pthread_mutex_t gaiafs_fd_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t gaiafs_table_lock = PTHREAD_MUTEX_INITIALIZER;
unsigned gaiafs_generation;

static struct gaiafs_conn *conns;                              /* guarded by gaiafs_table_lock */
static pthread_cond_t conns_changed = PTHREAD_COND_INITIALIZER; /* a state changed */

/* fork */

static void before_fork(void)
{
	pthread_mutex_lock(&gaiafs_fd_lock);
	pthread_mutex_lock(&gaiafs_table_lock);
}

static void after_fork_in_parent(void)
{
	pthread_mutex_unlock(&gaiafs_table_lock);
	pthread_mutex_unlock(&gaiafs_fd_lock);
}

static void after_fork_in_child(void)
{
	/* The parent's connections must end with the parent. Threads that the child does not have may have been using the
	 * structures, which are therefore not freed. */
	for (struct gaiafs_conn *c = conns; c != NULL; c = c->next)
		close(c->fd);
	conns = NULL;
	conns_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	gaiafs_generation++;
	pthread_mutex_unlock(&gaiafs_table_lock);
	pthread_mutex_unlock(&gaiafs_fd_lock);
}

static int fork_prepared;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void prepare_fork(void)
{
	fork_prepared = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int gaiafs_prepare_fork(void)
{
	pthread_once(&fork_once, prepare_fork);
	return fork_prepared;
}

/* Frames */

/* say sends one frame. It returns an errno. */
static int say(struct gaiafs_conn *c, uint16_t type, uint64_t id, const uint8_t *body, size_t n)
{
	uint8_t frame[GAIAFS_HEADER + GAIAFS_MAX_BODY];
	ssize_t sent;
	int err;

	gaiafs_put_header(frame, type, id, n);
	memcpy(frame + GAIAFS_HEADER, body, n);
	pthread_mutex_lock(&c->send);
	do
		sent = send(c->fd, frame, GAIAFS_HEADER + n, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	err = sent < 0 ? errno : 0;
	pthread_mutex_unlock(&c->send);
	return err;
}

static int gone(struct gaiafs_fail *f, const char *why)
{
	return gaiafs_failed(f, ENOTCONN, "the connection to gaiafs is lost: %s", why);
}

static size_t find_rights(struct msghdr *msg, int fds[GAIAFS_MAX_EXTENTS])
{
	size_t n = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t here = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < here; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (n < GAIAFS_MAX_EXTENTS)
				fds[n++] = fd;
			else
				close(fd);
		}
	}
	return n;
}

/* look_for is for how many nanoseconds a reply is looked for again and again before the thread sleeps until it comes: to be woken takes a
 * third of a short call. Where there are few processors, the daemon needs this one. */
static long look_for;
static pthread_once_t look_once = PTHREAD_ONCE_INIT;

static void choose_look_for(void)
{
	cpu_set_t usable;

	if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= GAIAFS_ENOUGH_PROCESSORS)
		look_for = LOOK_FOR;
}

/* wait_for_bytes waits until there is something to receive, and returns what poll does. */
static int wait_for_bytes(int fd, int timeout)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec begin, now;
	int ready;

	pthread_once(&look_once, choose_look_for);
	if (look_for > 0) {
		(void)clock_gettime(CLOCK_MONOTONIC, &begin);
		do {
			if ((ready = poll(&p, 1, 0)) != 0)
				return ready;
			(void)clock_gettime(CLOCK_MONOTONIC, &now);
		} while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < look_for);
	}
	return poll(&p, 1, timeout);
}

/* hear waits for one frame, at most timeout milliseconds (negative: without end), and returns 0 with gaiafs_fd_lock held
 * and the descriptors in fds, or an errno without. */
static int hear(struct gaiafs_conn *c, int timeout, struct gaiafs_frame *frame, int fds[GAIAFS_MAX_EXTENTS],
		struct gaiafs_fail *f)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(GAIAFS_MAX_EXTENTS * sizeof(int))];
	} control;
	struct iovec iov = { .iov_base = c->record, .iov_len = GAIAFS_MAX_FRAME };
	ssize_t n;

	/* The daemon may have closed without reading everything: its last words come after one ECONNRESET. */
	bool reset = false;

	for (;;) {
		struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
				      .msg_controllen = sizeof control.bytes };
		int ready = wait_for_bytes(c->fd, timeout);

		if (ready < 0 && errno == EINTR)
			continue;
		if (ready < 0)
			return gone(f, strerror(errno));
		if (ready == 0)
			return gaiafs_failed(f, ETIMEDOUT, "gaiafs does not answer");
		pthread_mutex_lock(&gaiafs_fd_lock);
		n = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		int err = n < 0 ? errno : 0;
		if (n >= 0) {
			frame->nfds = find_rights(&msg, fds);
			frame->fds = fds;
			frame->truncated = msg.msg_flags & MSG_CTRUNC;
			if (n == 0 || (msg.msg_flags & MSG_TRUNC))
				err = n == 0 ? EPIPE : EMSGSIZE;
			else if (!gaiafs_get_header(c->record, (size_t)n, &frame->header))
				err = EPROTO;
			if (err == 0) {
				frame->body = c->record + GAIAFS_HEADER;
				frame->body_len = (size_t)n - GAIAFS_HEADER;
				return 0;
			}
			for (size_t i = 0; i < frame->nfds; i++)
				close(fds[i]);
		}
		pthread_mutex_unlock(&gaiafs_fd_lock);
		if (err == ECONNRESET && !reset) {
			reset = true;
			continue;
		}
		if (err == EINTR || err == EAGAIN)
			continue;
		if (err == EPIPE || err == ECONNRESET)
			return gone(f, "the daemon closed it");
		if (err == EPROTO || err == EMSGSIZE)
			return gaiafs_failed(f, EPROTO, "the daemon sent a malformed frame");
		return gone(f, strerror(err));
	}
}

/* done_with closes a frame's descriptors and gives gaiafs_fd_lock back. */
static void done_with(const struct gaiafs_frame *frame)
{
	for (size_t i = 0; i < frame->nfds; i++)
		close(frame->fds[i]);
	pthread_mutex_unlock(&gaiafs_fd_lock);
}

/* read_fail decodes the body of a RESULT or ERROR into *f. */
static int read_fail(const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct gaiafs_result r;

	if (!gaiafs_get_result(frame->body, frame->body_len, &r))
		return gaiafs_failed(f, EPROTO, "the daemon sent a malformed result");
	if (r.errnum == 0)
		return 0;
	if (r.errnum > 4095)
		r.errnum = EIO;
	return gaiafs_failed(f, (int)r.errnum, "%.*s", (int)(r.text_len > GAIAFS_MAX_TEXT ? GAIAFS_MAX_TEXT : r.text_len),
			     r.text);
}

int gaiafs_take_result(const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	if (frame->header.type != GAIAFS_RESULT)
		return gaiafs_failed(fail, EPROTO, "the daemon answered with type %#x", frame->header.type);
	return read_fail(frame, fail);
}

/* Opening */

static int shake_hands(struct gaiafs_conn *c, struct gaiafs_fail *f)
{
	const struct timeval patience = { .tv_sec = PATIENCE }, forever = { 0 };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	uint8_t body[GAIAFS_MAX_BODY];
	int fds[GAIAFS_MAX_EXTENTS];
	struct gaiafs_frame frame;
	struct gaiafs_welcome w;
	int err;

	memcpy(address.sun_path, c->socket, sizeof c->socket);
	(void)setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
	while ((err = connect(c->fd, (struct sockaddr *)&address, sizeof address) == 0 ? 0 : errno) == EINTR)
		continue;
	if (err == EAGAIN)
		return gaiafs_failed(f, ETIMEDOUT, "gaiafs does not take connections on %s", c->socket);
	if (err == ENOENT)
		err = ECONNREFUSED;
	if (err != 0)
		return gaiafs_failed(f, err, "gaiafs does not listen on %s: %s", c->socket, strerror(err));
	(void)setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof forever);
	err = say(c, GAIAFS_HELLO, 0, body, gaiafs_put_hello(body));
	if (err != 0 && err != EPIPE && err != ECONNRESET) /* after those a refusal can still be read */
		return gone(f, strerror(err));
	if (hear(c, PATIENCE * 1000, &frame, fds, f) != 0)
		return f->errnum;
	err = 0;
	if (frame.header.type == GAIAFS_ERROR) {
		err = read_fail(&frame, f);
		if (err == 0)
			err = gaiafs_failed(f, EPROTO, "the daemon sent an error without one");
	} else if (frame.header.type != GAIAFS_WELCOME || !gaiafs_get_welcome(frame.body, frame.body_len, &w)) {
		err = gaiafs_failed(f, EPROTO, "the daemon's answer to HELLO is not one that this library knows");
	} else {
		c->max_requests = w.max_requests;
		c->kinds = w.kinds;
	}
	done_with(&frame);
	return err;
}

/* unlist_locked takes c off the list; the list's reference becomes the caller's. */
static bool unlist_locked(struct gaiafs_conn *c)
{
	if (!c->listed)
		return false;
	for (struct gaiafs_conn **p = &conns; *p != NULL; p = &(*p)->next)
		if (*p == c) {
			*p = c->next;
			break;
		}
	c->listed = false;
	return true;
}

static void destroy(struct gaiafs_conn *c)
{
	close(c->fd);
	pthread_mutex_destroy(&c->lock);
	pthread_mutex_destroy(&c->send);
	pthread_cond_destroy(&c->room);
	pthread_cond_destroy(&c->taken);
	free(c->record);
	free(c);
}

void gaiafs_conn_unref(struct gaiafs_conn *c)
{
	bool last;

	pthread_mutex_lock(&gaiafs_table_lock);
	last = --c->refs == 0;
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (last)
		destroy(c);
}

uint32_t gaiafs_conn_kinds(const struct gaiafs_conn *c)
{
	return c->kinds;
}

/* lose makes c useless for calls that begin later, and takes it off the list. */
static void lose(struct gaiafs_conn *c)
{
	bool listed;

	pthread_mutex_lock(&gaiafs_table_lock);
	c->state = LOST;
	listed = unlist_locked(c);
	pthread_cond_broadcast(&conns_changed);
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (listed)
		gaiafs_conn_unref(c);
}

/* new_conn_locked makes a connection with its socket, which is listed before anybody can fork. */
static struct gaiafs_conn *new_conn_locked(const char *socket_path, struct gaiafs_fail *f)
{
	struct gaiafs_conn *c = calloc(1, sizeof *c);

	if (c == NULL || (c->record = malloc(GAIAFS_MAX_FRAME)) == NULL) {
		free(c);
		gaiafs_failed(f, ENOMEM, "out of memory");
		return NULL;
	}
	c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (c->fd < 0) {
		gaiafs_failed(f, errno, "socket: %s", strerror(errno));
		free(c->record);
		free(c);
		return NULL;
	}
	(void)snprintf(c->socket, sizeof c->socket, "%s", socket_path);
	pthread_mutex_init(&c->lock, NULL);
	pthread_mutex_init(&c->send, NULL);
	pthread_cond_init(&c->room, NULL);
	pthread_cond_init(&c->taken, NULL);
	c->state = CONNECTING;
	c->refs = 2; /* the list's and the caller's */
	c->listed = true;
	c->next = conns;
	conns = c;
	return c;
}

struct gaiafs_conn *gaiafs_conn_open(const char *socket_path, struct gaiafs_fail *f)
{
	struct gaiafs_conn *c;
	bool mine = false;

	pthread_mutex_lock(&gaiafs_table_lock);
	for (c = conns; c != NULL && strcmp(c->socket, socket_path) != 0;)
		c = c->next;
	if (c != NULL) {
		c->refs++;
	} else {
		c = new_conn_locked(socket_path, f);
		mine = true;
	}
	if (c == NULL) {
		pthread_mutex_unlock(&gaiafs_table_lock);
		return NULL;
	}
	if (!mine) {
		while (c->state == CONNECTING)
			pthread_cond_wait(&conns_changed, &gaiafs_table_lock);
		pthread_mutex_unlock(&gaiafs_table_lock);
		/* A lost one shows at the call, where its reason is. */
		return c;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);

	if (shake_hands(c, f) != 0) {
		pthread_mutex_lock(&c->lock);
		c->lost = *f;
		pthread_mutex_unlock(&c->lock);
		lose(c);
		gaiafs_conn_unref(c);
		return NULL;
	}
	pthread_mutex_lock(&gaiafs_table_lock);
	c->state = READY;
	pthread_cond_broadcast(&conns_changed);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return c;
}

/* Calls */

static void complete_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	for (struct gaiafs_request **p = &c->calls; *p != NULL; p = &(*p)->next)
		if (*p == r) {
			*p = r->next;
			break;
		}
	r->done = true;
	c->running--;
	pthread_cond_signal(&c->room);
	pthread_cond_signal(&r->wake);
}

/* end_locked ends every call with the reason for which the connection was lost. */
static void end_locked(struct gaiafs_conn *c, const struct gaiafs_fail *why)
{
	if (c->lost.errnum == 0)
		c->lost = *why;
	while (c->calls != NULL) {
		c->calls->fail = c->lost;
		complete_locked(c, c->calls);
	}
	pthread_cond_broadcast(&c->room);
}

/* take has a request take a frame, and keeps its first failure. */
static void take(struct gaiafs_request *r, const struct gaiafs_frame *frame)
{
	struct gaiafs_fail fail = { 0 };
	int err = r->take(r, frame, &fail);

	if (err == 0 && frame->truncated)
		err = gaiafs_failed(&fail, EMFILE, "this process has no descriptors left for the extents");
	if (err != 0 && r->fail.errnum == 0)
		r->fail = fail;
}

/* hand_over has the thread that waits for r take the frame, and waits until it did. gaiafs_fd_lock stays held. */
static void hand_over(struct gaiafs_conn *c, struct gaiafs_request *r, const struct gaiafs_frame *frame)
{
	pthread_mutex_lock(&c->lock);
	r->frame = frame;
	pthread_cond_signal(&r->wake);
	while (r->frame != NULL)
		pthread_cond_wait(&c->taken, &c->lock);
	pthread_mutex_unlock(&c->lock);
}

/* read_one reads a frame and gives it to its call, as the thread that reads and that waits for mine. It returns false where
 * the connection is lost. */
static bool read_one(struct gaiafs_conn *c, const struct gaiafs_request *mine)
{
	int fds[GAIAFS_MAX_EXTENTS];
	struct gaiafs_frame frame;
	struct gaiafs_fail fail = { 0 };
	struct gaiafs_request *r;

	if (hear(c, -1, &frame, fds, &fail) != 0)
		goto lost;
	if (frame.header.type == GAIAFS_ERROR) {
		if (read_fail(&frame, &fail) == 0)
			gaiafs_failed(&fail, EPROTO, "the daemon sent an error without one");
		done_with(&frame);
		goto lost;
	}
	/* Only the thread that reads ends calls, so that r stays. */
	pthread_mutex_lock(&c->lock);
	for (r = c->calls; r != NULL && r->id != frame.header.id;)
		r = r->next;
	pthread_mutex_unlock(&c->lock);
	if (r == NULL) {
		gaiafs_failed(&fail, EPROTO, "the daemon answered a request that does not run");
		done_with(&frame);
		goto lost;
	}
	if (r->own && r != mine)
		hand_over(c, r, &frame);
	else
		take(r, &frame);
	done_with(&frame);
	if (!(frame.header.flags & GAIAFS_MORE)) {
		pthread_mutex_lock(&c->lock);
		complete_locked(c, r);
		pthread_mutex_unlock(&c->lock);
	}
	return true;

lost:
	lose(c); /* before calls end, so that one that begins anew makes a new connection */
	pthread_mutex_lock(&c->lock);
	end_locked(c, &fail);
	pthread_mutex_unlock(&c->lock);
	return false;
}

int gaiafs_call(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r)
{
	r->fail.errnum = 0;
	r->fail.text[0] = '\0';
	r->done = false;
	r->frame = NULL;
	pthread_cond_init(&r->wake, NULL);

	pthread_mutex_lock(&c->lock);
	while (c->lost.errnum == 0 && c->running >= c->max_requests)
		pthread_cond_wait(&c->room, &c->lock);
	if (c->lost.errnum != 0) {
		r->fail = c->lost;
		pthread_mutex_unlock(&c->lock);
		pthread_cond_destroy(&r->wake);
		return r->fail.errnum;
	}
	r->id = ++c->last_id;
	r->next = c->calls;
	c->calls = r;
	c->running++;
	pthread_mutex_unlock(&c->lock);

	/* Whatever fails here, the thread that reads finds out, with the daemon's last words if there are any. */
	if (say(c, type, r->id, body, n) != 0)
		(void)shutdown(c->fd, SHUT_WR);

	pthread_mutex_lock(&c->lock);
	while (!r->done) {
		if (r->frame != NULL) {
			const struct gaiafs_frame *frame = r->frame;

			pthread_mutex_unlock(&c->lock);
			take(r, frame);
			pthread_mutex_lock(&c->lock);
			r->frame = NULL;
			pthread_cond_signal(&c->taken);
			continue;
		}
		if (c->reading) {
			pthread_cond_wait(&r->wake, &c->lock);
			continue;
		}
		c->reading = true;
		pthread_mutex_unlock(&c->lock);
		while (read_one(c, r) && !r->done) /* r->done changes in this thread only, while it reads */
			continue;
		pthread_mutex_lock(&c->lock);
		c->reading = false;
	}
	if (!c->reading && c->calls != NULL)
		pthread_cond_signal(&c->calls->wake); /* reads on */
	pthread_mutex_unlock(&c->lock);
	pthread_cond_destroy(&r->wake);
	return r->fail.errnum;
}

static int take_simple(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	(void)r;
	return gaiafs_take_result(frame, fail);
}

int gaiafs_simple(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_fail *f)
{
	struct gaiafs_request r = { .take = take_simple };
	int err = gaiafs_call(c, type, body, n, &r);

	if (err != 0)
		*f = r.fail;
	return err;
}
