/*
 * Calls: requests of many threads over one connection, and their replies.
 *
 * One of the threads that wait for a reply reads for all. When its own reply is complete, it passes the task on. The
 * reader never waits for another thread. It leaves a frame with descriptors with the request as a parcel, and the
 * request's thread maps the descriptors. So the reader waits only for the daemon, however long a GPU driver takes.
 *
 * A thread waits in the kernel so that signals can end the wait: in recv, or on a futex. An interrupted call leaves an
 * abandoned call in its place, for which nobody waits. Its reply is dropped when it comes, and a mapping in the reply
 * is ended. If no other call reads these replies, one of the library's own threads does.
 *
 * A call that gaiafs_call_begin started may be waited for in steps. Between the steps no thread needs to read: replies
 * wait in the socket.
 *
 * The daemon takes a limited number of requests at once. A DONE counts toward no limit, because the requests in
 * progress may wait for the memory that it gives back. USEs take only half of the limit, because their memory may be in
 * a bracket whose thread first has something else to ask.
 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { UNSENT, SENT, DONE };

int gaiafs_silence = 5000; /* milliseconds after which a wait looks whether the daemon is stopped; tests change it */

/* Futexes. Their words change under a connection's lock. A woken thread looks at the state again under that lock. */

/* futex_wait waits at most timeout milliseconds; negative means no limit. It returns 0, EINTR or ETIMEDOUT. */
static int futex_wait(uint32_t *word, uint32_t seen, int timeout)
{
	const struct timespec left = { .tv_sec = timeout / 1000, .tv_nsec = timeout % 1000 * 1000000L };

	if (syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout < 0 ? NULL : &left, NULL, 0) == 0)
		return 0;
	return errno == EINTR || errno == ETIMEDOUT ? errno : 0;
}

static void futex_wake_locked(uint32_t *word)
{
	__atomic_add_fetch(word, 1, __ATOMIC_RELAXED);
	(void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The list of calls */

static void append_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct gaiafs_request **p = &c->calls;

	while (*p != NULL)
		p = &(*p)->next;
	r->next = NULL;
	*p = r;
}

static void remove_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct gaiafs_request **p = &c->calls;

	while (*p != r)
		p = &(*p)->next;
	*p = r->next;
}

static bool counts(const struct gaiafs_request *r)
{
	return r->type != GAIAFS_DONE;
}

/* may_go_locked reports whether the daemon takes another request of r's type now. */
static bool may_go_locked(const struct gaiafs_conn *c, const struct gaiafs_request *r)
{
	const uint32_t most = c->welcome.max_requests;

	return !counts(r) || (c->running < most && (r->type != GAIAFS_USE || c->uses < most / 2 + most % 2));
}

/* complete_locked ends a call whose reply is complete. If an abandoned call got a mapping, it sends UNMAP for it. */
static void complete_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	remove_locked(c, r);
	if (r->state == SENT) {
		c->running -= counts(r);
		(void)__atomic_sub_fetch(&c->uses, r->type == GAIAFS_USE, __ATOMIC_RELAXED);
	}
	if (!r->abandoned) {
		r->state = DONE;
		futex_wake_locked(&r->wake);
	} else if ((r->type == GAIAFS_MAP || r->type == GAIAFS_MAPVIEW) && r->mapped && c->lost.errnum == 0) {
		r->type = GAIAFS_UNMAP;
		r->state = UNSENT;
		r->id = ++c->last_id;
		r->body_len = gaiafs_put_unmap(r->body, r->mapping);
		append_locked(c, r);
	} else {
		c->abandoned--;
		free(r);
	}
}

/*
 * pump_locked sends the requests that may go out. Requests are small, so usually as many as a daemon takes at once fit
 * into a socket's buffer. If one does not fit, c is full until it was sent.
 */
static void pump_locked(struct gaiafs_conn *c)
{
	c->full = false;
	for (struct gaiafs_request *r = c->calls, *next; r != NULL; r = next) {
		next = r->next;
		if (r->state != UNSENT || !may_go_locked(c, r))
			continue;
		int err = gaiafs_say_rest(c->fd, r->type, r->id, r->body, r->body_len, r->rest);
		if (err == EAGAIN) {
			c->full = true;
			return;
		}
		if (err == ETOOMANYREFS) {
			(void)gaiafs_failed(&r->fail, err, "this user has too many descriptors in flight in sockets");
			complete_locked(c, r);
			continue;
		}
		/* The reading thread learns of any other failure here, with the daemon's last words if there are any. */
		if (err != 0)
			(void)shutdown(c->fd, SHUT_WR);
		r->state = SENT;
		c->running += counts(r);
		(void)__atomic_add_fetch(&c->uses, r->type == GAIAFS_USE, __ATOMIC_RELAXED);
	}
}

