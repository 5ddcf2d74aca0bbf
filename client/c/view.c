/*
 * Views: the layout, which is a pure computation, and the request. A view is a mapping whose bytes have their own
 * offsets, from 0 on. map.c maps its memory. The other calls take it like any read-only mapping.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	DEFAULT_ALIGN = 256,
	MAX_ALIGN = 2 << 20,
	MAX_SEGMENTS = 1 << 19,
	MAX_FILES = 1 << 14,
	KEPT_FILES = 1024,
	MAX_ROWS = 1 << 24,
};
#define MAX_SIZE (UINT64_C(1) << 62)

static uint64_t rows_of(const struct gaia_segment *s)
{
	return s->count == 0 ? 1 : s->count;
}

/*
 * span_of returns the bytes of the file from the segment's first to its last. check_segment has checked that they fit.
 */
static uint64_t span_of(const struct gaia_segment *s)
{
	return rows_of(s) == 1 ? s->length : s->stride * (rows_of(s) - 1) + s->length;
}

static int check_segment(size_t i, const struct gaia_segment *s, struct gaiafs_fail *f)
{
	const uint64_t largest = INT64_MAX, rows = rows_of(s);

	if (s->length == 0)
		return gaiafs_failed(f, EINVAL, "segment %zu has a length of 0", i);
	if (rows > MAX_ROWS)
		return gaiafs_failed(f, EINVAL, "segment %zu has %llu rows, and a view has at most %d", i,
				     (unsigned long long)rows, MAX_ROWS);
	if (rows > 1 && s->stride < s->length)
		return gaiafs_failed(f, EINVAL, "segment %zu has rows of %llu bytes, and a stride of only %llu", i,
				     (unsigned long long)s->length, (unsigned long long)s->stride);
	if (s->length > largest || (rows > 1 && s->stride > (largest - s->length) / (rows - 1)) ||
	    s->offset > largest - span_of(s))
		return gaiafs_failed(f, EOVERFLOW, "segment %zu ends past the largest file", i);
	return 0;
}

static uint64_t alignment(uint64_t align)
{
	return align == 0 ? DEFAULT_ALIGN : align;
}

/* lay_out is gaia_view_layout. */
static int lay_out(const struct gaia_segment *segments, uint64_t n, uint64_t align, uint64_t *offsets, uint64_t *size,
		   struct gaiafs_fail *f)
{
	uint64_t end = 0, rows = 0;

	align = alignment(align);
	if ((align & (align - 1)) != 0 || align > MAX_ALIGN)
		return gaiafs_failed(f, EINVAL, "the alignment %llu is not a power of two up to %d",
				     (unsigned long long)align, MAX_ALIGN);
	if (segments == NULL || n == 0)
		return gaiafs_failed(f, EINVAL, "there are no segments");
	if (n > MAX_SEGMENTS)
		return gaiafs_failed(f, EINVAL, "there are %llu segments, and a view has at most %d",
				     (unsigned long long)n, MAX_SEGMENTS);
	for (size_t i = 0; i < n; i++) {
		const struct gaia_segment *s = &segments[i];
		uint64_t begin = (end + align - 1) & ~(align - 1);

		if (check_segment(i, s, f) != 0)
			return f->errnum;
		rows += rows_of(s);
		if (rows > MAX_ROWS)
			return gaiafs_failed(f, EINVAL, "segment %zu: the view has more than %d rows in all", i,
					     MAX_ROWS);
		/* This cannot overflow: a stride is at least a row, so the rows are no longer than the span. */
		end = begin + s->length * rows_of(s);
		if (end > MAX_SIZE)
			return gaiafs_failed(f, EINVAL, "segment %zu: the view is larger than 2^62 bytes", i);
		if (offsets != NULL)
			offsets[i] = begin;
	}
	*size = end;
	return 0;
}

int gaia_view_layout(const struct gaia_segment *segments, size_t n, size_t align, uint64_t *offsets, uint64_t *size)
{
	struct gaiafs_fail f = { 0 };
	uint64_t all = 0;
	int state, err;

	gaiafs_enter(&state);
	err = lay_out(segments, n, align, offsets, &all, &f);
	if (err == 0 && size != NULL)
		*size = all;
	return gaiafs_leave(state, err, &f);
}

/* The files */

void gaiafs_view_free(struct gaiafs_view *v)
{
	if (v == NULL)
		return;
	for (uint32_t i = 0; i < v->files && v->kept; i++)
		if (v->file[i].fd >= 0)
			close(v->file[i].fd);
	free(v);
}

void gaiafs_view_mapped(struct gaiafs_view *v)
{
	v->args = NULL;
	for (uint32_t i = 0; i < v->files && !v->kept; i++)
		v->file[i].fd = -1;
}

