/* Encodes and decodes the frames in two files, with which every implementation of the protocol is tested. */
#include "check.h"

static size_t frame_named(const char *path, const char *name, uint8_t *out)
{
	static char line[1 << 14];
	size_t n = 0, len = strlen(name);
	FILE *f = fopen(path, "r");

	CHECK(f != NULL);
	while (fgets(line, sizeof line, f) != NULL) {
		if (strncmp(line, name, len) != 0 || line[len] != ' ')
			continue;
		for (const char *p = line + len + 1; p[0] > ' ' && p[1] > ' '; p += 2) {
			unsigned byte;
			CHECK(sscanf(p, "%2x", &byte) == 1);
			out[n++] = (uint8_t)byte;
		}
	}
	fclose(f);
	CHECK(n > 0);
	return n;
}

static void same(const char *path, const char *name, uint16_t type, uint64_t id, const uint8_t *body, size_t n)
{
	uint8_t want[4096], got[4096];
	size_t wanted = frame_named(path, name, want);

	gaiafs_put_header(got, type, 0, id, n);
	memcpy(got + GAIAFS_HEADER, body, n);
	if (wanted != GAIAFS_HEADER + n || memcmp(want, got, wanted) != 0) {
		fprintf(stderr, "frame %s is encoded differently\n", name);
		_exit(1);
	}
}

static const uint8_t *body_of(const char *path, const char *name, uint16_t type, uint16_t flags, uint64_t id, size_t *n)
{
	static uint8_t frame[4096];
	struct gaiafs_header h;
	size_t len = frame_named(path, name, frame);

	CHECK(gaiafs_get_header(frame, len, &h));
	CHECK(h.type == type && h.flags == flags && h.id == id && h.length == len);
	CHECK(!gaiafs_get_header(frame, len - 1, &h) && !gaiafs_get_header(frame, 15, &h));
	*n = len - GAIAFS_HEADER;
	return frame + GAIAFS_HEADER;
}

