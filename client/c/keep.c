/*
 * Kept brackets. If the daemon allows it, a bracket stays open after the program has ended it. The next bracket with
 * the same ranges in the same order joins it, without asking the daemon. RECALL ends the kept brackets that have no
 * users, the least recently used first. The others end once their last user is done. The daemon does not see brackets
 * that join; it is told how many there were when the kept bracket ends.
 *
 * A bracket that kernels still use when it is to end is watched until they are done. No thread waits for them: a kernel
 * may itself wait for the threads of work.c. In all other cases gaia_done, gaia_munmap and gaia_drop send the DONE
 * themselves, so the daemon gets it before the thread's next request.
 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BUCKETS = 1024, MOST_KEPT = 8192, MARKS = 4 };

struct gaiafs_kept {
	struct gaiafs_job job; /* its first member */
	struct gaiafs_kept *next;           /* in its bucket, in the list that take returns, or in watched */
	struct gaiafs_kept *older, *newer;  /* in order of last use. Guarded by gaiafs_table_lock */
	struct gaiafs_mapping *m; /* of the first range; without a reference in the table, because munmap takes k out */
	uint64_t id;              /* immutable */
	bool told;                /* the daemon knows that the bracket has ended */

	/* Guarded by gaiafs_table_lock. */
	unsigned users; /* brackets of the program */
	uint32_t joined; /* brackets that have joined so far; full at UINT32_MAX */
	bool ending;    /* out of the table; the last user ends it */
	struct mark {
		uint64_t stream; /* its number; 0: none */
		void *event;     /* after the last use in the stream */
		bool busy;
	} marks[MARKS];
	unsigned turn; /* of the marks, which is tried next if all are used */

	size_t n;                    /* number of spans. Both are immutable; the spans have no references either */
	struct gaiafs_span spans[];
};

/* Guarded by gaiafs_table_lock. */
static struct gaiafs_kept *table[BUCKETS], *oldest, *newest;
static unsigned count;

static struct gaiafs_kept **bucket_of(const struct gaiafs_span *spans, size_t n)
{
	uint64_t h = n;

	for (size_t i = 0; i < n; i++) {
		const struct gaiafs_span *s = &spans[i];

		h ^= (uintptr_t)s->m ^ s->off / GAIAFS_PAGE * UINT64_C(0x9e3779b97f4a7c15);
		h = h * UINT64_C(0xff51afd7ed558ccd) ^ s->len;
		h ^= h >> 32;
	}
	return &table[h % BUCKETS];
}

static bool same(const struct gaiafs_kept *k, const struct gaiafs_span *spans, size_t n)
{
	size_t i = 0;

	while (k->n == n && i < n && k->spans[i].m == spans[i].m && k->spans[i].off == spans[i].off &&
		k->spans[i].len == spans[i].len)
		i++;
	return k->n == n && i == n;
}

/* uses reports whether one of k's ranges is of m. */
static bool uses(const struct gaiafs_kept *k, const struct gaiafs_mapping *m)
{
	size_t i = 0;

	while (i < k->n && k->spans[i].m != m)
		i++;
	return i < k->n;
}

static struct gaiafs_kept *find_locked(const struct gaiafs_span *spans, size_t n)
{
	struct gaiafs_kept *k = *bucket_of(spans, n);

	while (k != NULL && !same(k, spans, n))
		k = k->next;
	return k;
}

/* use_locked makes k the most recently used. */
static void use_locked(struct gaiafs_kept *k)
{
	k->older = newest;
	k->newer = NULL;
	*(newest != NULL ? &newest->newer : &oldest) = k;
	newest = k;
}

static void unlink_locked(struct gaiafs_kept *k)
{
	*(k->older != NULL ? &k->older->newer : &oldest) = k->newer;
	*(k->newer != NULL ? &k->newer->older : &newest) = k->older;
}