static int check_files(const struct gaia_view_args *a, struct gaiafs_fail *f)
{
	if (a->fds == NULL || a->fd_count == 0 || a->fd_count > MAX_FILES)
		return gaiafs_failed(f, EINVAL, "there are %llu files, and a view has 1 to %d",
				     (unsigned long long)(a->fds == NULL ? 0 : a->fd_count), MAX_FILES);
	for (size_t i = 0; a->files != NULL && i < a->count; i++)
		if (a->files[i] >= a->fd_count)
			return gaiafs_failed(f, EINVAL, "segment %zu is of file %u, and there are %llu", i, a->files[i],
					     (unsigned long long)a->fd_count);
	for (size_t i = 0; i < a->fd_count; i++)
		if (gaiafs_check_file(a->fds[i], PROT_READ, f) != 0)
			return f->errnum;
	return 0;
}

static struct gaiafs_view *view_new(const struct gaia_view_args *a, struct gaiafs_fail *f)
{
	struct gaiafs_view *v = calloc(1, sizeof *v + (size_t)a->fd_count * sizeof v->file[0]);

	if (v == NULL) {
		(void)gaiafs_failed(f, ENOMEM, "out of memory");
		return NULL;
	}
	v->args = a;
	v->kept = a->fd_count <= KEPT_FILES;
	for (; v->files < a->fd_count; v->files++) {
		struct gaiafs_view_file *file = &v->file[v->files];

		file->fd = v->kept ? gaiafs_duplicate(a->fds[v->files]) : a->fds[v->files];
		if (file->fd < 0) {
			(void)gaiafs_failed(f, errno, "descriptor %d could not be duplicated: %s", a->fds[v->files],
					    strerror(errno));
			gaiafs_view_free(v);
			return NULL;
		}
	}
	for (size_t i = 0; i < a->count; i++) {
		struct gaiafs_view_file *file = &v->file[a->files == NULL ? 0 : a->files[i]];
		uint64_t from = a->segments[i].offset, to = from + span_of(&a->segments[i]);

		if (file->from == file->to || from < file->from)
			file->from = from;
		if (to > file->to)
			file->to = to;
	}
	return v;
}

int gaiafs_flush(const struct gaiafs_mapping *m, uint64_t at, uint64_t n, bool *launder, struct gaiafs_fail *f)
{
	const struct gaiafs_view *v = m->view;

	if (v == NULL)
		return gaiafs_flush_kernel(m->fd, m->off + at, n, launder, f);
	for (uint32_t i = 0; i < v->files; i++) {
		const struct gaiafs_view_file *file = &v->file[i];

		if (file->fd < 0)
			*launder = true; /* the daemon flushes this file */
		else if (file->to > file->from &&
			 gaiafs_flush_kernel(file->fd, file->from, file->to - file->from, launder, f) != 0)
			return f->errnum;
	}
	return 0;
}

int gaiafs_view_grants(struct gaiafs_view *v, struct gaiafs_grant *g, struct gaiafs_fail *f)
{
	struct gaiafs_grant other;

	for (uint32_t i = 0; i < v->files; i++) {
		struct gaiafs_grant *now = i == 0 ? g : &other;

		if (gaiafs_grant_file(v->file[i].fd, now, f) != 0)
			return f->errnum;
		if (strcmp(now->socket, g->socket) != 0)
			return gaiafs_failed(f, EXDEV, "file %u of the view is on another mount than the first one",
					     i);
		memcpy(v->file[i].token, now->token, GAIAFS_TOKEN);
	}
	return 0;
}

/* The request */

int gaiafs_memfd_of(const uint8_t *body, size_t n, int *memfd, struct gaiafs_fail *f)
{
	int fd = memfd_create("gaiafs request", MFD_CLOEXEC | MFD_ALLOW_SEALING), err;

	if (fd < 0)
		return gaiafs_failed(f, errno, "no memory for %zu bytes of a request: %s", n, strerror(errno));
	for (size_t done = 0; done < n;) {
		ssize_t more = write(fd, body + done, n - done);

		if (more > 0) {
			done += (size_t)more;
		} else if (more == 0 || errno != EINTR) {
			err = gaiafs_failed(f, more == 0 ? ENOSPC : errno, "no memory for %zu bytes of a request", n);
			close(fd);
			return err;
		}
	}
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
		err = gaiafs_failed(f, errno, "a request could not be sealed: %s", strerror(errno));
		close(fd);
		return err;
	}
	*memfd = fd;
	return 0;
}

