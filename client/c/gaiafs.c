/* The calls of gaiafs.h. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

void gaiafs_enter(int *state)
{
	(void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, state);
}

int gaiafs_leave(int state, int err, const struct gaiafs_fail *f)
{
	int ignored;

	(void)pthread_setcancelstate(state, &ignored);
	if (err == 0)
		return 0;
	gaiafs_report(f);
	return -1;
}

static uint64_t whole_pages(uint64_t n)
{
	return (n + GAIAFS_PAGE - 1) & ~(uint64_t)(GAIAFS_PAGE - 1);
}

/* A MAP in progress: extents are put side by side as they arrive. */
struct map_request {
	struct gaiafs_request request;
	struct gaiafs_mapping *m;
	void *addr;
	int flags;
	bool known; /* MAPPED has come */
	uint32_t extents, got;
	int64_t next; /* file offset at which the next extent begins, once one has come */
};

static int take_mapped(struct map_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	const struct gaiafs_kind *kind;
	struct gaiafs_mapped reply;

	if (r->known || !gaiafs_get_mapped(frame->body, frame->body_len, &reply))
		return gaiafs_failed(f, EPROTO, "the daemon's answer to MAP is malformed");
	r->known = true;
	r->m->id = reply.mapping;
	r->extents = reply.extents;
	kind = gaiafs_kind_of(reply.kind);
	if (kind == NULL)
		return gaiafs_failed(f, ENOTSUP, "device %u has memory of kind %u, which this library cannot map",
				     reply.device, reply.kind);
	/* A GPU was asked for, and no other one will do. */
	if ((r->m->kind != NULL || kind == &gaiafs_cuda_kind) &&
	    (r->m->kind != kind || memcmp(reply.uuid, gaiafs_cuda_uuid(r->m->cuda), GAIAFS_UUID) != 0))
		return gaiafs_failed(f, EPROTO, "the daemon mapped other memory than that of the GPU that was asked for");
	r->m->kind = kind;
	return kind->begin(r->m, r->addr, r->flags, f);
}

/* place takes an extent, which begins where the one before it ended. */
static int place(struct map_request *r, const struct gaiafs_place *p, int fd, bool first, struct gaiafs_fail *f)
{
	int64_t begin = (int64_t)r->m->off;

	if (p->off < 0 || p->size <= 0 || p->off % GAIAFS_PAGE != 0 || p->size % GAIAFS_PAGE != 0 ||
	    p->size > INT64_MAX - p->off || (first ? p->off > begin : p->off != r->next))
		return gaiafs_failed(f, EPROTO, "an extent does not fit the mapping");
	r->next = p->off + p->size;
	return r->m->kind->add(r->m, p, fd, f);
}

static int take_extents(struct map_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct gaiafs_extents e;

	if (!r->known || !gaiafs_get_extents(frame->body, frame->body_len, &e) || e.first != r->got)
		return gaiafs_failed(f, EPROTO, "the daemon's extents are malformed");
	r->got += e.count;
	if (r->request.fail.errnum != 0)
		return r->request.fail.errnum;
	for (uint32_t i = 0; i < e.count; i++) {
		if (i >= frame->nfds)
			return gaiafs_failed(f, EMFILE, "this process has no descriptors left for the extents");
		int err = place(r, &e.place[i], frame->fds[i], e.first == 0 && i == 0, f);
		if (err != 0)
			return err;
	}
	return 0;
}

static int take_map(struct gaiafs_request *request, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct map_request *r = (struct map_request *)request; /* its first member */
	int err;

	switch (frame->header.type) {
	case GAIAFS_MAPPED:
		return take_mapped(r, frame, f);
	case GAIAFS_EXTENTS:
		return take_extents(r, frame, f);
	default:
		err = gaiafs_take_result(frame, f);
		return err != 0 ? err : gaiafs_failed(f, EPROTO, "the daemon answered MAP with no mapping");
	}
}

/* ask_for sends MAP for m and has its extents mapped. */
static int ask_for(struct gaiafs_mapping *m, const struct gaiafs_grant *grant, uint32_t map_flags, struct map_request *r,
		   struct gaiafs_fail *f)
{
	static const uint8_t none[GAIAFS_UUID];
	uint32_t prot = m->writable ? GAIAFS_READ | GAIAFS_WRITE : GAIAFS_READ;
	uint8_t body[GAIAFS_MAX_BODY];
	size_t n;

