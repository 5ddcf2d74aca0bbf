/*
 * Acquire and release in stream order. A CUDA host function says when it is the call's turn. It must not wait: a
 * context runs such functions one at a time, and the driver may hold locks that another thread waits for. So it leaves
 * the work to a thread of work.c, which asks the daemon. The stream waits for a word in memory, into which that thread
 * stores when it is done.
 *
 * A graph may be launched twice concurrently, and both runs share the word. The word says "done" only when all runs
 * that began are done.
 *
 * A call that is queued in a stream or runs is in its mapping's list, and keeps the mapping in the table. A captured
 * call may run at any time until its graph is destroyed, so it keeps nothing. Each run finds the mapping by address and
 * serial number, and is in the list while it runs.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A stream-ordered call. */
struct gaiafs_later {
	struct gaiafs_work work; /* its first member */
	struct gaiafs_job job;
	void *addr;              /* immutable, like len, release and serial */
	size_t len;
	bool release;
	uint64_t serial; /* of the mapping */

	/* Guarded by gaiafs_table_lock. */
	struct gaiafs_later *next; /* in the mapping's list */
	bool started, given_up;

	/* Guarded by runs_lock. */
	unsigned runs; /* begun and not done */
	bool orphan;   /* its graph is gone */
};

/*
 * Limits how many unfinished calls streams have, and so how much the driver and the threads of work.c may have queued.
 */
enum { MOST_WAITING = 16384 };
static unsigned unfinished; /* atomic */

static void later_free(struct gaiafs_later *l)
{
	free(l);
	__atomic_sub_fetch(&unfinished, 1, __ATOMIC_RELAXED);
}

/* Held for a few instructions, also by host functions. */
static pthread_mutex_t runs_lock = PTHREAD_MUTEX_INITIALIZER;

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

/* perform sends the request of a call that is in m's list, and takes the call out of the list. */
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
	unlist_locked(m, l); /* m may be freed now */
	pthread_mutex_unlock(&gaiafs_table_lock);
	(void)gaiafs_leave(state, 0, &f);
}