/*
 * push sends what did not fit into the socket's buffer. It tries again every millisecond: the daemon takes requests out
 * of the buffer all the time, but it may have no reason to reply to any of them before it gets the next one.
 */
static void push(struct gaiafs_job *job)
{
	struct gaiafs_conn *c = (struct gaiafs_conn *)((char *)job - offsetof(struct gaiafs_conn, push));
	const struct timespec pause = { .tv_nsec = 1000000 };
	bool again;

	(void)nanosleep(&pause, NULL);
	pthread_mutex_lock(&c->lock);
	if (c->lost.errnum == 0)
		pump_locked(c);
	again = c->pushing = c->full && c->lost.errnum == 0;
	pthread_mutex_unlock(&c->lock);
	if (again)
		gaiafs_post(job);
	else
		gaiafs_conn_unref(c);
}

/* unlock unlocks c, and has somebody send what did not fit into the socket's buffer. */
static void unlock(struct gaiafs_conn *c)
{
	struct gaiafs_fail f;
	bool begin = c->full && !c->pushing && c->lost.errnum == 0 && gaiafs_prepare_work(&f) == 0;

	if (begin)
		c->pushing = true;
	pthread_mutex_unlock(&c->lock);
	if (begin) {
		gaiafs_conn_ref(c);
		c->push.run = push;
		gaiafs_post(&c->push);
	}
}

/* pass_on_locked wakes another waiting thread to read, if no thread reads. */
static void pass_on_locked(struct gaiafs_conn *c)
{
	if (c->reading)
		return;
	for (struct gaiafs_request *r = c->calls; r != NULL; r = r->next)
		if (r->waiting) {
			futex_wake_locked(&r->wake);
			return;
		}
	if (c->sweeping)
		futex_wake_locked(&c->sweep);
}

/* Reading */

/* keep_first keeps the first failure, or a note. */
static void keep_first(struct gaiafs_fail *kept, const struct gaiafs_fail *f)
{
	if (kept->errnum == 0 && (f->errnum != 0 || f->text[0] != '\0'))
		*kept = *f;
}

static void close_all(const struct gaiafs_frame *frame)
{
	for (size_t i = 0; i < frame->nfds; i++)
		close(frame->fds[i]);
}

/* deliver_locked gives a frame to its call. It passes on or closes the frame's descriptors. */
static void deliver_locked(struct gaiafs_conn *c, struct gaiafs_request *r, const struct gaiafs_frame *frame)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapped m;

	if (frame->header.type == GAIAFS_MAPPED &&
		gaiafs_get_mapped(frame->body, frame->body_len, c->welcome.version, &m)) {
		r->mapped = true;
		r->mapping = m.mapping;
	}
	if (r->abandoned || !r->own) {
		if (!r->abandoned)
			(void)r->take(r, frame, &f);
		close_all(frame);
	} else {
		struct gaiafs_parcel *p = gaiafs_parcel_of(frame), **last = &r->parcels;

		if (p == NULL)
			(void)gaiafs_failed(&f, ENOMEM, "out of memory");
		while (*last != NULL)
			last = &(*last)->next;
		*last = p;
		futex_wake_locked(&r->wake);
	}
	keep_first(&r->fail, &f);
	if (!(frame->header.flags & GAIAFS_MORE)) {
		complete_locked(c, r);
		pump_locked(c);
	}
}

/*
 * read_one reads a frame and gives it to its call. Only the reading thread calls it. It returns 0, EINTR or ETIMEDOUT.
 */