	/* A process's CUDA numbers are its own, so a GPU is asked for by its UUID. */
	if ((gaiafs_conn_kinds(m->conn) & (1 << (GAIAFS_KIND_CUDA - 1))) != 0) {
		if (gaiafs_cuda_open(m->dev, &m->cuda, f) != 0)
			return f->errnum;
		m->kind = &gaiafs_cuda_kind;
	}
	n = gaiafs_put_map(body, grant->token, (uint32_t)m->dev, m->cuda != NULL ? gaiafs_cuda_uuid(m->cuda) : none, prot,
			   map_flags, m->off, m->len);
	if (gaiafs_call(m->conn, GAIAFS_MAP, body, n, &r->request) != 0) {
		*f = r->request.fail;
		return f->errnum;
	}
	if (r->got != r->extents || r->next < (int64_t)(m->off + m->size))
		return gaiafs_failed(f, EPROTO, "the extents do not cover the mapping");
	return m->kind->finish(m, r->addr, f);
}

/* open_mapping gets a grant, asks for the mapping and maps its extents. When it returns 0, m is in the table, not ready. */
static int open_mapping(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f)
{
	struct map_request r = { .request = { .take = take_map, .own = true }, .m = m, .addr = addr, .flags = flags };
	uint32_t map_flags = flags & GAIA_LAZY ? GAIAFS_MAP_LAZY : 0;
	struct gaiafs_fail second; /* the first failure is the one to report */
	uint8_t body[GAIAFS_MAX_BODY];
	struct gaiafs_grant grant;
	bool launder = false;
	int err;

	if (!(flags & GAIA_LAZY) && gaiafs_flush_kernel(m->fd, m->off, m->len, &launder, f) != 0)
		return f->errnum;
	if (launder)
		map_flags |= GAIAFS_MAP_LAUNDER;
	err = gaiafs_request_grant(m->fd, &grant, f);
	if (err != 0)
		return err;
	if (grant.status)
		return gaiafs_failed(f, EINVAL, "the descriptor is of a directory");
	m->conn = gaiafs_conn_open(grant.socket, f);
	if (m->conn == NULL)
		return f->errnum;
	err = ask_for(m, &grant, map_flags, &r, f);
	if (err == 0)
		return 0;
	gaiafs_table_cancel(m);
	if (m->kind != NULL)
		(void)m->kind->drop(m, &second);
	gaiafs_cuda_free(m->cuda);
	m->cuda = NULL;
	m->kind = NULL;
	if (r.request.mapped && !r.request.abandoned)
		(void)gaiafs_simple(m->conn, GAIAFS_UNMAP, body, gaiafs_put_unmap(body, r.request.mapping), &second);
	gaiafs_conn_unref(m->conn);
	m->conn = NULL;
	return err;
}

static int check_arguments(void *addr, size_t len, int prot, int flags, off_t off, int dev, struct gaiafs_fail *f)
{
	const int known = MAP_SHARED | MAP_FIXED | MAP_FIXED_NOREPLACE | GAIA_LAZY;

	if (len == 0)
		return gaiafs_failed(f, EINVAL, "the length is 0");
	if (off < 0 || off % GAIAFS_PAGE != 0)
		return gaiafs_failed(f, EINVAL, "offset %lld is not a multiple of %d", (long long)off, GAIAFS_PAGE);
	if (off > INT64_MAX - GAIAFS_PAGE || (uint64_t)len > (uint64_t)(INT64_MAX - GAIAFS_PAGE - off))
		return gaiafs_failed(f, EOVERFLOW, "offset and length end past the largest file");
	if (len > SIZE_MAX - GAIAFS_PAGE)
		return gaiafs_failed(f, ENOMEM, "the length is larger than the address space");
	if (prot == PROT_NONE || (prot & ~(PROT_READ | PROT_WRITE)) != 0)
		return gaiafs_failed(f, EINVAL, "protection %#x is neither read nor write", (unsigned)prot);
	if ((flags & ~known) != 0)
		return gaiafs_failed(f, EINVAL, "flags %#x are not known; a mapping is MAP_SHARED", (unsigned)flags);
	if ((flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) && (uintptr_t)addr % GAIAFS_PAGE != 0)
		return gaiafs_failed(f, EINVAL, "the address is not a multiple of %d", GAIAFS_PAGE);
	if (dev < 0)
		return gaiafs_failed(f, ENODEV, "there is no device %d", dev);
	return 0;
}