static void wire(const char *path)
{
	static const char *const advice[] = { "advise-normal", "advise-random", "advise-sequential", "advise-willneed",
					      "advise-dontneed" };
	static const uint8_t no_uuid[GAIAFS_UUID];
	uint8_t b[GAIAFS_MAX_BODY], token[GAIAFS_TOKEN], uuid[GAIAFS_UUID];
	struct gaiafs_extents e;
	struct gaiafs_welcome w;
	struct gaiafs_mapped m;
	struct gaiafs_result r;
	struct gaiafs_grant g;
	const uint8_t *body;
	size_t n;

	for (unsigned i = 0; i < sizeof token; i++)
		token[i] = (uint8_t)i;
	for (unsigned i = 0; i < sizeof uuid; i++)
		uuid[i] = (uint8_t)(16 + i);
	same(path, "map", GAIAFS_MAP, 1, b, gaiafs_put_map(b, token, 3, uuid, GAIAFS_READ | GAIAFS_WRITE,
							   GAIAFS_MAP_LAZY | GAIAFS_MAP_LAUNDER, 0, 0x200000, 0x123456789));
	same(path, "map-read", GAIAFS_MAP, 2, b, gaiafs_put_map(b, token, 0, no_uuid, GAIAFS_READ, 0, 0, 0, 1));
	same(path, "acquire", GAIAFS_ACQUIRE, 3, b, gaiafs_put_range(b, 7, 4096, 8192, GAIAFS_ACQUIRE_LAUNDER));
	same(path, "release", GAIAFS_RELEASE, 4, b, gaiafs_put_range(b, 7, 0, 1, 0));
	same(path, "sync", GAIAFS_SYNC, 5, b, gaiafs_put_range(b, 7, 0, 0x123456789, GAIAFS_SYNC_DURABLE));
	for (uint32_t i = 0; i < 5; i++)
		same(path, advice[i], GAIAFS_ADVISE, 6 + i, b, gaiafs_put_range(b, 7, 0, 4096, i));
	same(path, "unmap", GAIAFS_UNMAP, 11, b, gaiafs_put_unmap(b, 7));
	same(path, "status", GAIAFS_STATUS, 12, token, sizeof token);
	same(path, "ping", GAIAFS_PING, UINT64_C(0xfedcba9876543210), b, 0);

	body = body_of(path, "welcome", GAIAFS_WELCOME, 0, 0, &n);
	CHECK(gaiafs_get_welcome(body, n, &w) && w.version == 1 && w.max_requests == 128 && w.kinds == 3);
	CHECK(!gaiafs_get_welcome(body, n - 1, &w));
	body = body_of(path, "mapped", GAIAFS_MAPPED, GAIAFS_MORE, 1, &n);
	CHECK(gaiafs_get_mapped(body, n, 1, &m));
	CHECK(m.mapping == 7 && m.kind == 1 && m.device == 3 && m.size == 0x123456000 && m.extents == 2);
	CHECK(memcmp(m.uuid, no_uuid, sizeof no_uuid) == 0);
	CHECK(!gaiafs_get_mapped(body, n + 1, 1, &m));
	body = body_of(path, "mapped-unknown-size", GAIAFS_MAPPED, GAIAFS_MORE, 2, &n);
	CHECK(gaiafs_get_mapped(body, n, 1, &m));
	CHECK(m.mapping == 8 && m.kind == 2 && m.device == 0 && m.size == -1 && m.extents == 1);
	CHECK(memcmp(m.uuid, uuid, sizeof uuid) == 0);
	body = body_of(path, "extents", GAIAFS_EXTENTS, 0, 1, &n);
	CHECK(gaiafs_get_extents(body, n, 1, &e) && e.first == 0 && e.count == 2);
	CHECK(e.place[0].off == 0x200000 && e.place[0].size == 0x200000);
	CHECK(e.place[1].off == 0x400000 && e.place[1].size == 0x200000);
	CHECK(!gaiafs_get_extents(body, n - 1, 1, &e) && !gaiafs_get_extents(body, 7, 1, &e));
	body = body_of(path, "result", GAIAFS_RESULT, 0, 3, &n);
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == 0 && r.pages == 0x1234567890 && r.text_len == 0);
	body = body_of(path, "result-enomem", GAIAFS_RESULT, 0, 4, &n);
	static const char text[] = "no room: 1 GiB budget of device 3 is spent \xc3\xa9";
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == ENOMEM && r.pages == 0);
	CHECK(r.text_len == sizeof text - 1 && memcmp(r.text, text, r.text_len) == 0);
	CHECK(!gaiafs_get_result(body, n - 1, &r) && !gaiafs_get_result(body, 15, &r));
	body = body_of(path, "error", GAIAFS_ERROR, 0, 0, &n);
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == ETIMEDOUT);
	CHECK(r.text_len == 16 && memcmp(r.text, "no HELLO in time", 16) == 0);
	(void)body_of(path, "document", GAIAFS_DOCUMENT, GAIAFS_MORE, 12, &n);
	CHECK(n == 5);

	uint8_t grant[512];
	CHECK(gaiafs_get_grant(grant, frame_named(path, "ioctl-grant", grant), &g));
	CHECK(!g.status && memcmp(g.token, token, sizeof token) == 0 && strcmp(g.socket, "/run/gaiafs/x.sock") == 0);
	CHECK(gaiafs_get_grant(grant, frame_named(path, "ioctl-grant-status", grant), &g) && g.status);
	memset(grant + 24, 'x', 104);
	CHECK(!gaiafs_get_grant(grant, 128, &g)); /* the path is not terminated */
	CHECK(!gaiafs_get_grant(grant, 127, &g));

	CHECK(gaiafs_release_at_least("6.16.0", 6, 16) && gaiafs_release_at_least("6.18.3-x", 6, 16));
	CHECK(gaiafs_release_at_least("7.0", 6, 16) && gaiafs_release_at_least("10.2-foo", 6, 16));
	CHECK(!gaiafs_release_at_least("6.15.9", 6, 16) && !gaiafs_release_at_least("5.20.1", 6, 16));
	CHECK(!gaiafs_release_at_least("6", 6, 16) && !gaiafs_release_at_least("", 6, 16));
}