static int read_one(struct gaiafs_conn *c, int timeout)
{
	int fds[GAIAFS_MAX_EXTENTS];
	struct gaiafs_frame frame;
	struct gaiafs_fail fail = { 0 };
	struct gaiafs_request *r;
	int err = gaiafs_hear(c->fd, c->record, timeout, &frame, fds, &fail);

	if (err == EINTR || err == ETIMEDOUT)
		return err;
	if (err == 0 && frame.header.type == GAIAFS_ERROR) {
		if (gaiafs_read_fail(&frame, &fail) == 0)
			(void)gaiafs_failed(&fail, EPROTO, "the daemon sent an error without one");
		close_all(&frame);
		pthread_mutex_unlock(&gaiafs_fd_lock);
	} else if (err == 0 && c->welcome.version >= 2 && (frame.header.flags & ~GAIAFS_MORE) != 0) {
		(void)gaiafs_failed(&fail, EPROTO, "the daemon sent a frame with flags %#x, which this library does not know",
				    frame.header.flags);
		close_all(&frame);
		pthread_mutex_unlock(&gaiafs_fd_lock);
	} else if (err == 0) {
		pthread_mutex_lock(&c->lock);
		for (r = c->calls; r != NULL && (r->id != frame.header.id || r->state != SENT);)
			r = r->next;
		if (r != NULL)
			deliver_locked(c, r, &frame);
		unlock(c);
		if (r == NULL) {
			(void)gaiafs_failed(&fail, EPROTO, "the daemon answered a request that is not in progress");
			close_all(&frame);
		}
		pthread_mutex_unlock(&gaiafs_fd_lock);
	}
	if (fail.errnum == 0)
		return 0;
	gaiafs_lose(c, &fail); /* before the calls end, so that the next call makes a new connection */
	pthread_mutex_lock(&c->lock);
	while (c->calls != NULL) {
		c->calls->fail = c->lost;
		complete_locked(c, c->calls);
	}
	pthread_mutex_unlock(&c->lock);
	return 0;
}

/* Abandoned calls */

struct sweeper {
	struct gaiafs_job job; /* its first member */
	struct gaiafs_conn *c; /* with a reference */
};

static void sweep(struct gaiafs_job *job)
{
	struct gaiafs_conn *c = ((struct sweeper *)job)->c;

	pthread_mutex_lock(&c->lock);
	while (c->abandoned > 0 && c->lost.errnum == 0) {
		uint32_t seen = __atomic_load_n(&c->sweep, __ATOMIC_RELAXED);
		bool mine = !c->reading;

		c->reading = true;
		pthread_mutex_unlock(&c->lock);
		if (mine)
			(void)read_one(c, -1);
		else
			(void)futex_wait(&c->sweep, seen, -1);
		pthread_mutex_lock(&c->lock);
		if (mine)
			c->reading = false;
	}
	c->sweeping = false;
	pass_on_locked(c);
	pthread_mutex_unlock(&c->lock);
	gaiafs_conn_unref(c);
	free(job);
}

/*
 * have_swept_locked prepares a sweeper for abandoned calls. If there is no memory for one, the next call does the work.
 */
static struct sweeper *have_swept_locked(struct gaiafs_conn *c)
{
	struct sweeper *s;

	if (c->sweeping || (s = malloc(sizeof *s)) == NULL)
		return NULL;
	s->job.run = sweep;
	s->c = c;
	c->sweeping = true;
	return s;
}

static void post_sweeper(struct sweeper *s)
{
	struct gaiafs_fail f;

	if (gaiafs_prepare_work(&f) == 0) {
		gaiafs_conn_ref(s->c);
		gaiafs_post(&s->job);
		return;
	}
	pthread_mutex_lock(&s->c->lock);
	s->c->sweeping = false;
	pthread_mutex_unlock(&s->c->lock);
	free(s);
}

/*
 * abandon_locked replaces r with an abandoned copy for which nobody waits. An UNMAP that was not sent yet is still
 * sent. False: there is no memory for the copy, and the call goes on.
 */
static bool abandon_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct gaiafs_request *ghost;

	if (r->state == UNSENT && r->type != GAIAFS_UNMAP) {
		remove_locked(c, r);
		return true;
	}
	ghost = malloc(sizeof *ghost);
	if (ghost == NULL)
		return false;
	*ghost = *r;
	ghost->abandoned = true;
	ghost->parcels = NULL;
	ghost->rest = NULL;
	ghost->waiting = false;
	remove_locked(c, r);
	ghost->next = c->calls;
	c->calls = ghost;
	c->abandoned++;
	return true;
}

