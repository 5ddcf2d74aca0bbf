/* The calls of gaiafs.h on existing mappings; map.c makes mappings. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <string.h>

void gaiafs_enter(int *state)
{
	(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, state);
}

int gaiafs_leave(int state, int err, const struct gaiafs_fail *f)
{
	int ignored;

	(void)pthread_setcancelstate(state, &ignored);
	gaiafs_report(err, f);
	return err == 0 ? 0 : -1;
}

struct gaiafs_mapping *gaiafs_find(const void *addr, size_t len, struct gaiafs_fail *f)
{
	bool mine = false;
	struct gaiafs_mapping *m = gaiafs_table_find(addr, &mine);

	if (m == NULL) {
		gaiafs_failed(f, ENOMEM, "address %p is not in a mapping of gaiafs", addr);
		return NULL;
	}
	if (!mine)
		gaiafs_failed(f, ECHILD, "the mapping belongs to the process that this one was forked from");
	else if (len == 0)
		gaiafs_failed(f, EINVAL, "the length is 0");
	else if (len > m->size - ((uintptr_t)addr - (uintptr_t)m->base))
		gaiafs_failed(f, EINVAL, "the range goes past the end of the mapping");
	else
		return m;
	gaiafs_mapping_unref(m);
	return NULL;
}

int gaiafs_prepare(struct gaiafs_mapping *m, int what, const void *addr, size_t len, int argument, gaia_stream_t stream,
		   struct gaiafs_ready *ready, struct gaiafs_fail *f)
{
	static const uint16_t types[] = { [GAIA_DO_ACQUIRE] = GAIAFS_ACQUIRE, [GAIA_DO_RELEASE] = GAIAFS_RELEASE,
					  [GAIA_DO_SYNC] = GAIAFS_SYNC, [GAIA_DO_ADVISE] = GAIAFS_ADVISE };
	uint64_t at = (uintptr_t)addr - (uintptr_t)m->base;
	bool launder = false;

	ready->type = 0;
	if (what < GAIA_DO_ACQUIRE || what > GAIA_DO_ADVISE)
		return gaiafs_failed(f, EINVAL, "there is no request %d", what);
	if (m->conn == NULL)
		return gaiafs_failed(f, EINVAL, "the memory is this process's alone: there is nobody to ask about it");
	if (what == GAIA_DO_RELEASE && !m->writable)
		return 0;
	if (stream != GAIA_NO_STREAM && what != GAIA_DO_ADVISE && (what == GAIA_DO_ACQUIRE || m->writable) &&
	    m->kind->quiesce(m, stream, f) != 0)
		return f->errnum;
	if (what == GAIA_DO_ACQUIRE) {
		if (gaiafs_flush(m, at, len, &launder, f) != 0)
			return f->errnum;
		argument = launder ? GAIAFS_ACQUIRE_LAUNDER : 0;
	} else if (what == GAIA_DO_RELEASE) {
		gaiafs_start_flush(m->fd, m->off + at, len);
		argument = 0;
	}
	ready->type = types[what];
	ready->n = gaiafs_put_range(ready->body, m->id, at, len, (uint32_t)argument);
	return 0;
}

/* request sends a request about a range of m to the daemon, and waits for the result. */
static int request(struct gaiafs_mapping *m, int what, const void *addr, size_t len, int argument, gaia_stream_t stream,
		   struct gaiafs_fail *f)
{
	struct gaiafs_ready r;

	if (gaiafs_prepare(m, what, addr, len, argument, stream, &r, f) != 0)
		return f->errnum;
	return r.type == 0 ? 0 : gaiafs_simple(m->conn, r.type, r.body, r.n, f);
}

int gaiafs_acquire(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f)
{
	return request(m, GAIA_DO_ACQUIRE, addr, len, 0, GAIA_NO_STREAM, f);
}

int gaiafs_release(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f)
{
	return request(m, GAIA_DO_RELEASE, addr, len, 0, GAIA_NO_STREAM, f);
}

int gaiafs_check_device(const struct gaiafs_mapping *m, int dev, struct gaiafs_fail *f)
{
	if (m->dev == dev)
		return 0;
	return gaiafs_failed(f, ENODEV, "the mapping is on device %d, not %d", m->dev, dev);
}

