/*
 * Brackets that are kept: where the daemon allows it, a bracket of one range stays open when the program is done with
 * it. The next one of the same range joins it, and asks nobody. RECALL ends those that nobody uses, and has the others
 * end as usual.
 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <stdlib.h>

enum { BUCKETS = 1024, MOST_KEPT = 8192, MARKS = 4 };

struct gaiafs_kept {
	struct gaiafs_job job; /* its first member */
	struct gaiafs_kept *next;
	struct gaiafs_mapping *m; /* without a reference while it is in the table: munmap takes it out */
	uint64_t id, off, len;    /* immutable */
	bool told;                /* the daemon knows that it has ended */

	/* Guarded by gaiafs_table_lock. */
	unsigned users; /* brackets of the program */
	bool ending;    /* out of the table: the last user ends it */
	struct mark {
		gaia_stream_t stream;
		void *event; /* the last use in the stream */
		bool used, busy;
	} marks[MARKS];
};

/* Guarded by gaiafs_table_lock. */
static struct gaiafs_kept *table[BUCKETS];
static unsigned count;

static struct gaiafs_kept **bucket_of(const struct gaiafs_mapping *m, uint64_t off, uint64_t len)
{
	uint64_t h = (uintptr_t)m ^ off / GAIAFS_PAGE * UINT64_C(0x9e3779b97f4a7c15) ^ len * UINT64_C(0xff51afd7ed558ccd);

	return &table[(h ^ h >> 32) % BUCKETS];
}

static struct gaiafs_kept *find_locked(const struct gaiafs_mapping *m, uint64_t off, uint64_t len)
{
	struct gaiafs_kept *k = *bucket_of(m, off, len);

	while (k != NULL && (k->m != m || k->off != off || k->len != len))
		k = k->next;
	return k;
}

struct gaiafs_kept *gaiafs_keep_find(struct gaiafs_mapping *m, uint64_t off, uint64_t len)
{
	struct gaiafs_kept *k = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	if (m->conn->state == READY) /* else the daemon's answer says what is the matter */
		k = find_locked(m, off, len);
	if (k != NULL)
		k->users++;
	pthread_mutex_unlock(&gaiafs_table_lock);
	return k;
}

/* end waits for the kernels that use it, where the daemon does not know yet that it has ended. */
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

struct gaiafs_kept *gaiafs_keep(struct gaiafs_mapping *m, uint64_t bracket, uint64_t off, uint64_t len)
{
	struct gaiafs_kept *k = calloc(1, sizeof *k);
	bool fits;

	if (k == NULL)
		return NULL;
	*k = (struct gaiafs_kept){ .job = { .run = end }, .m = m, .id = bracket, .off = off, .len = len, .users = 1 };
	pthread_mutex_lock(&gaiafs_table_lock);
	fits = m->listed && count < MOST_KEPT && find_locked(m, off, len) == NULL;
	if (fits) {
		struct gaiafs_kept **b = bucket_of(m, off, len);

		k->next = *b;
		*b = k;
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
	k->m->refs += last; /* its own, besides the bracket's */
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

/* take takes those of a connection, or of a mapping, out of the table: at most so many that nobody uses, which get a
 * reference on their mapping and are returned. Their users end the others. */
static struct gaiafs_kept *take(const struct gaiafs_conn *c, const struct gaiafs_mapping *m, size_t most)
{
	struct gaiafs_kept *taken = NULL;

	pthread_mutex_lock(&gaiafs_table_lock);
	for (size_t i = 0; i < BUCKETS && count > 0; i++)
		for (struct gaiafs_kept **p = &table[i], *k; (k = *p) != NULL;) {
			if ((m != NULL ? k->m != m : k->m->conn != c) || (k->users == 0 && most == 0)) {
				p = &k->next;
				continue;
			}
			*p = k->next;
			count--;
			k->ending = true;
			if (k->users > 0)
				continue;
			most--;
			k->m->refs++;
			k->next = taken;
			taken = k;
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
	count = 0;
}
