/* The interface, as programs that were built with other headers see it. Otherwise a client like client.c. */
#include "check.h"

#include <dlfcn.h>
#include <stddef.h>

/* The first versions of the structures. They may only grow at the end. */
_Static_assert(sizeof(struct gaia_map_args) == 48 && offsetof(struct gaia_map_args, length) == 0 &&
		       offsetof(struct gaia_map_args, offset) == 8 && offsetof(struct gaia_map_args, address) == 16 &&
		       offsetof(struct gaia_map_args, flags) == 24 && offsetof(struct gaia_map_args, fd) == 32 &&
		       offsetof(struct gaia_map_args, prot) == 36 && offsetof(struct gaia_map_args, device) == 40 &&
		       offsetof(struct gaia_map_args, kind) == 44,
	       "struct gaia_map_args");
_Static_assert(sizeof(struct gaia_info) == 64 && offsetof(struct gaia_info, address) == 0 &&
		       offsetof(struct gaia_info, length) == 8 && offsetof(struct gaia_info, offset) == 16 &&
		       offsetof(struct gaia_info, flags) == 24 && offsetof(struct gaia_info, serial) == 32 &&
		       offsetof(struct gaia_info, prot) == 40 && offsetof(struct gaia_info, device) == 44 &&
		       offsetof(struct gaia_info, kind) == 48 && offsetof(struct gaia_info, size) == 56,
	       "struct gaia_info");

_Static_assert(sizeof(struct gaia_segment) == 32 && offsetof(struct gaia_segment, offset) == 0 &&
		       offsetof(struct gaia_segment, length) == 8 && offsetof(struct gaia_segment, stride) == 16 &&
		       offsetof(struct gaia_segment, count) == 24,
	       "struct gaia_segment, which never grows: programs have arrays of it");
_Static_assert(sizeof(struct gaia_view_args) == 72 && offsetof(struct gaia_view_args, segments) == 0 &&
		       offsetof(struct gaia_view_args, count) == 8 && offsetof(struct gaia_view_args, fds) == 16 &&
		       offsetof(struct gaia_view_args, fd_count) == 24 && offsetof(struct gaia_view_args, files) == 32 &&
		       offsetof(struct gaia_view_args, align) == 40 && offsetof(struct gaia_view_args, address) == 48 &&
		       offsetof(struct gaia_view_args, flags) == 56 && offsetof(struct gaia_view_args, device) == 64 &&
		       offsetof(struct gaia_view_args, kind) == 68,
	       "struct gaia_view_args");

/* Linux may use all bits of an int for mmap, so the library's flags are above these. */
_Static_assert(GAIA_MAP_LAZY > UINT32_MAX && GAIA_MAP_PEERS > UINT32_MAX && GAIA_MAP_HOLD > UINT32_MAX &&
		       GAIA_MAP_NO_THREAD > UINT32_MAX, "the flags of gaia_map");

/* A structure of a future version. */
struct longer {
	struct gaia_map_args args;
	uint8_t more[100];
};

