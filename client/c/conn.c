/*
 * The process's connections. There is one for each socket, made at its first use and shared by all threads. call.c uses
 * them.
 */
#define _GNU_SOURCE
#include "conn.h"

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

/* The seconds that a connect waits for a daemon with a full queue, and that a handshake waits for an answer. */
enum { PATIENCE = 30 };

/* With at least this many processors, a thread polls for a reply for LOOK_FOR nanoseconds. */
#ifndef GAIAFS_ENOUGH_PROCESSORS
#define GAIAFS_ENOUGH_PROCESSORS 4
#endif
enum { LOOK_FOR = 100000 };

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
	/*
	 * The parent's connections must end with the parent. Threads that do not exist in the child may have been using the
	 * structures, so these are not freed.
	 */
	for (struct gaiafs_conn *c = conns; c != NULL; c = c->next) {
		close(c->fd);
		if (c->service >= 0)
			close(c->service);
	}
	gaiafs_table_after_fork();
	gaiafs_parcels_after_fork();
	gaiafs_work_after_fork();
	gaiafs_keep_after_fork();
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

int gaiafs_say(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n)
{
	return gaiafs_say_rest(fd, type, id, body, n, NULL);
}

int gaiafs_say_rest(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n, const struct gaiafs_rest *rest)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	uint8_t frame[GAIAFS_HEADER + GAIAFS_MAX_FEATURES];
	struct iovec parts[2] = { { .iov_base = frame, .iov_len = GAIAFS_HEADER + n } };
	struct msghdr msg = { .msg_iov = parts, .msg_iovlen = 1 };
	bool large = rest != NULL && rest->memfd >= 0;

	if (large) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = sizeof control.bytes;
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &rest->memfd, sizeof(int));
	} else if (rest != NULL) {
		parts[msg.msg_iovlen++] = (struct iovec){ .iov_base = rest->bytes, .iov_len = rest->n };
	}
	gaiafs_put_header(frame, type, large ? GAIAFS_LARGE : 0, id, n + parts[1].iov_len);
	memcpy(frame + GAIAFS_HEADER, body, n);
	return sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? errno : 0;
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

/*
 * looks says whether a thread polls for a reply before it sleeps. Being woken takes a third of the time of a short
 * call. On few processors it is false, because the daemon needs this processor.
 */
static bool looks;
static pthread_once_t look_once = PTHREAD_ONCE_INIT;

static void choose_looks(void)
{
	cpu_set_t usable;

	looks = sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= GAIAFS_ENOUGH_PROCESSORS;
}

bool gaiafs_look(int fd, long most, const uint32_t *as_long_as)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec begin, now;

	pthread_once(&look_once, choose_looks);
	if (!looks)
		return false;
	(void)clock_gettime(CLOCK_MONOTONIC, &begin);
	do {
		if (as_long_as != NULL && __atomic_load_n(as_long_as, __ATOMIC_RELAXED) == 0)
			return false;
		if (poll(&p, 1, 0) != 0)
			return true;
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < most);
	return false;
}

/*
 * wait_for_bytes waits until there is something to receive, or until the connection has ended. It returns 0 or an
 * errno, such as ETIMEDOUT or EINTR. Every signal handler interrupts poll; only handlers that do not restart calls
 * interrupt recv.
 */
static int wait_for_bytes(int fd, int timeout)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char byte;
	int ready;

	if (timeout != 0 && gaiafs_look(fd, LOOK_FOR, NULL))
		return 0;
	if (timeout < 0)
		return recv(fd, &byte, 1, MSG_PEEK) < 0 ? errno : 0;
	ready = poll(&p, 1, timeout);
	return ready == 0 ? ETIMEDOUT : ready < 0 ? errno : 0;
}

