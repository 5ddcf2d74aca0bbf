/* The mappings of this process, by address. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

/* Ascending by base; guarded by gaiafs_table_lock. Address ranges of two mappings never overlap. */
static struct gaiafs_mapping **table;
static size_t used, room;

/* after_locked returns the number of mappings that begin at or before addr. */
static size_t after_locked(const void *addr)
{
	size_t lo = 0, hi = used;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if ((uintptr_t)table[mid]->base <= (uintptr_t)addr)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

bool gaiafs_table_overlaps_locked(const void *addr, uint64_t n)
{
	size_t i = after_locked(addr);

	if (i > 0 && (uintptr_t)addr - (uintptr_t)table[i - 1]->base < table[i - 1]->size)
		return true;
	return i < used && (uintptr_t)table[i]->base - (uintptr_t)addr < n;
}

int gaiafs_table_room_locked(void)
{
	size_t more = room == 0 ? 16 : 2 * room;
	struct gaiafs_mapping **bigger;

	if (used < room)
		return 0;
	bigger = realloc(table, more * sizeof *bigger);
	if (bigger == NULL)
		return ENOMEM;
	table = bigger;
	room = more;
	return 0;
}

static void remove_locked(size_t i)
{
	memmove(table + i, table + i + 1, (used - i - 1) * sizeof *table);
	used--;
}

int gaiafs_duplicate(int fd)
{
	int kept = fcntl(fd, F_DUPFD_CLOEXEC, FD_SETSIZE);

	return kept >= 0 ? kept : fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

struct gaiafs_mapping *gaiafs_mapping_new(int fd, struct gaiafs_fail *f)
{
	struct gaiafs_mapping *m = calloc(1, sizeof *m);

	if (m == NULL) {
		gaiafs_failed(f, ENOMEM, "out of memory");
		return NULL;
	}
	m->refs = 1;
	pthread_mutex_init(&m->moving, NULL);
	m->home = -1;
	m->fd = fd < 0 ? -1 : gaiafs_duplicate(fd);
	if (m->fd >= 0 || fd < 0)
		return m;
	gaiafs_failed(f, errno, "descriptor %d could not be duplicated: %s", fd, strerror(errno));
	free(m);
	return NULL;
}

void gaiafs_table_add_locked(struct gaiafs_mapping *m)
{
	static uint64_t last;
	size_t i = after_locked(m->base);

	m->ready = false;
	m->listed = true;
	m->generation = gaiafs_generation;
	m->serial = ++last;
	memmove(table + i + 1, table + i, (used - i) * sizeof *table);
	table[i] = m;
	used++;
}

int gaiafs_table_add(struct gaiafs_mapping *m, struct gaiafs_fail *f)
{
	int err;

	pthread_mutex_lock(&gaiafs_table_lock);
	err = gaiafs_table_room_locked();
	if (err == 0)
		gaiafs_table_add_locked(m);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return err == 0 ? 0 : gaiafs_failed(f, err, "out of memory");
}

void gaiafs_table_ready(struct gaiafs_mapping *m)
{
	pthread_mutex_lock(&gaiafs_table_lock);
	m->ready = true;
	pthread_mutex_unlock(&gaiafs_table_lock);
}

struct gaiafs_mapping *gaiafs_table_numbered_locked(const struct gaiafs_conn *c, uint64_t id)
{
	for (size_t i = 0; i < used; i++)
		if (table[i]->ready && table[i]->conn == c && table[i]->id == id && table[i]->generation == gaiafs_generation)
			return table[i];
	return NULL;
}

bool gaiafs_table_has(const struct gaiafs_conn *c, uint64_t id)
{
	bool has;

	pthread_mutex_lock(&gaiafs_table_lock);
	has = gaiafs_table_numbered_locked(c, id) != NULL;
	pthread_mutex_unlock(&gaiafs_table_lock);
	return has;
}

void gaiafs_table_after_fork(void)
{
	for (size_t i = 0; i < used; i++)
		if (table[i]->movable && table[i]->gpu == NULL)
			(void)mmap(table[i]->base, (size_t)table[i]->size, PROT_NONE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

struct gaiafs_mapping *gaiafs_table_at_locked(const void *addr)
{
	size_t i = after_locked(addr);

	if (i > 0 && table[i - 1]->ready && (uintptr_t)addr - (uintptr_t)table[i - 1]->base < table[i - 1]->size)
		return table[i - 1];
	return NULL;
}

struct gaiafs_mapping *gaiafs_table_find(const void *addr, bool *mine)
{
	struct gaiafs_mapping *m;

	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_at_locked(addr);
	if (m != NULL) {
		m->refs++;
		*mine = m->generation == gaiafs_generation;
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return m;
}

bool gaiafs_mapping_mine(const struct gaiafs_mapping *m)
{
	bool mine;

	pthread_mutex_lock(&gaiafs_table_lock);
	mine = m->generation == gaiafs_generation;
	pthread_mutex_unlock(&gaiafs_table_lock);
	return mine;
}

/*
 * leave_locked takes the mapping at i out of the table. Memory that MAP_FIXED may replace is unmapped in the same step,
 * so that nobody else gets the addresses while they are in the table, or the other way round.
 */
static void leave_locked(size_t i)
{
	struct gaiafs_mapping *m = table[i];

	remove_locked(i);
	m->listed = false;
	m->kind->leave(m);
}

struct gaiafs_mapping *gaiafs_table_take(const void *addr, uint64_t size, bool *mine, bool *busy)
{
	struct gaiafs_mapping *m = NULL;
	size_t i;

	*busy = false;
	pthread_mutex_lock(&gaiafs_table_lock);
	i = after_locked(addr);
	if (i > 0 && table[i - 1]->ready && table[i - 1]->base == addr && table[i - 1]->size == size) {
		m = table[i - 1];
		*mine = m->generation == gaiafs_generation;
		if (*mine && m->queued != NULL) { /* calls queued in the parent's streams do not concern a child */
			*busy = true;
			m = NULL;
		} else {
			leave_locked(i - 1);
		}
	}
	pthread_mutex_unlock(&gaiafs_table_lock);
	return m;
}

void gaiafs_table_cancel(struct gaiafs_mapping *m)
{
	pthread_mutex_lock(&gaiafs_table_lock);
	for (size_t i = 0; m->listed && i < used; i++)
		if (table[i] == m)
			leave_locked(i);
	pthread_mutex_unlock(&gaiafs_table_lock);
}

void gaiafs_mapping_forget_gpu(struct gaiafs_mapping *m)
{
	if (m->gpu != NULL)
		m->of->free(m->gpu);
	m->gpu = NULL;
	m->of = NULL;
}

void gaiafs_mapping_unref(struct gaiafs_mapping *m)
{
	struct gaiafs_conn *conn = NULL;
	bool last;

	pthread_mutex_lock(&gaiafs_table_lock);
	last = --m->refs == 0;
	/* Leave alone the connection of a process that this one was forked from: its structures may be in any state. */
	if (last && m->generation == gaiafs_generation)
		conn = m->conn;
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (!last)
		return;
	if (conn != NULL)
		gaiafs_conn_unref(conn);
	if (m->fd >= 0)
		close(m->fd);
	gaiafs_view_free(m->view);
	gaiafs_mapping_forget_gpu(m);
	pthread_mutex_destroy(&m->moving);
	free(m);
}