/* run_once does a call that was not captured. */
static void run_once(struct gaiafs_later *l)
{
	struct gaiafs_word *word = l->work.word;
	struct gaiafs_mapping *m = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	if (!l->given_up) {
		m = mapping_locked(l);
		l->started = true;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (m != NULL)
		perform(m, l);
	later_free(l); /* before the stream goes on, so that its next call does not exceed the limit */
	word->done(word);
}

/* run_again does one run of a captured call. */
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

/* serve does the call that a host function posted. */
static void serve(struct gaiafs_job *job)
{
	struct gaiafs_later *l = (struct gaiafs_later *)((char *)job - offsetof(struct gaiafs_later, job));
	bool done, orphan = false;

	if (!l->work.captured) {
		run_once(l);
		return;
	}
	do {
		run_again(l);
		pthread_mutex_lock(&runs_lock);
		done = --l->runs == 0;
		if (done) {
			orphan = l->orphan;
			__atomic_store_n(l->work.word->at, l->work.word->value, __ATOMIC_RELEASE);
		}
		pthread_mutex_unlock(&runs_lock); /* l may be freed now */
	} while (!done);
	if (orphan) {
		l->work.word->done(l->work.word);
		free(l);
	}
}

/* run is the host function. */
static void run(void *work)
{
	struct gaiafs_later *l = work;

	pthread_mutex_lock(&runs_lock);
	if (l->runs++ == 0) {
		__atomic_store_n(l->work.word->at, l->work.word->value - 1, __ATOMIC_RELEASE);
		gaiafs_post(&l->job);
	}
	pthread_mutex_unlock(&runs_lock);
}

/* graph_free is called when no graph has the call any more. */
static void graph_free(void *work)
{
	struct gaiafs_later *l = work;
	bool busy;

	pthread_mutex_lock(&runs_lock);
	l->orphan = busy = l->runs > 0;
	pthread_mutex_unlock(&runs_lock);
	if (busy)
		return;
	l->work.word->done(l->work.word);
	free(l);
}

/* leave takes a call out of its mapping's list, because a graph is about to own it and may free it at any time. */
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

/* enqueue puts a stream-ordered call of m into a stream. The range lies within m. */
static void enqueue(struct gaiafs_mapping *m, void *addr, size_t len, bool release, gaia_stream_t stream,
		    struct gaiafs_fail *f)
{
	struct gaiafs_later here = { .started = true }; /* keeps m until this function is done, whatever happens to l */
	struct gaiafs_later *l;
	bool captured = false, launched = false;
	int err = 0;

	if (gaiafs_prepare_work(f) != 0)
		return;
	if (__atomic_add_fetch(&unfinished, 1, __ATOMIC_RELAXED) > MOST_WAITING) {
		(void)gaiafs_failed(f, EAGAIN, "%d calls in stream order are not done yet", MOST_WAITING);
		__atomic_sub_fetch(&unfinished, 1, __ATOMIC_RELAXED);
		return;
	}
	l = calloc(1, sizeof *l);
	if (l == NULL) {
		(void)gaiafs_failed(f, ENOMEM, "out of memory");
		__atomic_sub_fetch(&unfinished, 1, __ATOMIC_RELAXED);
		return;
	}
	*l = (struct gaiafs_later){ .work = { .run = run, .leave = leave, .free = graph_free }, .job = { .run = serve },
				    .addr = addr, .len = len, .release = release, .serial = m->serial };
	pthread_mutex_lock(&gaiafs_table_lock);
	if (m->listed) {
		list_locked(m, &here);
		list_locked(m, l);
	} else {
		err = gaiafs_failed(f, ENOMEM, "the mapping is gone");
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (err != 0) {
		later_free(l);
		return;
	}
	(void)m->kind->enqueue(m->gpu, stream, &l->work, &captured, &launched, f);
	/* If launched or captured, l belongs to the stream or the graph and may be freed. Otherwise it is still ours. */
	pthread_mutex_lock(&gaiafs_table_lock);
	unlist_locked(m, &here);
	if (!launched && !captured)
		unlist_locked(m, l);
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (!launched && !captured) {
		if (l->work.word != NULL)
			l->work.word->done(l->work.word);
		later_free(l);
	}
	if (captured) /* a graph's call does not count: there is one per node */
		__atomic_sub_fetch(&unfinished, 1, __ATOMIC_RELAXED);
}

static int in_order(void *addr, size_t len, int dev, bool release, gaia_stream_t stream)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_ready none;
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = gaiafs_find(addr, len, &f);
	if (m != NULL && gaiafs_check_device(m, dev, &f) == 0) {
		if (m->conn == NULL)
			(void)gaiafs_prepare(m, GAIA_DO_RELEASE, addr, len, 0, stream, &none, &f); /* fails, with the reason */
		else if (m->kind->enqueue != NULL)
			enqueue(m, addr, len, release, stream, &f);
		else if (stream != NULL)
			(void)gaiafs_failed(&f, EINVAL, "the mapping's device has no stream but NULL");
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
 * A failed context, for example one whose kernel stored to a wrong address, never runs what is queued in its streams.
 * CUDA does not notify anybody. So this sleeps, and now and then asks CUDA whether the context is lost.
 */
bool gaiafs_later_pause(const void *addr, unsigned round)
{
	const struct timespec pause = { .tv_nsec = round < 20 ? 50000 : 2000000 };
	struct gaiafs_mapping *m;
	struct gaiafs_fail f = { 0 };
	const struct gaiafs_kind *kind = NULL;
	void *context = NULL;
	unsigned waiting = 0, turn;

	if (nanosleep(&pause, NULL) != 0 && errno == EINTR)
		return false;
	if (round % 50 != 49)
		return true;
	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_at_locked(addr);
	for (struct gaiafs_later *l = m != NULL ? m->queued : NULL; l != NULL; l = l->next)
		waiting += !l->started;
	turn = waiting > 0 ? round / 50 % waiting : 0; /* asks about each in turn */
	for (struct gaiafs_later *l = waiting > 0 ? m->queued : NULL; l != NULL; l = l->next)
		if (!l->started && turn-- == 0) {
			context = __atomic_load_n(&l->work.context, __ATOMIC_ACQUIRE);
			kind = m->kind;
			break;
		}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (context == NULL || !kind->lost(context, &f))
		return true;
	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_at_locked(addr);
	for (struct gaiafs_later **p = m != NULL ? &m->queued : NULL; p != NULL && *p != NULL;) {
		struct gaiafs_later *l = *p;

		if (l->started || __atomic_load_n(&l->work.context, __ATOMIC_ACQUIRE) != context) {
			p = &l->next;
			continue;
		}
		l->given_up = true; /* l stays with the stream, which might still run it */
		*p = l->next;
		struct gaiafs_fail words = { 0 };
		(void)gaiafs_failed(&words, EIO, "a %s in stream order was never done: %.900s", l->release ? "release" : "acquire",
				    f.text);
		keep_locked(&m->late, &words);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return true;
}
