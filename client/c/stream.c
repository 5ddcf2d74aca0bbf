/*
 * Acquire and release in the order of a stream: a host function of CUDA asks the daemon. Such a function may call nothing of
 * CUDA, so it only speaks with the socket, as every other call of this library does.
 *
 * A call that waits in a stream, or runs, is in its mapping's list and keeps the mapping in the table. What a graph captured
 * may run at any time until the graph goes, so it keeps nothing: each run looks for the mapping, by its address and serial
 * number, and is in the list while it runs.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A stream-ordered call. */
struct gaiafs_later {
	struct gaiafs_work work; /* its first member */
	void *addr;              /* immutable, as are len, release and serial */
	size_t len;
	bool release;
	uint64_t serial; /* of the mapping */

	/* Guarded by gaiafs_table_lock. */
	struct gaiafs_later *next; /* in the mapping's list */
	bool started, given_up;
};

/* The first failure of a graph whose mapping was gone; guarded by gaiafs_table_lock. */
static struct gaiafs_fail homeless;

static void list_locked(struct gaiafs_mapping *m, struct gaiafs_later *l)
{
	l->next = m->queued;
	m->queued = l;
}

static void unlist_locked(struct gaiafs_mapping *m, struct gaiafs_later *l)
{
	for (struct gaiafs_later **p = &m->queued; *p != NULL; p = &(*p)->next)
		if (*p == l) {
			*p = l->next;
			return;
		}
}

static struct gaiafs_mapping *mapping_locked(const struct gaiafs_later *l)
{
	struct gaiafs_mapping *m = gaiafs_table_at_locked(l->addr);

	return m != NULL && m->serial == l->serial ? m : NULL;
}

static void keep_locked(struct gaiafs_fail *kept, const struct gaiafs_fail *f)
{
	if (f->errnum != 0 && kept->errnum == 0)
		*kept = *f;
}

/* perform asks the daemon, for a call that is in m's list, and takes it out. */
static void perform(struct gaiafs_mapping *m, struct gaiafs_later *l)
{
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	if (l->release)
		(void)gaiafs_release(m, l->addr, l->len, &f);
	else
		(void)gaiafs_acquire(m, l->addr, l->len, &f);
	pthread_mutex_lock(&gaiafs_table_lock);
	keep_locked(&m->late, &f);
	unlist_locked(m, l); /* m may go from here on */
	pthread_mutex_unlock(&gaiafs_table_lock);
	(void)gaiafs_leave(state, 0, &f);
}