/* Additions of version 2. */
static void wire2(const char *path)
{
	uint8_t b[GAIAFS_MAX_BODY], token[GAIAFS_TOKEN], key[GAIAFS_KEY];
	static const uint8_t no_uuid[GAIAFS_UUID];
	struct gaiafs_welcome w;
	struct gaiafs_extents e;
	struct gaiafs_mapped m;
	struct gaiafs_move move;
	const uint8_t *body;
	size_t n;

	for (unsigned i = 0; i < sizeof token; i++) {
		token[i] = (uint8_t)i;
		key[i] = (uint8_t)(0x20 + i);
	}
	same(path, "hello2", GAIAFS_HELLO, 0, b, gaiafs_put_hello(b));
	same(path, "map2", GAIAFS_MAP, 1, b, gaiafs_put_map(b, token, 3, no_uuid, GAIAFS_READ | GAIAFS_WRITE, GAIAFS_MAP_LAZY,
							    GAIAFS_KIND_EMULATED, 0x200000, 0x123456789));
	same(path, "features", GAIAFS_FEATURES, 2, b, gaiafs_put_features(b, 3, ""));
	same(path, "attach", GAIAFS_ATTACH, 3, key, sizeof key);
	same(path, "answer", GAIAFS_ANSWER, 4, b, gaiafs_put_answer(b, 0, 6));
	const struct gaiafs_ended ended[] = { { 9, 5 }, { 0x123456789a, UINT32_MAX } };
	same(path, "answer-recall", GAIAFS_ANSWER, 8, b, gaiafs_put_ended(b, ended, 2, false));
	same(path, "answer-recall-uses", GAIAFS_ANSWER, 8, b, gaiafs_put_ended(b, ended, 2, true));
	same(path, "done", GAIAFS_DONE, 12, b, gaiafs_put_done(b, (struct gaiafs_ended){ 9, 0 }));
	same(path, "done-uses", GAIAFS_DONE, 14, b, gaiafs_put_done(b, (struct gaiafs_ended){ 9, 0x12345 }));
	same(path, "answer-eperm", GAIAFS_ANSWER, 5, b, gaiafs_put_answer(b, EPERM, 5));
	same(path, "features-view", GAIAFS_FEATURES, 2, b, gaiafs_put_features(b, 11, ""));
	same(path, "features-move", GAIAFS_FEATURES, 2, b, gaiafs_put_features(b, 15, ""));
	same(path, "features-tenant", GAIAFS_FEATURES, 2, b, gaiafs_put_features(b, 63, "training"));
	same(path, "features-group", GAIAFS_FEATURES, 2, b, gaiafs_put_features(b, 27, ""));
	same(path, "features-uses", GAIAFS_FEATURES, 2, b,
	     gaiafs_put_features(b, 7 | GAIAFS_FEATURE_KEEP | GAIAFS_FEATURE_USES, ""));

	/* Groups: a list of ranges, in an ACQUIREALL after its own fields. */
	uint8_t list[256], *last = list;
	uint64_t number = 0;
	last += gaiafs_put_ranges(last, 2);
	last += gaiafs_put_group_range(last, 7, 4096, 8192);
	last += gaiafs_put_group_range(last, 8, 0, 0x123456789);
	same(path, "begin-group", GAIAFS_BEGINGROUP, 10, list, (size_t)(last - list));
	same(path, "release-group", GAIAFS_RELEASEGROUP, 11, b, gaiafs_put_unmap(b, 3));
	same(path, "abort-group", GAIAFS_ABORTGROUP, 12, b, gaiafs_put_unmap(b, 3));
	last = list + gaiafs_put_acquire_all(list, UINT64_C(0x1122334455), 500, GAIAFS_ACQUIRE_LAUNDER);
	last += gaiafs_put_ranges(last, 1);
	last += gaiafs_put_group_range(last, 7, 0, 1);
	same(path, "acquire-all", GAIAFS_ACQUIREALL, 13, list, (size_t)(last - list));
	body = body_of(path, "numbered", GAIAFS_NUMBERED, 0, 11, &n);
	CHECK(gaiafs_get_numbered(body, n, &number) && number == UINT64_C(0x1122334455));
	CHECK(!gaiafs_get_numbered(body, 15, &number));

	/* MAPVIEW: a head, tokens, segments. */
	uint8_t uuid[GAIAFS_UUID], view[1024], *end = view;
	for (unsigned i = 0; i < sizeof uuid; i++)
		uuid[i] = (uint8_t)(0x10 + i);
	end += gaiafs_put_view(end, 3, GAIAFS_KIND_EMULATED, no_uuid, GAIAFS_MAP_LAZY, 1, 256, 1);
	end = (uint8_t *)memcpy(end, token, sizeof token) + sizeof token;
	end += gaiafs_put_segment(end, 0x5678, 0x1234, 0, 1, 0);
	same(path, "mapview", GAIAFS_MAPVIEW, 7, view, (size_t)(end - view));
	end = view + gaiafs_put_view(view, 0, 0, uuid, GAIAFS_MAP_LAUNDER, 2, 4096, 3);
	end = (uint8_t *)memcpy(end, token, sizeof token) + sizeof token;
	end = (uint8_t *)memcpy(end, key, sizeof key) + sizeof key;
	end += gaiafs_put_segment(end, UINT64_C(0x123456789a), 0x1001, 0x2000, 3, 1);
	end += gaiafs_put_segment(end, 0, 1, 0, 1, 0);
	end += gaiafs_put_segment(end, 0, 1, 0, 1, 0);
	same(path, "mapview-files", GAIAFS_MAPVIEW, 8, view, (size_t)(end - view));
	uint8_t large[64], want[64];
	gaiafs_put_header(large, GAIAFS_MAPVIEW, GAIAFS_LARGE, 9, gaiafs_put_large(large + GAIAFS_HEADER, 0x1400030));
	CHECK(frame_named(path, "mapview-large", want) == 24 && memcmp(large, want, 24) == 0);

	body = body_of(path, "welcome2", GAIAFS_WELCOME, 0, 0, &n);
	CHECK(gaiafs_get_welcome(body, n, &w) && w.version == 2 && w.max_requests == 128 && w.kinds == 3);
	CHECK(w.offered == 3 && w.required == 0 && memcmp(w.key, key, sizeof key) == 0);
	CHECK(!gaiafs_get_welcome(body, n - 1, &w));
	body = body_of(path, "welcome2-longer", GAIAFS_WELCOME, 0, 0, &n);
	CHECK(gaiafs_get_welcome(body, n, &w) && w.required == UINT64_C(1) << 62 && memcmp(w.key, key, sizeof key) == 0);
	body = body_of(path, "mapped2-longer", GAIAFS_MAPPED, GAIAFS_MORE, 1, &n);
	CHECK(gaiafs_get_mapped(body, n, 2, &m) && m.mapping == 7 && m.extents == 2 && !gaiafs_get_mapped(body, n, 1, &m));
	CHECK(!gaiafs_get_mapped(body, 47, 2, &m));
	static const char *const names[] = { "extents2", "extents2-longer" };
	for (size_t i = 0; i < 2; i++) {
		body = body_of(path, names[i], GAIAFS_EXTENTS, 0, 1, &n);
		CHECK(gaiafs_get_extents(body, n, 2, &e) && e.first == 0 && e.count == 2);
		CHECK(e.place[0].off == 0x200000 && e.place[0].size == 0x200000 && e.place[0].kind == GAIAFS_KIND_EMULATED);
		CHECK(e.place[0].tier == GAIAFS_TIER_DEVICE && e.place[0].generation == 5);
		CHECK(e.place[1].off == 0x400000 && e.place[1].size == 0x400000 && e.place[1].kind == GAIAFS_KIND_CUDA);
		CHECK(e.place[1].tier == GAIAFS_TIER_HOST && e.place[1].generation == UINT64_C(0x123456789a));
		CHECK(!gaiafs_get_extents(body, n - 1, 2, &e) && !gaiafs_get_extents(body, 15, 2, &e));
	}
	body = body_of(path, "move", GAIAFS_MOVE, 0, 5, &n);
	CHECK(gaiafs_get_move(body, n, &move) && move.mapping == 7 && move.previous == 5 && move.extent.generation == 6);
	CHECK(move.extent.off == 0x400000 && move.extent.size == 0x200000 && move.extent.kind == GAIAFS_KIND_CUDA);
	CHECK(move.extent.tier == GAIAFS_TIER_HOST && !gaiafs_get_move(body, n - 1, &move));

	/* For any frame of a daemon, the decoders stay inside it. The address sanitizer would report an overrun. */
	unsigned seed = 1;
	for (int round = 0; round < 200000; round++) {
		size_t len = (seed = seed * 1103515245 + 12345) >> 16 & 255;
		uint8_t *noise = malloc(len + 1);

		CHECK(noise != NULL);
		for (size_t i = 0; i < len; i++)
			noise[i] = (uint8_t)((seed = seed * 1103515245 + 12345) >> 20 & (round % 3 == 0 ? 255 : 3));
		for (unsigned version = 1; version <= 3; version++) {
			(void)gaiafs_get_mapped(noise, len, version, &m);
			CHECK(!gaiafs_get_extents(noise, len, version, &e) || e.count <= GAIAFS_MAX_EXTENTS);
		}
		(void)gaiafs_get_welcome(noise, len, &w);
		(void)gaiafs_get_move(noise, len, &move);
		free(noise);
	}
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	wire(argv[1]);
	wire2(argv[2]);
	return 0;
}