static void args(const char *path)
{
	struct gaia_map_args a = {
		.length = 5000, .offset = PAGE, .fd = open_file(path, O_RDWR), .prot = PROT_READ | PROT_WRITE, .device = 1
	};
	struct longer l = { .args = a };
	struct { /* of a future version, too */
		struct gaia_info now;
		uint64_t more[2];
	} info;

	CHECK(gaia_version() == GAIA_VERSION);
	uint8_t *p = gaia_map(&a, sizeof a);
	CHECK(p != MAP_FAILED && p[0] == at(PAGE) && p[4999] == at(PAGE + 4999));
	memset(&info, 0xff, sizeof info);
	CHECK(gaia_info(p + 4999, &info.now, sizeof info) == 0);
	CHECK(info.now.address == p && info.now.length == 5000 && info.now.offset == PAGE && info.now.flags == 0);
	CHECK(info.now.prot == (PROT_READ | PROT_WRITE) && info.now.device == 1 && info.now.kind == GAIA_KIND_EMULATED);
	CHECK(info.now.reserved == 0 && info.more[0] == 0 && info.more[1] == 0);
	uint64_t first = info.now.serial;
	CHECK(gaia_munmap(p, 5000) == 0);
	FAILS(gaia_info(p, &info.now, sizeof info.now), ENOMEM);

	/* A longer structure is accepted if its unknown bytes are 0, and a shorter one never. */
	p = gaia_map(&l.args, sizeof l);
	CHECK(p != MAP_FAILED && p[0] == at(PAGE));
	CHECK(gaia_info(p, &info.now, sizeof info.now) == 0 && info.now.serial != first);
	memset(&info, 0xff, sizeof info);
	CHECK(gaia_info(p, &info.now, offsetof(struct gaia_info, offset)) == 0);
	CHECK(info.now.address == p && info.now.length == 5000 && info.now.offset == UINT64_MAX);
	FAILS(gaia_info(p, &info.now, 0), EINVAL);
	FAILS(gaia_info(p, NULL, sizeof info.now), EINVAL);
	CHECK(gaia_munmap(p, 5000) == 0);
	l.more[99] = 1;
	MMAP_FAILS(gaia_map(&l.args, sizeof l), E2BIG);
	CHECK(strstr(gaia_error(), "byte 147") != NULL);
	MMAP_FAILS(gaia_map(&a, sizeof a - 1), EINVAL);
	MMAP_FAILS(gaia_map(&a, 0), EINVAL);
	MMAP_FAILS(gaia_map(NULL, sizeof a), EINVAL);

	/* Flags: each of the library's is accepted alone, and no other flag is. */
	a.prot = PROT_READ;
	for (unsigned bit = 0; bit < 64; bit++) {
		const uint64_t known = MAP_SHARED | GAIA_MAP_LAZY | GAIA_MAP_PEERS | GAIA_MAP_HOLD | GAIA_MAP_NO_THREAD |
			GAIA_MAP_MOVABLE | GAIA_MAP_STAYS;

		a.flags = UINT64_C(1) << bit;
		if (a.flags == MAP_FIXED || a.flags == 0x100000 /* MAP_FIXED_NOREPLACE */)
			continue;
		if ((a.flags & known) == 0) {
			MMAP_FAILS(gaia_map(&a, sizeof a), EINVAL);
			continue;
		}
		p = gaia_map(&a, sizeof a);
		CHECK(p != MAP_FAILED);
		CHECK(gaia_info(p, &info.now, sizeof info.now) == 0 && info.now.flags == (a.flags & ~(uint64_t)MAP_SHARED));
		CHECK(info.now.prot == PROT_READ && gaia_munmap(p, 5000) == 0);
	}
	a.flags = 0;
	a.offset = UINT64_MAX - PAGE + 1;
	MMAP_FAILS(gaia_map(&a, sizeof a), EOVERFLOW);
	a.offset = 0;
	a.length = UINT64_MAX;
	MMAP_FAILS(gaia_map(&a, sizeof a), EOVERFLOW);
	a.length = 5000;

	/* Wrong kinds and wrong devices have different errors. */
	a.kind = GAIA_KIND_EMULATED;
	p = gaia_map(&a, sizeof a);
	CHECK(p != MAP_FAILED && gaia_munmap(p, 5000) == 0);
	a.kind = GAIA_KIND_CUDA;
	MMAP_FAILS(gaia_map(&a, sizeof a), ENODEV);
	a.kind = 3;
	MMAP_FAILS(gaia_map(&a, sizeof a), EINVAL);
	a.kind = -1;
	MMAP_FAILS(gaia_map(&a, sizeof a), EINVAL);

	/* gaia_mmap takes two flags of its own, and none of gaia_map's. */
	p = gaia_mmap(NULL, PAGE, PROT_READ, MAP_SHARED | GAIA_LAZY, a.fd, 0, 0);
	CHECK(p != MAP_FAILED && gaia_info(p, &info.now, sizeof info.now) == 0);
	CHECK(info.now.flags == GAIA_MAP_LAZY && gaia_munmap(p, PAGE) == 0);
	p = gaia_mmap(NULL, PAGE, PROT_READ, MAP_SHARED | GAIA_MOVABLE, a.fd, 0, 0);
	CHECK(p != MAP_FAILED && gaia_info(p, &info.now, sizeof info.now) == 0);
	CHECK(info.now.flags == GAIA_MAP_MOVABLE && gaia_munmap(p, PAGE) == 0);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, MAP_SHARED | 0x10000000, a.fd, 0, 0), EINVAL);
	close(a.fd);
}

/* Two of three GPUs can reach each other's memory. */
static void peers(const char *path)
{
	struct gaia_map_args a = { .length = (size_t)3 << 20, .fd = open_file(path, O_RDWR), .prot = PROT_READ, .device = 1,
				   .kind = GAIA_KIND_CUDA };
	uint8_t *p = gaia_map(&a, sizeof a), *q;
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *found;
	unsigned (*users)(uint64_t address);

	CHECK(p != MAP_FAILED && library != NULL);
	found = dlsym(library, "fakecuda_users");
	CHECK(found != NULL);
	memcpy(&users, &found, sizeof found);
	CHECK(users((uintptr_t)p) == 1 << 1);
	a.flags = GAIA_MAP_PEERS;
	q = gaia_map(&a, sizeof a);
	CHECK(q != MAP_FAILED && users((uintptr_t)q) == (1 << 0 | 1 << 1) &&
		users((uintptr_t)q + a.length - 1) == users((uintptr_t)q));
	CHECK(gaia_munmap(q, a.length) == 0 && gaia_munmap(p, a.length) == 0);
	a.kind = GAIA_KIND_EMULATED;
	MMAP_FAILS(gaia_map(&a, sizeof a), ENODEV);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	gaiafs_request_grant = ask_for_grant;
	if (strcmp(argv[1], "args") == 0)
		args(argv[2]);
	else if (strcmp(argv[1], "peers") == 0)
		peers(argv[2]);
	else
		CHECK(!"a scenario of that name");
	return 0;
}