static void put_all(
	uint8_t *b, const struct gaiafs_mapping *m, const uint8_t uuid[GAIAFS_UUID], int kind, uint32_t flags)
{
	const struct gaiafs_view *v = m->view;
	const struct gaia_view_args *a = v->args;

	b += gaiafs_put_view(b, (uint32_t)m->dev, (uint32_t)kind, uuid, flags, v->files, alignment(a->align),
			     (uint32_t)a->count);
	for (uint32_t i = 0; i < v->files; i++, b += GAIAFS_TOKEN)
		memcpy(b, v->file[i].token, GAIAFS_TOKEN);
	for (size_t i = 0; i < a->count; i++) {
		const struct gaia_segment *s = &a->segments[i];

		b += gaiafs_put_segment(b, s->offset, s->length, rows_of(s) == 1 ? 0 : s->stride, rows_of(s),
					a->files == NULL ? 0 : a->files[i]);
	}
}

int gaiafs_view_call(struct gaiafs_mapping *m, const uint8_t uuid[GAIAFS_UUID], int kind, uint32_t flags,
		     struct gaiafs_request *r)
{
	const uint64_t needed = GAIAFS_FEATURE_VIEW | GAIAFS_FEATURE_LARGE;
	struct gaiafs_rest rest = { .n = GAIAFS_VIEW_HEAD + GAIAFS_TOKEN * (size_t)m->view->files +
					 GAIAFS_VIEW_SEGMENT * (size_t)m->view->args->count, .memfd = -1 };
	uint8_t body[GAIAFS_MAX_BODY];
	size_t n = 0;
	int err = 0;

	if ((gaiafs_conn_features(m->conn) & needed) != needed)
		return gaiafs_failed(&r->fail, ENOTSUP, "the daemon of the mount is older than this library, and has no "
				     "views");
	rest.bytes = malloc(rest.n);
	if (rest.bytes == NULL)
		return gaiafs_failed(&r->fail, ENOMEM, "out of memory");
	put_all(rest.bytes, m, uuid, kind, flags);
	if (rest.n > GAIAFS_MAX_REQUEST - GAIAFS_HEADER) {
		err = gaiafs_memfd_of(rest.bytes, rest.n, &rest.memfd, &r->fail);
		n = gaiafs_put_large(body, rest.n);
	}
	if (err == 0) {
		r->rest = &rest;
		err = gaiafs_call(m->conn, GAIAFS_MAPVIEW, body, n, r);
		r->rest = NULL;
	}
	if (rest.memfd >= 0)
		close(rest.memfd);
	free(rest.bytes);
	return err;
}

/* The calls */

static int make_view(void **base, const struct gaia_view_args *a, struct gaiafs_fail *f)
{
	struct gaia_map_args as = {
		.address = a->address, .flags = a->flags, .fd = -1, .prot = PROT_READ, .device = a->device, .kind = a->kind
	};
	struct gaiafs_mapping *m;
	int err = lay_out(a->segments, a->count, a->align, NULL, &as.length, f);

	if (err == 0)
		err = gaiafs_check_args(&as, f);
	if (err == 0)
		err = check_files(a, f);
	if (err != 0)
		return err;
	if ((a->flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) && (uintptr_t)a->address % alignment(a->align) != 0)
		return gaiafs_failed(f, EINVAL, "the address is not a multiple of the alignment %llu",
				     (unsigned long long)alignment(a->align));
	err = gaiafs_prepare_fork();
	if (err != 0)
		return gaiafs_failed(f, err, "pthread_atfork: %s", strerror(err));
	m = gaiafs_mapping_new(-1, f);
	if (m == NULL)
		return f->errnum;
	m->align = alignment(a->align);
	m->view = view_new(a, f);
	if (m->view == NULL) {
		gaiafs_mapping_unref(m);
		return f->errnum;
	}
	return gaiafs_map_it(m, &as, base, f);
}

void *gaia_map_view(const struct gaia_view_args *args, size_t size)
{
	struct gaiafs_fail f = { 0 };
	struct gaia_view_args a;
	void *base = MAP_FAILED;
	int state, err;

	gaiafs_enter(&state);
	err = gaiafs_read_args(&a, sizeof a, args, size, offsetof(struct gaia_view_args, kind) + sizeof(int), &f);
	if (err == 0)
		err = make_view(&base, &a, &f);
	(void)gaiafs_leave(state, err, &f);
	return base;
}

void *gaia_mview(int fd, const struct gaia_segment *segments, size_t n, size_t align, int dev)
{
	const struct gaia_view_args a = { .segments = segments, .count = n, .fds = &fd, .fd_count = 1, .align = align,
					  .device = dev };

	return gaia_map_view(&a, sizeof a);
}
