/* GPU memory: waiting for the work that was begun, and copies. */
#define _GNU_SOURCE
#include "cuda.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int gaiafs_cu_quiesce(struct gaiafs_mapping *m, gaia_stream_t s, struct gaiafs_fail *f)
{
	struct visit v;
	int err = gaiafs_cu_enter(gaiafs_cu_of(m->gpu), &v, f);

	if (err != 0)
		return err;
	if (s == GAIA_ALL_STREAMS)
		err = gaiafs_cu_check(gaiafs_cu.ctx_sync(), "cuCtxSynchronize", f);
	else
		err = gaiafs_cu_check(gaiafs_cu.stream_sync((stream)s), "cuStreamSynchronize", f);
	gaiafs_cu_leave(&v);
	return err;
}

int gaiafs_cu_read(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f)
{
	struct visit v;
	int err = gaiafs_cu_enter(gaiafs_cu_of(m->gpu), &v, f);

	if (err != 0)
		return err;
	err = gaiafs_cu_check(gaiafs_cu.to_host(to, (uintptr_t)from, n), "cuMemcpyDtoH", f);
	gaiafs_cu_leave(&v);
	return err;
}

/*
 * A copy from memory that is not pinned returns when the bytes are in the driver's buffer, so this waits for the copy.
 */
int gaiafs_cu_write(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f)
{
	struct visit v;
	int err = gaiafs_cu_enter(gaiafs_cu_of(m->gpu), &v, f);

	if (err != 0)
		return err;
	err = gaiafs_cu_check(gaiafs_cu.to_device((uintptr_t)to, from, n), "cuMemcpyHtoD", f);
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.stream_sync(NULL), "cuStreamSynchronize", f);
	gaiafs_cu_leave(&v);
	return err;
}

/* fill queues all copies and waits once. */
static int fill(struct gaiafs_cuda *c, const struct gaia_copy *list, size_t count, struct gaiafs_fail *f)
{
	stream s = NULL;
	int err = gaiafs_cu_check(gaiafs_cu.stream_create(&s, NON_BLOCKING), "cuStreamCreate", f);

	if (err != 0)
		return err;
	for (size_t i = 0; err == 0 && i < count; i++)
		err = gaiafs_cu_check(gaiafs_cu.within(c->block + list[i].to, (uintptr_t)list[i].from, list[i].length, s),
				      "cuMemcpyDtoDAsync", f);
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.stream_sync(s), "cuStreamSynchronize", f);
	(void)gaiafs_cu.stream_destroy(s);
	return err;
}

int gaiafs_cu_copies(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list,
	size_t count, struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = calloc(1, sizeof *c);
	struct visit v;
	int err;

	if (c == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	m->gpu = (struct gaiafs_gpu *)c;
	c->device = gaiafs_cu_of(of->gpu)->device;
	memcpy(c->uuid, gaiafs_cu_of(of->gpu)->uuid, sizeof c->uuid);
	err = gaiafs_cu_enter(c, &v, f);
	if (err != 0)
		return err;
	err = gaiafs_cu_check(gaiafs_cu.alloc(&c->block, m->size), "cuMemAlloc", f);
	if (err == 0)
		err = fill(c, list, count, f);
	gaiafs_cu_leave(&v);
	m->base = (uint8_t *)(uintptr_t)c->block;
	return err != 0 ? err : gaiafs_table_add(m, f);
}
