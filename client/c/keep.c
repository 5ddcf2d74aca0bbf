/*
 * Kept brackets. If the daemon allows it, a bracket stays open after the program has ended it. The next bracket with
 * the same ranges in the same order joins it, without asking the daemon. RECALL ends the kept brackets that have no
 * users, the least recently used first. The others end once their last user is done.
 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024, MOST_KEPT = 8192, MARKS = 4 };

struct gaiafs_kept {
	struct gaiafs_job job; /* its first member */
	struct gaiafs_kept *next;           /* in its bucket, or in the list that take returns */
	struct gaiafs_kept *older, *newer;  /* in order of last use. Guarded by gaiafs_table_lock */
	struct gaiafs_mapping *m; /* of the first range; without a reference in the table, because munmap takes k out */
	uint64_t id;              /* immutable */
	bool told;                /* the daemon knows that the bracket has ended */

	/* Guarded by gaiafs_table_lock. */
	unsigned users; /* brackets of the program */
	bool ending;    /* out of the table; the last user ends it */
	struct mark {
		gaia_stream_t stream;
		void *event; /* after the last use in the stream */
		bool used, busy;
	} marks[MARKS];

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
		unlink_locked(k);
		use_locked(k);
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return k;
}

/*
 * end ends a kept bracket. Unless the daemon knows of the end already, it first waits for the kernels that use the
 * bracket.
 */
static void end(struct gaiafs_job *j)
{
	struct gaiafs_kept *k = (struct gaiafs_kept *)j; /* its first member */

	for (size_t i = 0; i < MARKS; i++)
		if (k->marks[i].event != NULL)
			k->m->kind->unmark(k->m->gpu, k->marks[i].event, !k->told);
	if (!k->told && gaiafs_mapping_mine(k->m))
		gaiafs_without(k->m, k->id);
	gaiafs_mapping_unref(k->m);
	free(k);
}

struct gaiafs_kept *gaiafs_keep(uint64_t bracket, const struct gaiafs_span *spans, size_t n)
{
	struct gaiafs_kept *k = malloc(sizeof *k + n * sizeof *spans);
	bool fits;

	if (k == NULL)
		return NULL;
	*k = (struct gaiafs_kept){ .job = { .run = end }, .m = spans[0].m, .id = bracket, .users = 1, .n = n };
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
	if (last)
		gaiafs_post(&k->job);
}

int gaiafs_keep_mark(struct gaiafs_kept *k, gaia_stream_t stream, struct gaiafs_fail *f)
{
	struct mark *mine = NULL;
	int err;

	pthread_mutex_lock(&gaiafs_table_lock);
	for (struct mark *x = k->marks; x < k->marks + MARKS; x++)
		if (x->used ? x->stream == stream && !x->busy : mine == NULL)
			mine = x;
	if (mine != NULL)
		*mine = (struct mark){ .stream = stream, .event = mine->event, .used = true, .busy = true };
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (mine == NULL)
		return gaiafs_failed(f, EBUSY, "more streams use the range than there are marks");
	err = k->m->kind->mark(k->m->gpu, stream, &mine->event, f);
	pthread_mutex_lock(&gaiafs_table_lock);
	mine->busy = false;
	mine->used = mine->event != NULL;
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

size_t gaiafs_keep_recall(const struct gaiafs_conn *c, uint64_t *ids, size_t most)
{
	struct gaiafs_kept *k, *next;
	size_t n = 0;

	while (n < most && (k = take(c, NULL, most - n)) != NULL)
		for (; k != NULL; k = next) {
			next = k->next;
			k->told = true;
			for (size_t i = 0; i < MARKS; i++)
				k->told = k->told && (k->marks[i].event == NULL || k->m->kind->passed(k->marks[i].event));
			if (k->told)
				ids[n++] = k->id;
			gaiafs_post(&k->job);
		}
	return n;
}

void gaiafs_keep_drop(const struct gaiafs_mapping *m)
{
	struct gaiafs_kept *k = m->movable ? take(NULL, m, SIZE_MAX) : NULL, *next;

	for (; k != NULL; k = next) {
		next = k->next;
		gaiafs_post(&k->job);
	}
}

void gaiafs_keep_after_fork(void)
{
	for (size_t i = 0; i < BUCKETS; i++)
		table[i] = NULL; /* they are the parent's */
	oldest = newest = NULL;
	count = 0;
}
