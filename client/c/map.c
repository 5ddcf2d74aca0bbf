/* gaia_map: its arguments, the request, and the memory that the daemon sends. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A MAP in progress. Extents are mapped side by side as they arrive. */
struct map_request {
	struct gaiafs_request request;
	struct gaiafs_mapping *m;
	const struct gaia_map_args *args;
	int kind;   /* as asked for */
	bool known; /* MAPPED has come */
	uint32_t extents, got;
	int64_t next; /* the file offset at which the next extent begins, once one has come */
};

static int take_mapped(struct map_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	const struct gaiafs_kind *kind;
	struct gaiafs_mapped reply;

	if (r->known || !gaiafs_get_mapped(frame->body, frame->body_len, gaiafs_conn_version(r->m->conn), &reply) ||
	    (r->m->view != NULL && reply.size != (int64_t)r->m->len))
		return gaiafs_failed(f, EPROTO, "the daemon's answer to MAP is malformed");
	r->known = true;
	r->m->id = reply.mapping;
	r->extents = reply.extents;
	kind = gaiafs_kind_of(reply.kind);
	if (kind == NULL)
		return gaiafs_failed(f, ENOTSUP, "device %u has memory of kind %u, which this library cannot map",
				     reply.device, reply.kind);
	if (r->kind != GAIA_KIND_ANY && (uint32_t)r->kind != reply.kind)
		return gaiafs_failed(f, ENODEV, "device %u has memory of kind %u, not %d", reply.device, reply.kind, r->kind);
	/* If a GPU was asked for, no other device will do. */
	if (r->m->of != NULL ? r->m->of != kind || memcmp(reply.uuid, kind->uuid(r->m->gpu), GAIAFS_UUID) != 0
						 : kind->open != NULL)
		return gaiafs_failed(f, EPROTO, "the daemon mapped other memory than that of the GPU that was asked for");
	r->m->kind = kind;
	r->m->home = reply.size;
	r->m->movable = reply.movable;
	if (reply.movable)
		r->m->flags |= GAIA_MAP_MOVABLE;
	if (r->args->flags & GAIA_MAP_HOLD)
		r->m->kind = &gaiafs_held_kind;
	return r->m->kind->begin(r->m, r->args->address, (int)(uint32_t)r->args->flags, f);
}

/* place takes an extent, which must begin where the one before it ended. */
static int place(struct map_request *r, const struct gaiafs_place *p, int fd, bool first, struct gaiafs_fail *f)
{
	int64_t begin = (int64_t)r->m->off;

	if (p->off < 0 || p->size <= 0 || p->off % GAIAFS_PAGE != 0 || p->size % GAIAFS_PAGE != 0 ||
	    p->size > INT64_MAX - p->off || (first ? p->off > begin : p->off != r->next))
		return gaiafs_failed(f, EPROTO, "an extent does not fit the mapping");
	if (p->kind != 0 && r->m->kind != &gaiafs_held_kind && p->kind != r->m->kind->number)
		return gaiafs_failed(f, ENOTSUP, "an extent has memory of kind %u, which this library cannot map beside kind %u", p->kind,
				     r->m->kind->number);
	r->next = p->off + p->size;
	return r->m->kind->add(r->m, p, fd, f);
}

