/*
 * MOVE: map other memory at the addresses of a movable mapping's extent, or leave a hole. The daemon asks for it when
 * no bracket uses the extent. The thread of the service connection does it.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>

/* of_gpu moves memory of a GPU. It consumes the caller's reference on m. */
static int of_gpu(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd)
{
	struct gaiafs_fail f;
	bool listed;
	int err = ENOENT;

	pthread_mutex_lock(&m->moving);
	pthread_mutex_lock(&gaiafs_table_lock);
	listed = m->listed; /* otherwise m is ending, and its memory goes with it */
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (listed)
		err = m->kind->move(m, extent, fd, &f);
	pthread_mutex_unlock(&m->moving);
	gaiafs_mapping_unref(m);
	return err;
}

int gaiafs_move(const struct gaiafs_conn *c, const struct gaiafs_move *move, int fd)
{
	const struct gaiafs_place *x = &move->extent;
	struct gaiafs_mapping *m;
	struct gaiafs_fail f;
	bool gpu = false;
	int err = 0;

	if (x->off < 0 || x->size <= 0 || x->off % GAIAFS_PAGE != 0 || x->size % GAIAFS_PAGE != 0 ||
		x->size > INT64_MAX - x->off)
		return EPROTO;
	if (x->tier == GAIAFS_TIER_NONE)
		fd = -1;
	else if (fd < 0)
		return EMFILE;
	pthread_mutex_lock(&gaiafs_table_lock);
	m = gaiafs_table_numbered_locked(c, move->mapping);
	if (m == NULL)
		err = ENOENT; /* it has nothing to move */
	else if (!m->movable || m->kind->move == NULL)
		err = EPERM;
	else if (fd >= 0 && x->kind != m->kind->number)
		err = ENOTSUP;
	else if (m->gpu != NULL)
		gpu = true;
	else
		err = m->kind->move(m, x, fd, &f); /* under the lock, so that fork and munmap find the mapping complete */
	if (gpu)
		m->refs++;
	pthread_mutex_unlock(&gaiafs_table_lock);
	return gpu ? of_gpu(m, x, fd) : err;
}