int gaiafs_hear(int fd, uint8_t *record, int timeout, struct gaiafs_frame *frame, int fds[GAIAFS_MAX_EXTENTS],
		struct gaiafs_fail *f)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(GAIAFS_MAX_EXTENTS * sizeof(int))];
	} control;
	struct iovec iov = { .iov_base = record, .iov_len = GAIAFS_MAX_FRAME };
	ssize_t n;

	/* If the daemon closed without reading everything, its last words come after one ECONNRESET. */
	bool reset = false;

	for (;;) {
		struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
				      .msg_controllen = sizeof control.bytes };
		int err = wait_for_bytes(fd, timeout);

		if (err == EINTR)
			return EINTR;
		if (err == ETIMEDOUT)
			return gaiafs_failed(f, ETIMEDOUT, "gaiafs does not answer");
		if (err == ECONNRESET && !reset) {
			reset = true;
			continue;
		}
		if (err != 0)
			return gone(f, err == ECONNRESET ? "the daemon closed it" : strerror(err));
		pthread_mutex_lock(&gaiafs_fd_lock);
		n = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		err = n < 0 ? errno : 0;
		if (n >= 0) {
			frame->nfds = find_rights(&msg, fds);
			frame->fds = fds;
			frame->truncated = msg.msg_flags & MSG_CTRUNC;
			if (n == 0 || (msg.msg_flags & MSG_TRUNC))
				err = n == 0 ? EPIPE : EMSGSIZE;
			else if (!gaiafs_get_header(record, (size_t)n, &frame->header))
				err = EPROTO;
			if (err == 0) {
				frame->body = record + GAIAFS_HEADER;
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

int gaiafs_read_fail(const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct gaiafs_result r;
	int n;

	if (!gaiafs_get_result(frame->body, frame->body_len, &r))
		return gaiafs_failed(f, EPROTO, "the daemon sent a malformed result");
	n = (int)(r.text_len > GAIAFS_MAX_TEXT ? GAIAFS_MAX_TEXT : r.text_len);
	if (r.errnum != 0)
		return gaiafs_failed(f, r.errnum > 4095 ? EIO : (int)r.errnum, "%.*s", n, r.text);
	memcpy(f->text, r.text, (size_t)n); /* a note */
	f->text[n] = '\0';
	return 0;
}

int gaiafs_take_result(const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	if (frame->header.type != GAIAFS_RESULT)
		return gaiafs_failed(fail, EPROTO, "the daemon answered with type %#x", frame->header.type);
	return gaiafs_read_fail(frame, fail);
}

/* Opening */

int gaiafs_greet(int fd, const char *path, uint8_t *record, struct gaiafs_welcome *w, struct gaiafs_fail *f)
{
	const struct timeval patience = { .tv_sec = PATIENCE }, forever = { 0 };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	uint8_t body[GAIAFS_MAX_BODY];
	int fds[GAIAFS_MAX_EXTENTS];
	struct gaiafs_frame frame;
	int err;

	(void)snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
	(void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
	while ((err = connect(fd, (struct sockaddr *)&address, sizeof address) == 0 ? 0 : errno) == EINTR)
		continue;
	if (err == EAGAIN)
		return gaiafs_failed(f, ETIMEDOUT, "gaiafs does not take connections on %s", path);
	if (err == ENOENT)
		return gaiafs_failed(f, ECONNREFUSED,
				     "there is no socket %s here: gaiafs has ended, or this is a container that lacks the "
				     "folder", path);
	if (err != 0)
		return gaiafs_failed(f, err, "gaiafs does not listen on %s (%s): is it still running?", path, strerror(err));
	(void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof forever);
	err = gaiafs_say(fd, GAIAFS_HELLO, 0, body, gaiafs_put_hello(body));
	if (err != 0 && err != EPIPE && err != ECONNRESET) /* after these two, a refusal can still be read */
		return gone(f, strerror(err));
	while ((err = gaiafs_hear(fd, record, PATIENCE * 1000, &frame, fds, f)) == EINTR)
		continue;
	if (err != 0)
		return err;
	if (frame.header.type == GAIAFS_ERROR) {
		err = gaiafs_read_fail(&frame, f);
		if (err == 0)
			err = gaiafs_failed(f, EPROTO, "the daemon sent an error without one");
	} else if (frame.header.type != GAIAFS_WELCOME || !gaiafs_get_welcome(frame.body, frame.body_len, w)) {
		err = gaiafs_failed(f, EPROTO, "the daemon's answer to HELLO is not one that this library knows");
	} else if ((w->required & ~(GAIAFS_USED_FEATURES | GAIAFS_FEATURE_TENANT)) != 0) {
		err = gaiafs_failed(f, EPROTONOSUPPORT, "the daemon requires features %#llx, which this library does not have",
				    (unsigned long long)(w->required & ~(GAIAFS_USED_FEATURES | GAIAFS_FEATURE_TENANT)));
	}
	for (size_t i = 0; i < frame.nfds; i++)
		close(frame.fds[i]);
	pthread_mutex_unlock(&gaiafs_fd_lock);
	return err;
}

/* unlist_locked takes c off the list. The list's reference becomes the caller's. */
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
	if (c->fd >= 0)
		close(c->fd);
	gaiafs_calls_free(c);
	pthread_mutex_destroy(&c->lock);
	pthread_mutex_destroy(&c->looking);
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

void gaiafs_conn_ref(struct gaiafs_conn *c)
{
	pthread_mutex_lock(&gaiafs_table_lock);
	c->refs++;
	pthread_mutex_unlock(&gaiafs_table_lock);
}

uint32_t gaiafs_conn_kinds(const struct gaiafs_conn *c)
{
	return c->welcome.kinds;
}

unsigned gaiafs_conn_version(const struct gaiafs_conn *c)
{
	return c->welcome.version;
}

uint64_t gaiafs_conn_features(const struct gaiafs_conn *c)
{
	return c->welcome.offered & GAIAFS_USED_FEATURES;
}

int gaiafs_conn_may_map(const struct gaiafs_conn *c, struct gaiafs_fail *f)
{
	const char *tenant = getenv("GAIAFS_TENANT");

	if (tenant != NULL && *tenant != '\0' && (c->welcome.offered & GAIAFS_FEATURE_TENANT) == 0)
		return gaiafs_failed(f, EOPNOTSUPP, "GAIAFS_TENANT is set, but the daemon is too old for named tenants");
	return 0;
}

/*
 * Nobody but a forked child can have another copy of the socket. So the socket is closed and c taken off the list in
 * one step, as seen by fork.
 */
void gaiafs_lose(struct gaiafs_conn *c, const struct gaiafs_fail *why)
{
	bool listed;

	pthread_mutex_lock(&gaiafs_table_lock);
	c->state = LOST;
	listed = unlist_locked(c);
	pthread_mutex_lock(&c->lock);
	c->lost = *why;
	(void)shutdown(c->fd, SHUT_RDWR); /* in case a child does have a copy */
	close(c->fd);
	c->fd = -1;
	pthread_mutex_unlock(&c->lock);
	if (c->service >= 0)
		(void)shutdown(c->service, SHUT_RDWR); /* its thread closes it */
	pthread_cond_broadcast(&conns_changed);
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (listed)
		gaiafs_conn_unref(c);
}

/* new_conn_locked makes a connection with its socket, and lists it, before the process can fork. */
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
	pthread_mutex_init(&c->looking, NULL);
	c->state = CONNECTING;
	c->service = -1;
	c->refs = 2; /* the list's and the caller's */
	c->listed = true;
	c->next = conns;
	conns = c;
	return c;
}

/* choose tells the daemon which of its features this library uses. No other thread uses c yet. It returns an errno. */
static int choose(struct gaiafs_conn *c, struct gaiafs_fail *f)
{
	const char *variable = getenv("GAIAFS_TENANT"), *tenant = variable != NULL ? variable : "";
	uint64_t chosen = gaiafs_conn_features(c);
	uint8_t body[GAIAFS_MAX_FEATURES];
	int fds[GAIAFS_MAX_EXTENTS];
	struct gaiafs_frame frame;
	size_t n;
	int err;

	if (strlen(tenant) > GAIAFS_MAX_TENANT)
		return gaiafs_failed(f, EINVAL, "GAIAFS_TENANT has %zu bytes: the name of a tenant has %d at most", strlen(tenant),
				    GAIAFS_MAX_TENANT);
	if ((c->welcome.offered & GAIAFS_FEATURE_TENANT) == 0)
		tenant = ""; /* allowed for requests that map nothing; gaiafs_conn_may_map refuses the others */
	if (*tenant != '\0')
		chosen |= GAIAFS_FEATURE_TENANT;
	if (chosen == 0)
		return 0;
	n = gaiafs_put_features(body, chosen, tenant);
	if (*tenant == '\0') {
		/* The daemon cannot refuse what it offered, so the first request does not wait for the answer. */
		gaiafs_tell(c, GAIAFS_FEATURES, body, n);
		return 0;
	}
	err = gaiafs_say(c->fd, GAIAFS_FEATURES, ++c->last_id, body, n);
	if (err != 0 && err != EPIPE && err != ECONNRESET) /* after these two, its last words can still be read */
		return gone(f, strerror(err));
	while ((err = gaiafs_hear(c->fd, c->record, PATIENCE * 1000, &frame, fds, f)) == EINTR)
		continue;
	if (err != 0)
		return err;
	err = frame.header.type == GAIAFS_ERROR ? gaiafs_read_fail(&frame, f) : gaiafs_take_result(&frame, f);
	for (size_t i = 0; i < frame.nfds; i++)
		close(frame.fds[i]);
	pthread_mutex_unlock(&gaiafs_fd_lock);
	return err;
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
		/* If it is lost, the next call fails with the reason. */
		return c;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);

	if (gaiafs_greet(c->fd, c->socket, c->record, &c->welcome, f) != 0 || choose(c, f) != 0) {
		gaiafs_lose(c, f);
		gaiafs_conn_unref(c);
		return NULL;
	}
	pthread_mutex_lock(&gaiafs_table_lock);
	c->state = READY;
	pthread_cond_broadcast(&conns_changed);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return c;
}