/* Calling */

/* wait_locked makes r wait until something happens. It returns 0, EINTR or ETIMEDOUT. */
static int wait_locked(struct gaiafs_conn *c, struct gaiafs_request *r, int timeout)
{
	uint32_t seen = __atomic_load_n(&r->wake, __ATOMIC_RELAXED);
	bool mine = !c->reading;
	int err;

	c->reading = true;
	r->waiting = !mine;
	unlock(c);
	err = mine ? read_one(c, timeout) : futex_wait(&r->wake, seen, timeout);
	pthread_mutex_lock(&c->lock);
	r->waiting = false;
	if (mine)
		c->reading = false;
	return err;
}

/* take_parcel_locked makes the request take its next parcel, if there is one. It drops the lock for that. */
static bool take_parcel_locked(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct gaiafs_parcel *p = r->parcels;
	struct gaiafs_fail f = { 0 };

	if (p == NULL)
		return false;
	r->parcels = p->next;
	p->next = NULL;
	pass_on_locked(c);
	pthread_mutex_unlock(&c->lock);
	(void)r->take(r, &p->frame, &f);
	if (f.errnum == 0 && p->frame.truncated)
		(void)gaiafs_failed(&f, EMFILE, "this process has no descriptors left for the extents: see ulimit -n");
	gaiafs_parcels_free(p);
	pthread_mutex_lock(&c->lock);
	keep_first(&r->fail, &f);
	return true;
}