static int take_extents(struct map_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *f)
{
	struct gaiafs_extents e;

	if (!r->known || !gaiafs_get_extents(frame->body, frame->body_len, gaiafs_conn_version(r->m->conn), &e) ||
		e.first != r->got)
		return gaiafs_failed(f, EPROTO, "the daemon's extents are malformed");
	r->got += e.count;
	if (r->request.fail.errnum != 0)
		return r->request.fail.errnum;
	for (uint32_t i = 0; i < e.count; i++) {
		if (i >= frame->nfds)
			return gaiafs_failed(f, EMFILE, "this process has no descriptors left for the extents: see ulimit -n");
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

/* kind_for returns the kind of device to ask for. Emulated devices stand in for GPUs only if the user said so. */
static int kind_for(const struct gaiafs_mapping *m, int kind)
{
	const char *emulated = getenv("GAIAFS_EMULATED");
	bool gpus = (gaiafs_conn_kinds(m->conn) & (1u << (GAIA_KIND_CUDA - 1))) != 0;

	return kind == GAIA_KIND_CUDA && !gpus && emulated != NULL && strcmp(emulated, "1") == 0 ? GAIA_KIND_ANY : kind;
}

/*
 * ask_for sends MAP for m and has its extents mapped. A view's extents come before its bytes, and are imported
 * meanwhile. A GPU's extents get their addresses when the bytes are there: if these fail, there is nothing that kernels
 * could be using.
 */
static int ask_for(struct gaiafs_mapping *m, const uint8_t token[GAIAFS_TOKEN], uint32_t map_flags,
	struct map_request *r, struct gaiafs_fail *f)
{
	static const uint8_t none[GAIAFS_UUID];
	uint32_t prot = m->writable ? GAIAFS_READ | GAIAFS_WRITE : GAIAFS_READ;
	const int kind = r->kind = kind_for(m, r->args->kind);
	const struct gaiafs_kind *named;
	uint8_t body[GAIAFS_MAX_BODY];
	const uint8_t *uuid;
	size_t n;

	named = gaiafs_kind_among(kind, gaiafs_conn_kinds(m->conn));
	if (named == NULL && kind != GAIA_KIND_ANY)
		return kind == GAIA_KIND_CUDA ?
			gaiafs_failed(f, ENODEV, "the mount has no GPUs, only emulated devices: ask for one of these (\"emulated:%d\", or "
				      "its number), or set GAIAFS_EMULATED=1 to let them stand in for GPUs", m->dev) :
			gaiafs_failed(f, ENODEV, "the mount has no devices of kind %d, only GPUs", kind);
	if (gaiafs_conn_may_map(m->conn, f) != 0)
		return f->errnum;
	if (named != NULL && named->open != NULL) {
		if (named->open(m, (m->flags & GAIA_MAP_HOLD) == 0, f) != 0)
			return f->errnum;
		m->kind = m->of = named;
	}
	uuid = m->gpu != NULL ? m->of->uuid(m->gpu) : none;
	if (m->view == NULL) {
		n = gaiafs_put_map(body, token, (uint32_t)m->dev, uuid, prot, map_flags,
				   gaiafs_conn_version(m->conn) >= 2 ? (uint32_t)kind : 0, m->off, m->len);
		(void)gaiafs_call(m->conn, GAIAFS_MAP, body, n, &r->request);
	} else {
		(void)gaiafs_view_call(m, uuid, kind, map_flags, &r->request);
	}
	if (r->request.fail.errnum != 0) {
		*f = r->request.fail;
		return f->errnum;
	}
	if (r->got != r->extents || (!m->movable && r->next < (int64_t)(m->off + m->size)))
		return gaiafs_failed(f, EPROTO, "the extents do not cover the mapping");
	return m->kind->finish(m, r->args->address, f);
}

/*
 * move_flags returns when the mapping is to move: if asked for, or if it is larger than its device and no other flag
 * forbids it. The daemon knows the size.
 */
static uint32_t move_flags(const struct gaiafs_mapping *m, const struct gaia_map_args *args)
{
	if (args->flags & GAIA_MAP_MOVABLE)
		return GAIAFS_MAP_MOVABLE;
	if (m->view != NULL || (args->flags & (GAIA_MAP_STAYS | GAIA_MAP_PEERS | GAIA_MAP_HOLD)))
		return 0;
	return GAIAFS_MAP_LARGE_MOVABLE;
}

/*
 * open_mapping gets a grant, asks for the mapping and maps its extents. When it returns 0, m is in the table but not
 * ready.
 */
static int open_mapping(struct gaiafs_mapping *m, const struct gaia_map_args *args, struct gaiafs_fail *f)
{
	struct map_request r = { .request = { .take = take_map, .own = true }, .m = m, .args = args };
	bool lazy = args->flags & GAIA_MAP_LAZY;
	uint32_t map_flags = lazy ? GAIAFS_MAP_LAZY : 0;
	struct gaiafs_fail second; /* ignored: the first failure is reported */
	uint8_t body[GAIAFS_MAX_BODY];
	struct gaiafs_grant grant;
	bool launder = false;
	uint32_t moves;
	int err;

	if (!lazy && gaiafs_flush(m, 0, m->len, &launder, f) != 0)
		return f->errnum;
	if (launder)
		map_flags |= GAIAFS_MAP_LAUNDER;
	err = m->view == NULL ? gaiafs_grant_file(m->fd, &grant, f) : gaiafs_view_grants(m->view, &grant, f);
	if (err != 0)
		return err;
	m->conn = gaiafs_conn_open(grant.socket, f);
	if (m->conn == NULL)
		return f->errnum;
	moves = move_flags(m, args);
	if (moves != 0 && (gaiafs_conn_features(m->conn) & GAIAFS_FEATURE_MOVE) == 0) {
		if (moves == GAIAFS_MAP_MOVABLE) {
			gaiafs_conn_unref(m->conn);
			m->conn = NULL;
			return gaiafs_failed(f, ENOTSUP, "the daemon of the mount is older than this library, and moves no memory");
		}
		moves = 0;
	}
	map_flags |= moves;
	err = ask_for(m, grant.token, map_flags, &r, f);
	if (err == 0) {
		/* A process that uses a GPU has threads anyway. */
		if ((args->flags & GAIA_MAP_NO_THREAD) == 0 || m->gpu != NULL || m->movable)
			gaiafs_conn_serve(m->conn);
		return 0;
	}
	gaiafs_table_cancel(m);
	if (m->kind != NULL)
		(void)m->kind->drop(m, true, &second);
	gaiafs_mapping_forget_gpu(m);
	m->kind = NULL;
	if (r.request.mapped && !r.request.abandoned)
		(void)gaiafs_simple(m->conn, GAIAFS_UNMAP, body, gaiafs_put_unmap(body, r.request.mapping), &second);
	gaiafs_conn_unref(m->conn);
	m->conn = NULL;
	return err;
}

/* This library's own flags. */
#define OURS (GAIA_MAP_LAZY | GAIA_MAP_PEERS | GAIA_MAP_HOLD | GAIA_MAP_NO_THREAD | GAIA_MAP_MOVABLE | GAIA_MAP_STAYS)

int gaiafs_check_args(const struct gaia_map_args *a, struct gaiafs_fail *f)
{
	const uint64_t fixed = MAP_FIXED | MAP_FIXED_NOREPLACE, known = MAP_SHARED | fixed | OURS;

	if (a->length == 0)
		return gaiafs_failed(f, EINVAL, "the length is 0");
	if (a->offset % GAIAFS_PAGE != 0)
		return gaiafs_failed(f, EINVAL, "offset %llu is not a multiple of %d", (unsigned long long)a->offset, GAIAFS_PAGE);
	if (a->offset > INT64_MAX - GAIAFS_PAGE || a->length > INT64_MAX - GAIAFS_PAGE - a->offset)
		return gaiafs_failed(f, EOVERFLOW, "offset and length end past the largest file");
	if (a->length > SIZE_MAX - GAIAFS_PAGE)
		return gaiafs_failed(f, ENOMEM, "the length is larger than the address space");
	if (a->prot == PROT_NONE || (a->prot & ~(PROT_READ | PROT_WRITE)) != 0)
		return gaiafs_failed(f, EINVAL, "protection %#x is neither read nor write", (unsigned)a->prot);
	if ((a->flags & ~known) != 0)
		return gaiafs_failed(f, EINVAL, "flags %#llx are not known; a mapping is MAP_SHARED",
				     (unsigned long long)(a->flags & ~known));
	if ((a->flags & GAIA_MAP_MOVABLE) && (a->flags & (GAIA_MAP_HOLD | GAIA_MAP_STAYS)))
		return gaiafs_failed(f, EINVAL, "memory that moves is mapped, and does not stay");
	if ((a->flags & fixed) && (uintptr_t)a->address % GAIAFS_PAGE != 0)
		return gaiafs_failed(f, EINVAL, "the address is not a multiple of %d", GAIAFS_PAGE);
	if (a->kind != GAIA_KIND_ANY && (a->kind < 0 || gaiafs_kind_of((uint32_t)a->kind) == NULL))
		return gaiafs_failed(f, EINVAL, "kind %d of devices is not known", a->kind);
	if (a->device < 0)
		return gaiafs_failed(f, ENODEV, "there is no device %d", a->device);
	return 0;
}

int gaiafs_check_file(int fd, int prot, struct gaiafs_fail *f)
{
	struct statx st;
	int mode = fcntl(fd, F_GETFL);

	/* Use only what the kernel knows, because the daemon may be stopped. */
	if (mode < 0 || statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &st) != 0)
		return gaiafs_failed(f, errno, "descriptor %d: %s", fd, strerror(errno));
	if (!S_ISREG(st.stx_mode))
		return gaiafs_failed(f, EINVAL, "descriptor %d is not of a regular file", fd);
	if (mode & O_PATH)
		return gaiafs_failed(f, EBADF, "descriptor %d was opened with O_PATH", fd);
	if ((mode & O_ACCMODE) == O_WRONLY)
		return gaiafs_failed(f, EACCES, "descriptor %d is not open for reading", fd);
	if ((mode & O_ACCMODE) == O_RDONLY && (prot & PROT_WRITE))
		return gaiafs_failed(f, EACCES, "descriptor %d is not open for writing", fd);
	return 0;
}

static int make_mapping(void **base, const struct gaia_map_args *a, struct gaiafs_fail *f)
{
	struct gaiafs_mapping *m;
	int err = gaiafs_check_args(a, f);

	if (err == 0)
		err = gaiafs_check_file(a->fd, a->prot, f);
	if (err != 0)
		return err;
	err = gaiafs_prepare_fork();
	if (err != 0)
		return gaiafs_failed(f, err, "pthread_atfork: %s", strerror(err));
	m = gaiafs_mapping_new(a->fd, f);
	return m == NULL ? f->errnum : gaiafs_map_it(m, a, base, f);
}

int gaiafs_map_it(struct gaiafs_mapping *m, const struct gaia_map_args *a, void **base, struct gaiafs_fail *f)
{
	int err;

	m->len = a->length;
	m->size = gaiafs_whole_pages(a->length);
	m->off = a->offset;
	m->dev = a->device;
	m->writable = (a->prot & PROT_WRITE) != 0;
	m->flags = a->flags & OURS;
	err = open_mapping(m, a, f);
	if (err == ENOTCONN) /* a kept connection was dead, because the daemon restarted: try once more with a new one */
		err = open_mapping(m, a, f);
	if (err != 0) {
		gaiafs_mapping_unref(m);
		return err;
	}
	*base = m->base;
	if (m->view != NULL)
		gaiafs_view_mapped(m->view);
	/* From here on the table owns m, and another thread may unmap it. */
	gaiafs_table_ready(m);
	return 0;
}

int gaiafs_read_args(void *to, size_t room, const void *given, size_t size, size_t first, struct gaiafs_fail *f)
{
	if (given == NULL || size < first)
		return gaiafs_failed(f, EINVAL, "the arguments have %zu bytes, and at least %zu are needed", given == NULL ? 0 : size,
				     first);
	for (size_t i = room; i < size; i++)
		if (((const uint8_t *)given)[i] != 0)
			return gaiafs_failed(f, E2BIG, "the arguments say something at byte %zu that this library, version %d, does not "
					     "know", i, GAIA_VERSION);
	memset(to, 0, room);
	memcpy(to, given, size < room ? size : room);
	return 0;
}

void *gaia_map(const struct gaia_map_args *args, size_t size)
{
	struct gaiafs_fail f = { 0 };
	struct gaia_map_args a;
	void *base = MAP_FAILED;
	int state, err;

	gaiafs_enter(&state);
	err = gaiafs_read_args(&a, sizeof a, args, size, offsetof(struct gaia_map_args, kind) + sizeof(int), &f);
	if (err == 0)
		err = make_mapping(&base, &a, &f);
	(void)gaiafs_leave(state, err, &f);
	return base;
}

void *gaia_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off, int dev)
{
	struct gaia_map_args a = { .length = len,
		.offset = (uint64_t)off,
		.address = addr,
		.flags = (uint32_t)(flags & ~(GAIA_LAZY | GAIA_MOVABLE)),
		.fd = fd,
		.prot = prot,
		.device = dev };

	if (flags & GAIA_LAZY)
		a.flags |= GAIA_MAP_LAZY;
	if (flags & GAIA_MOVABLE)
		a.flags |= GAIA_MAP_MOVABLE;
	if (off < 0)
		a.offset = 1; /* refused like a negative offset, rather than taken for one past the largest file */
	return gaia_map(&a, sizeof a);
}