/* run_once is the host function of a call that no graph has. */
static void run_once(struct gaiafs_later *l)
{
	struct gaiafs_mapping *m = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	if (!l->given_up) {
		m = mapping_locked(l);
		l->started = true;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (m != NULL)
		perform(m, l);
	free(l);
}

/* run_again is that of one that a graph has, which may run in two launches of it at a time. */
static void run_again(const struct gaiafs_later *l)
{
	struct gaiafs_later now = { .addr = l->addr, .len = l->len, .release = l->release, .serial = l->serial,
				    .started = true };
	struct gaiafs_mapping *m;
	struct gaiafs_fail f = { 0 };

	pthread_mutex_lock(&gaiafs_table_lock);
	m = mapping_locked(&now);
	if (m != NULL) {
		list_locked(m, &now);
	} else {
		(void)gaiafs_failed(&f, ENOMEM, "a graph was to %s %zu bytes at %p, whose mapping is gone",
				    l->release ? "release" : "acquire", l->len, l->addr);
		keep_locked(&homeless, &f);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (m != NULL)
		perform(m, &now);
}

static void run(void *work)
{
	struct gaiafs_later *l = work;

	if (l->work.captured)
		run_again(l);
	else
		run_once(l);
}

/* leave takes a call out of its mapping's list: a graph is about to have it, and may free it at any time. */
static void leave(void *work)
{
	struct gaiafs_later *l = work;
	struct gaiafs_mapping *m;

	pthread_mutex_lock(&gaiafs_table_lock);
	m = mapping_locked(l);
	if (m != NULL)
		unlist_locked(m, l);
	pthread_mutex_unlock(&gaiafs_table_lock);
}

/* enqueue makes a call of m later. The range lies within m. */
static void enqueue(struct gaiafs_mapping *m, void *addr, size_t len, bool release, void *stream, struct gaiafs_fail *f)
{
	struct gaiafs_later here = { .started = true }; /* keeps m until this is done, whatever becomes of l */
	struct gaiafs_later *l = calloc(1, sizeof *l);
	bool captured = false;
	int err = 0;

	if (l == NULL) {
		(void)gaiafs_failed(f, ENOMEM, "out of memory");
		return;
	}
	*l = (struct gaiafs_later){ .work = { .run = run, .leave = leave, .free = free }, .addr = addr, .len = len,
				    .release = release, .serial = m->serial };
	pthread_mutex_lock(&gaiafs_table_lock);
	if (m->listed) {
		list_locked(m, &here);
		list_locked(m, l);
	} else {
		err = gaiafs_failed(f, ENOMEM, "the mapping is gone");
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (err != 0) {
		free(l);
		return;
	}
	err = gaiafs_cuda_enqueue(m->cuda, stream, &l->work, &captured, f);
	/* l is the stream's, or the graph's, and may be gone; or this function's, if the call failed without a graph. */
	pthread_mutex_lock(&gaiafs_table_lock);
	unlist_locked(m, &here);
	if (err != 0 && !captured)
		unlist_locked(m, l);
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (err != 0 && !captured)
		free(l);
}

static int in_order(void *addr, size_t len, int dev, bool release, gaia_stream_t stream)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = gaiafs_find(addr, len, &f);
	if (m != NULL && gaiafs_check_device(m, dev, &f) == 0) {
		if (m->kind == &gaiafs_cuda_kind)
			enqueue(m, addr, len, release, stream, &f);
		else if (stream != NULL)
			(void)gaiafs_failed(&f, EINVAL, "the mapping is on an emulated device, which has no stream but NULL");
		else if (release)
			(void)gaiafs_release(m, addr, len, &f);
		else
			(void)gaiafs_acquire(m, addr, len, &f);
	}
	if (m != NULL)
		gaiafs_mapping_unref(m);
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_macquire_async(void *addr, size_t len, int dev, gaia_stream_t stream)
{
	return in_order(addr, len, dev, false, stream);
}

int gaia_mrelease_async(void *addr, size_t len, int dev, gaia_stream_t stream)
{
	return in_order(addr, len, dev, true, stream);
}

static int take_locked(struct gaiafs_fail *kept, struct gaiafs_fail *f)
{
	if (kept->errnum == 0)
		return 0;
	*f = *kept;
	*kept = (struct gaiafs_fail){ 0 };
	return f->errnum;
}

int gaiafs_later_fail(struct gaiafs_mapping *m, struct gaiafs_fail *f)
{
	int err;

	pthread_mutex_lock(&gaiafs_table_lock);
	err = take_locked(&m->late, f);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return err;
}

int gaia_async_error(void *addr)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	if (addr == NULL) {
		pthread_mutex_lock(&gaiafs_table_lock);
		(void)take_locked(&homeless, &f);
		pthread_mutex_unlock(&gaiafs_table_lock);
	} else if ((m = gaiafs_find(addr, 1, &f)) != NULL) {
		(void)gaiafs_later_fail(m, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

/*
 * A context with an error, such as that of a kernel that stored where it must not, never runs what waits in its streams, and
 * CUDA tells nobody. So there is nothing to wait for but time, and now and then a question.
 */
void gaiafs_later_settle(const void *addr, unsigned round)
{
	const struct timespec pause = { .tv_nsec = round < 20 ? 50000 : 2000000 };
	struct gaiafs_mapping *m;
	struct gaiafs_fail f = { 0 };
	void *context = NULL;
	unsigned waiting = 0, turn;

	(void)nanosleep(&pause, NULL);
	if (round % 50 != 49)
		return;
	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_at_locked(addr);
	for (struct gaiafs_later *l = m != NULL ? m->queued : NULL; l != NULL; l = l->next)
		waiting += !l->started;
	turn = waiting > 0 ? round / 50 % waiting : 0; /* each has its turn */
	for (struct gaiafs_later *l = waiting > 0 ? m->queued : NULL; l != NULL; l = l->next)
		if (!l->started && turn-- == 0) {
			context = __atomic_load_n(&l->work.context, __ATOMIC_ACQUIRE);
			break;
		}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (context == NULL || !gaiafs_cuda_lost(context, &f))
		return;
	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_at_locked(addr);
	for (struct gaiafs_later **p = m != NULL ? &m->queued : NULL; p != NULL && *p != NULL;) {
		struct gaiafs_later *l = *p;

		if (l->started || __atomic_load_n(&l->work.context, __ATOMIC_ACQUIRE) != context) {
			p = &l->next;
			continue;
		}
		l->given_up = true; /* and left to the stream, in case it runs it after all */
		*p = l->next;
		struct gaiafs_fail words = { 0 };
		(void)gaiafs_failed(&words, EIO, "a %s in stream order was never done: %.900s", l->release ? "release" : "acquire",
				    f.text);
		keep_locked(&m->late, &words);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
}