struct gaiafs_kept *gaiafs_keep_find(const struct gaiafs_span *spans, size_t n)
{
	struct gaiafs_kept *k = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	if (spans[0].m->conn->state == READY) /* if it is lost, the request's failure says why */
		k = find_locked(spans, n);
	if (k != NULL) {
		k->users++;
		k->joined += k->joined < UINT32_MAX;
		unlink_locked(k);
		use_locked(k);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return k;
}

/* idle reports whether no kernel uses k any more. k is out of the table and has no users. */
static bool idle(const struct gaiafs_kept *k)
{
	size_t i = 0;

	while (i < MARKS && (k->marks[i].event == NULL || k->m->kind->passed(k->marks[i].event)))
		i++;
	return i == MARKS;
}

/* end ends a kept bracket. It first waits for kernels that use it, unless the daemon knows of the end already. */
static void end(struct gaiafs_kept *k)
{
	for (size_t i = 0; i < MARKS; i++)
		if (k->marks[i].event != NULL)
			k->m->kind->unmark(k->m->gpu, k->marks[i].event, !k->told);
	if (!k->told && gaiafs_mapping_mine(k->m))
		gaiafs_tell_done(k->m, (struct gaiafs_ended){ k->id, k->joined });
	gaiafs_mapping_unref(k->m);
	free(k);
}

static void end_job(struct gaiafs_job *j)
{
	end((struct gaiafs_kept *)j);
}

/* Brackets that end once no kernel uses them. */
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER; /* of internal.h */
static struct gaiafs_kept *watched;                          /* guarded by watching */
static bool looking;                                         /* look is queued or runs; guarded by watching */

/* look ends the watched brackets that no kernel uses any more. CUDA does not notify anybody, so it looks repeatedly. */
static void look(struct gaiafs_job *job)
{
	const struct timespec pause = { .tv_nsec = 200000 };
	bool again;

	pthread_mutex_lock(&watching);
	for (struct gaiafs_kept **p = &watched, *k; (k = *p) != NULL;) {
		if (!idle(k)) {
			p = &k->next;
			continue;
		}
		*p = k->next;
		end(k);
	}
	again = looking = watched != NULL;
	pthread_mutex_unlock(&watching);
	if (!again)
		return;
	(void)nanosleep(&pause, NULL);
	gaiafs_post(job);
}

static void watch(struct gaiafs_kept *k)
{
	static struct gaiafs_job job = { .run = look };
	bool begin;

	pthread_mutex_lock(&watching);
	k->next = watched;
	watched = k;
	begin = !looking;
	looking = true;
	pthread_mutex_unlock(&watching);
	if (begin)
		gaiafs_post(&job);
}

struct gaiafs_kept *gaiafs_keep(uint64_t bracket, const struct gaiafs_span *spans, size_t n)
{
	struct gaiafs_kept *k = malloc(sizeof *k + n * sizeof *spans);
	bool fits;