static int64_t now_ms(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* begin_locked makes r a call of c. If c is lost, it returns the errno of that. */
static int begin_locked(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r)
{
	r->fail = (struct gaiafs_fail){ 0 };
	r->type = type;
	r->begun = now_ms();
	r->state = UNSENT;
	r->wake = 0;
	r->parcels = NULL;
	r->abandoned = r->mapped = r->waiting = false;
	memcpy(r->body, body, n);
	r->body_len = n;
	if (c->lost.errnum != 0) {
		r->fail = c->lost;
		return r->fail.errnum;
	}
	r->id = ++c->last_id;
	append_locked(c, r);
	pump_locked(c);
	return 0;
}

/*
 * no_handler_runs reports whether this thread blocks signals. Otherwise it may not wait with a time limit: after a
 * handler such a wait ends, even if the handler restarts calls.
 */
static bool no_handler_runs(void)
{
	static const int usual[] = { SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGCHLD, SIGUSR1, SIGUSR2 };
	sigset_t blocked;

	if (pthread_sigmask(SIG_BLOCK, NULL, &blocked) != 0)
		return false;
	for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
		if (sigismember(&blocked, usual[i]) != 1)
			return false;
	return true;
}

/* say_silence says on stderr, once for a call, that the daemon is stopped. A daemon that works may take long. */
static void say_silence(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct ucred peer = { 0 };
	socklen_t n = sizeof peer;
	char pid[16], state;

	if (r->begun == 0 || now_ms() - r->begun < gaiafs_silence ||
	    getsockopt(c->fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0 || peer.pid <= 0)
		return;
	(void)snprintf(pid, sizeof pid, "%d", (int)peer.pid);
	state = gaiafs_state_of(pid);
	if (state != 'T' && state != 't')
		return;
	r->begun = 0;
	(void)dprintf(STDERR_FILENO, "gaiafs: still waiting for the daemon: process %s is stopped, and 'kill -CONT %s' continues it\n",
		      pid, pid);
}

/* finish_locked waits until r's reply is complete. It returns 0, EINTR or ETIMEDOUT. */
static int finish_locked(struct gaiafs_conn *c, struct gaiafs_request *r, int timeout)
{
	int64_t until = timeout < 0 ? 0 : now_ms() + timeout;
	bool undisturbed = timeout < 0 && no_handler_runs();
	int err;

	while (take_parcel_locked(c, r) || r->state != DONE) {
		int64_t left = timeout < 0 ? -1 : until - now_ms();
		bool slice = timeout < 0 ? undisturbed : left > gaiafs_silence;

		if (r->parcels != NULL || r->state == DONE)
			continue;
		err = wait_locked(c, r, slice ? gaiafs_silence : timeout >= 0 && left < 0 ? 0 : (int)left);
		if (err == ETIMEDOUT && r->state != DONE) {
			say_silence(c, r);
			if (slice)
				continue;
		}
		if (err != 0 && r->state != DONE)
			return err;
	}
	return 0;
}

int gaiafs_call_begin(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r)
{
	int err;

	pthread_mutex_lock(&c->lock);
	err = begin_locked(c, type, body, n, r);
	unlock(c);
	return err;
}

int gaiafs_call_wait(struct gaiafs_conn *c, struct gaiafs_request *r, int timeout)
{
	int err;

	pthread_mutex_lock(&c->lock);
	err = finish_locked(c, r, timeout);
	pass_on_locked(c);
	pthread_mutex_unlock(&c->lock);
	return err;
}

void gaiafs_call_abandon(struct gaiafs_conn *c, struct gaiafs_request *r)
{
	struct sweeper *s = NULL;

	pthread_mutex_lock(&c->lock);
	if (r->state == SENT || (r->state == UNSENT && (r->type == GAIAFS_UNMAP || r->type == GAIAFS_DONE))) {
		r->abandoned = true;
		c->abandoned++;
		if (r->state == UNSENT && counts(r)) /* it goes out when a reply makes room, so a thread has to read */
			s = have_swept_locked(c);
	} else {
		if (r->state == UNSENT)
			remove_locked(c, r);
		free(r);
	}
	pthread_mutex_unlock(&c->lock);
	if (s != NULL)
		post_sweeper(s);
}

int gaiafs_call(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r)
{
	struct gaiafs_parcel *left = NULL;
	struct sweeper *s = NULL;

	pthread_mutex_lock(&c->lock);
	if (begin_locked(c, type, body, n, r) != 0) {
		pthread_mutex_unlock(&c->lock);
		return r->fail.errnum;
	}
	while (finish_locked(c, r, -1) != 0) {
		if (!abandon_locked(c, r))
			continue;
		left = r->parcels;
		r->abandoned = true;
		r->fail = (struct gaiafs_fail){ 0 };
		(void)gaiafs_failed(&r->fail, EINTR, "a signal interrupted the wait for the daemon, which may carry it out all the same");
		if (c->abandoned > 0)
			s = have_swept_locked(c);
		break;
	}
	pass_on_locked(c);
	pthread_mutex_unlock(&c->lock);
	gaiafs_parcels_free(left);
	if (s != NULL)
		post_sweeper(s);
	return r->fail.errnum;
}

void gaiafs_calls_free(struct gaiafs_conn *c)
{
	while (c->calls != NULL) {
		struct gaiafs_request *next = c->calls->next;

		free(c->calls);
		c->calls = next;
	}
}

int gaiafs_take_simple(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail)
{
	(void)r;
	return gaiafs_take_result(frame, fail);
}

int gaiafs_simple(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_fail *f)
{
	struct gaiafs_request r = { .take = gaiafs_take_simple };
	int err = gaiafs_call(c, type, body, n, &r);

	if (err != 0 || r.fail.text[0] != '\0')
		*f = r.fail;
	return err;
}

int gaiafs_call_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_request *r)
{
	struct gaiafs_rest rest = { .bytes = all, .n = n, .memfd = -1 };
	uint8_t body[GAIAFS_MAX_BODY];
	size_t head = 0;
	int err = 0;

	if (n > GAIAFS_MAX_REQUEST - GAIAFS_HEADER) {
		err = gaiafs_memfd_of(all, n, &rest.memfd, &r->fail);
		head = gaiafs_put_large(body, n);
	}
	if (err == 0) {
		r->rest = &rest;
		err = gaiafs_call(c, type, body, head, r);
		r->rest = NULL;
	}
	if (rest.memfd >= 0)
		close(rest.memfd);
	return err;
}

int gaiafs_simple_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_fail *f)
{
	struct gaiafs_request r = { .take = gaiafs_take_simple };
	int err = gaiafs_call_long(c, type, all, n, &r);

	if (err != 0 || r.fail.text[0] != '\0')
		*f = r.fail;
	return err;
}

void gaiafs_tell(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n)
{
	struct gaiafs_request *r = calloc(1, sizeof *r);

	if (r == NULL)
		return;
	r->take = gaiafs_take_simple;
	if (gaiafs_call_begin(c, type, body, n, r) == 0)
		gaiafs_call_abandon(c, r);
	else
		free(r);
}