static int check_file(int fd, int prot, struct gaiafs_fail *f)
{
	struct stat st;
	int mode = fcntl(fd, F_GETFL);

	if (mode < 0 || fstat(fd, &st) != 0)
		return gaiafs_failed(f, errno, "descriptor %d: %s", fd, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return gaiafs_failed(f, EINVAL, "descriptor %d is not of a regular file", fd);
	if (mode & O_PATH)
		return gaiafs_failed(f, EBADF, "descriptor %d was opened with O_PATH", fd);
	if ((mode & O_ACCMODE) == O_WRONLY)
		return gaiafs_failed(f, EACCES, "descriptor %d is not open for reading", fd);
	if ((mode & O_ACCMODE) == O_RDONLY && (prot & PROT_WRITE))
		return gaiafs_failed(f, EACCES, "descriptor %d is not open for writing", fd);
	return 0;
}

static int make_mapping(void **base, void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev,
			struct gaiafs_fail *f)
{
	struct gaiafs_mapping *m;
	int err = check_arguments(addr, len, prot, flags, off, dev, f);

	if (err == 0)
		err = check_file(fd, prot, f);
	if (err != 0)
		return err;
	err = gaiafs_prepare_fork();
	if (err != 0)
		return gaiafs_failed(f, err, "pthread_atfork: %s", strerror(err));
	m = gaiafs_mapping_new(fd, f);
	if (m == NULL)
		return f->errnum;
	m->len = len;
	m->size = whole_pages(len);
	m->off = (uint64_t)off;
	m->dev = dev;
	m->writable = (prot & PROT_WRITE) != 0;
	err = open_mapping(m, addr, flags, f);
	if (err == ENOTCONN) /* a kept connection turned out dead, the daemon was restarted: once more, with a new one */
		err = open_mapping(m, addr, flags, f);
	if (err != 0) {
		gaiafs_mapping_unref(m);
		return err;
	}
	*base = m->base;
	/* From here on m is the table's, and another thread may unmap it. */
	gaiafs_table_ready(m);
	return 0;
}

void *gaia_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev)
{
	struct gaiafs_fail f = { 0 };
	void *base = MAP_FAILED;
	int state, err;

	gaiafs_enter(&state);
	err = make_mapping(&base, addr, len, prot, flags, fd, off, dev, &f);
	(void)gaiafs_leave(state, err, &f);
	return base;
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

/* request sends a message about a range of m and waits for its result. */
static int request(struct gaiafs_mapping *m, uint16_t type, const void *addr, size_t len, uint32_t arg,
		   struct gaiafs_fail *f)
{
	uint8_t body[GAIAFS_MAX_BODY];
	size_t n = gaiafs_put_range(body, m->id, (uintptr_t)addr - (uintptr_t)m->base, len, arg);

	return gaiafs_simple(m->conn, type, body, n, f);
}

int gaiafs_acquire(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f)
{
	bool launder = false;
	int err = gaiafs_flush_kernel(m->fd, m->off + ((uintptr_t)addr - (uintptr_t)m->base), len, &launder, f);

	if (err != 0)
		return err;
	return request(m, GAIAFS_ACQUIRE, addr, len, launder ? GAIAFS_ACQUIRE_LAUNDER : 0, f);
}

int gaiafs_release(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f)
{
	if (!m->writable)
		return 0;
	gaiafs_start_flush(m->fd, m->off + ((uintptr_t)addr - (uintptr_t)m->base), len);
	return request(m, GAIAFS_RELEASE, addr, len, 0, f);
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
			(void)gaiafs_release(m, addr, len, &f);
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
			err = request(m, GAIAFS_SYNC, addr, len, flags & MS_SYNC ? GAIAFS_SYNC_DURABLE : 0, &f);
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
		(void)request(m, GAIAFS_ADVISE, addr, len, (uint32_t)advice, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}

/* unmap ends a mapping that is out of the table. The view goes even where the daemon cannot be told. */
static void unmap(struct gaiafs_mapping *m, struct gaiafs_fail *f)
{
	uint8_t body[GAIAFS_MAX_BODY];
	struct gaiafs_fail second = { 0 };

	(void)gaiafs_later_fail(m, f);
	(void)m->kind->drop(m, f->errnum == 0 ? f : &second);
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
		m = gaiafs_table_take(addr, whole_pages(len), &mine, &busy);
		for (unsigned round = 0; busy && f.errnum == 0; round++) {
			if (!gaiafs_later_settle(addr, round))
				(void)gaiafs_failed(&f, EINTR, "a signal interrupted the wait for calls in stream order");
			else
				m = gaiafs_table_take(addr, whole_pages(len), &mine, &busy);
		}
	}
	if (f.errnum != 0) {
		/* The mapping stays. */
	} else if (m == NULL) {
		(void)gaiafs_failed(&f, EINVAL, "%p and %zu are not the whole of a mapping of gaiafs", addr, len);
	} else {
		if (mine) /* else a child gave up its view; the mapping is the parent's */
			unmap(m, &f);
		gaiafs_mapping_unref(m);
	}
	return gaiafs_leave(state, f.errnum, &f);
}