	if (k == NULL)
		return NULL;
	*k = (struct gaiafs_kept){ .job = { .run = end_job }, .m = spans[0].m, .id = bracket, .users = 1, .n = n };
	memcpy(k->spans, spans, n * sizeof *spans);
	pthread_mutex_lock(&gaiafs_table_lock);
	fits = count < MOST_KEPT && find_locked(spans, n) == NULL;
	for (size_t i = 0; i < n; i++)
		fits = fits && spans[i].m->listed;
	if (fits) {
		struct gaiafs_kept **b = bucket_of(spans, n);

		k->next = *b;
		*b = k;
		use_locked(k);
		count++;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (!fits) {
		free(k);
		k = NULL;
	}
	return k;
}

void gaiafs_keep_done(struct gaiafs_kept *k)
{
	bool last;

	pthread_mutex_lock(&gaiafs_table_lock);
	last = --k->users == 0 && k->ending;
	k->m->refs += last; /* for k itself, in addition to the bracket's */
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (last && idle(k))
		end(k);
	else if (last)
		watch(k);
}

/*
 * take_mark makes a mark busy and returns it: that of the stream, an unused one, or else the next one in turn. *old is
 * the stream that it had before.
 */
static struct mark *take_mark(struct gaiafs_kept *k, uint64_t number, uint64_t *old)
{
	struct mark *mine = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	for (struct mark *x = k->marks; x < k->marks + MARKS; x++)
		if (!x->busy && (x->stream == number || (x->stream == 0 && mine == NULL)))
			mine = x;
	if (mine == NULL && !k->marks[k->turn].busy)
		mine = &k->marks[k->turn];
	k->turn = (k->turn + 1) % MARKS;
	if (mine != NULL) {
		*old = mine->stream;
		mine->busy = true;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return mine;
}

int gaiafs_keep_mark(struct gaiafs_kept *k, gaia_stream_t stream, struct gaiafs_fail *f)
{
	uint64_t number = 0, old = 0;
	struct mark *mine;
	int err = k->m->kind->stream_number(k->m->gpu, stream, &number, f);

	if (err != 0)
		return err;
	mine = take_mark(k, number, &old);
	if (mine == NULL)
		return gaiafs_failed(f, EBUSY, "more streams use the range than there are marks");
	if (old != 0 && old != number && !k->m->kind->passed(mine->event))
		err = gaiafs_failed(f, EBUSY, "more streams use the range than there are marks");
	else
		err = k->m->kind->mark(k->m->gpu, stream, &mine->event, f);
	pthread_mutex_lock(&gaiafs_table_lock);
	mine->busy = false;
	mine->stream = err == 0 ? number : old;
	pthread_mutex_unlock(&gaiafs_table_lock);
	return err;
}

/*
 * take takes kept brackets out of the table: those of a connection, or those with a range of m. It returns at most most
 * of those without users, the oldest first, each with a reference on k->m. The last user of each other one ends it.
 */
static struct gaiafs_kept *take(const struct gaiafs_conn *c, const struct gaiafs_mapping *m, size_t most)
{
	struct gaiafs_kept *taken = NULL, **last = &taken, **p, *newer;

	pthread_mutex_lock(&gaiafs_table_lock);
	for (struct gaiafs_kept *k = oldest; k != NULL; k = newer) {
		newer = k->newer;
		if ((m != NULL ? !uses(k, m) : k->m->conn != c) || (k->users == 0 && most == 0))
			continue;
		for (p = bucket_of(k->spans, k->n); *p != k; p = &(*p)->next)
			continue;
		*p = k->next;
		unlink_locked(k);
		count--;
		k->ending = true;
		if (k->users > 0)
			continue;
		most--;
		k->m->refs++;
		k->next = NULL;
		*last = k;
		last = &k->next;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return taken;
}

size_t gaiafs_keep_recall(const struct gaiafs_conn *c, struct gaiafs_ended *ended, size_t most)
{
	struct gaiafs_kept *k, *next;
	size_t n = 0;

	while (n < most && (k = take(c, NULL, most - n)) != NULL)
		for (; k != NULL; k = next) {
			next = k->next;
			k->told = idle(k);
			if (k->told) {
				ended[n++] = (struct gaiafs_ended){ k->id, k->joined };
				gaiafs_post(&k->job);
			} else {
				watch(k);
			}
		}
	return n;
}

void gaiafs_keep_drop(const struct gaiafs_mapping *m)
{
	struct gaiafs_kept *k, *next;

	if (!m->movable)
		return;
	k = take(NULL, m, SIZE_MAX);
	pthread_mutex_lock(&watching);
	for (struct gaiafs_kept **p = &watched; (next = *p) != NULL;) {
		if (!uses(next, m)) {
			p = &next->next;
			continue;
		}
		*p = next->next;
		next->next = k;
		k = next;
	}
	pthread_mutex_unlock(&watching);
	for (; k != NULL; k = next) {
		next = k->next;
		end(k);
	}
}

void gaiafs_keep_after_fork(void)
{
	for (size_t i = 0; i < BUCKETS; i++)
		table[i] = NULL; /* they are the parent's */
	oldest = newest = watched = NULL;
	watching = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	looking = false;
	count = 0;
}