int gaia_macquire(void *addr, size_t len, int dev)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = gaiafs_find(addr, len, &f);
	if (m != NULL) {
		if (gaiafs_check_device(m, dev, &f) == 0)
			(void)gaiafs_acquire(m, addr, len, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_mrelease(void *addr, size_t len, int dev)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m;
	int state;

	gaiafs_enter(&state);
	m = gaiafs_find(addr, len, &f);
	if (m != NULL) {
		if (gaiafs_check_device(m, dev, &f) == 0)
			(void)request(m, GAIA_DO_RELEASE, addr, len, 0, GAIA_ALL_STREAMS, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_msync(void *addr, size_t len, int flags)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m = NULL;
	int state, err = 0;

	gaiafs_enter(&state);
	if ((flags & ~(MS_SYNC | MS_ASYNC | MS_INVALIDATE)) != 0 || (flags & (MS_SYNC | MS_ASYNC)) == (MS_SYNC | MS_ASYNC))
		err = gaiafs_failed(&f, EINVAL, "flags %#x are not those of msync", (unsigned)flags);
	else if ((uintptr_t)addr % GAIAFS_PAGE != 0)
		err = gaiafs_failed(&f, EINVAL, "the address is not a multiple of %d", GAIAFS_PAGE);
	else if (len > 0)
		m = gaiafs_find(addr, len, &f);
	if (m != NULL) {
		if (flags != MS_INVALIDATE)
			err = request(m, GAIA_DO_SYNC, addr, len, (flags & MS_SYNC) != 0, GAIA_ALL_STREAMS, &f);
		if (err == 0 && (flags & MS_INVALIDATE))
			err = gaiafs_acquire(m, addr, len, &f);
		if (err == 0 && flags != MS_INVALIDATE)
			(void)gaiafs_later_fail(m, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_madvise(void *addr, size_t len, int advice)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m = NULL;
	int state;

	gaiafs_enter(&state);
	if (advice < GAIA_MADV_NORMAL || advice > GAIA_MADV_DONTNEED)
		(void)gaiafs_failed(&f, EINVAL, "advice %d is not known", advice);
	else if ((uintptr_t)addr % GAIAFS_PAGE != 0)
		(void)gaiafs_failed(&f, EINVAL, "the address is not a multiple of %d", GAIAFS_PAGE);
	else if (len > 0)
		m = gaiafs_find(addr, len, &f);
	if (m != NULL) {
		(void)request(m, GAIA_DO_ADVISE, addr, len, advice, GAIA_NO_STREAM, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

/* unmap ends a mapping that is out of the table. This process's part goes even if the daemon cannot be told. */
static void unmap(struct gaiafs_mapping *m, struct gaiafs_fail *f)
{
	uint8_t body[GAIAFS_MAX_BODY];
	struct gaiafs_fail second = { 0 };

	(void)gaiafs_later_fail(m, f);
	gaiafs_keep_drop(m);
	pthread_mutex_lock(&m->moving);
	(void)m->kind->drop(m, false, f->errnum == 0 ? f : &second);
	pthread_mutex_unlock(&m->moving);
	if (m->conn == NULL)
		return;
	if (gaiafs_simple(m->conn, GAIAFS_UNMAP, body, gaiafs_put_unmap(body, m->id), &second) == EINTR)
		(void)gaiafs_failed(&second, EINPROGRESS, "a signal interrupted the wait for the daemon, which has yet to release the "
				    "mapping");
	if (f->errnum == 0)
		*f = second;
}

int gaia_munmap(void *addr, size_t len)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m = NULL;
	bool mine = false, busy = false;
	int state;

	gaiafs_enter(&state);
	if (len > 0 && len <= SIZE_MAX - GAIAFS_PAGE) {
		m = gaiafs_table_take(addr, gaiafs_whole_pages(len), &mine, &busy);
		for (unsigned round = 0; busy && f.errnum == 0; round++) {
			if (!gaiafs_later_pause(addr, round))
				(void)gaiafs_failed(&f, EINTR, "a signal interrupted the wait for calls in stream order");
			else
				m = gaiafs_table_take(addr, gaiafs_whole_pages(len), &mine, &busy);
		}
	}
	if (f.errnum != 0) {
		/* The mapping stays. */
	} else if (m == NULL) {
		(void)gaiafs_failed(&f, EINVAL, "%p and %zu are not the whole of a mapping of gaiafs", addr, len);
	} else {
		if (mine) /* otherwise a child removed its own copy; the mapping is the parent's */
			unmap(m, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

void gaia_drop(void *addr, size_t len)
{
	struct gaiafs_mapping *m = NULL;
	struct gaiafs_fail f = { 0 };
	bool mine = false, busy = false;
	uint8_t body[GAIAFS_MAX_BODY];
	int state;

	gaiafs_enter(&state);
	if (len > 0 && len <= SIZE_MAX - GAIAFS_PAGE)
		m = gaiafs_table_take(addr, gaiafs_whole_pages(len), &mine, &busy);
	if (m != NULL && mine) {
		gaiafs_keep_drop(m);
		pthread_mutex_lock(&m->moving);
		(void)m->kind->drop(m, true, &f);
		pthread_mutex_unlock(&m->moving);
		if (m->conn != NULL)
			gaiafs_tell(m->conn, GAIAFS_UNMAP, body, gaiafs_put_unmap(body, m->id));
	}
	if (m != NULL)
		gaiafs_mapping_unref(m);
	(void)gaiafs_leave(state, 0, &f);
}

int gaia_info(const void *addr, struct gaia_info *info, size_t size)
{
	struct gaiafs_fail f = { 0 };
	struct gaiafs_mapping *m = NULL;
	struct gaia_info now = { 0 };
	int state;

	gaiafs_enter(&state);
	if (info == NULL || size == 0)
		(void)gaiafs_failed(&f, EINVAL, "there is no room for what is asked");
	else
		m = gaiafs_find(addr, 1, &f);
	if (m != NULL) {
		now = (struct gaia_info){ .address = m->base, .length = m->len, .offset = m->off, .flags = m->flags,
					  .serial = m->serial, .prot = m->writable ? PROT_READ | PROT_WRITE : PROT_READ,
					  .device = m->dev, .kind = (int)m->kind->number, .size = m->home };
		gaiafs_mapping_unref(m);
		memset(info, 0, size);
		memcpy(info, &now, size < sizeof now ? size : sizeof now);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

int gaia_version(void)
{
	return GAIA_VERSION;
}
