/*
 * The wire format of docs/dev/protocol.md, versions 1 and 2, from the client's side. The daemon has its own copy of
 * these numbers. Tests compare both with the frames in control/testdata.
 */
#ifndef GAIAFS_WIRE_H
#define GAIAFS_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	GAIAFS_HEADER = 16,
	GAIAFS_MAX_FRAME = 64 << 10,
	GAIAFS_MAX_EXTENTS = 128, /* in one EXTENTS frame */
	GAIAFS_TOKEN = 16,
	GAIAFS_UUID = 16,
	GAIAFS_MAX_BODY = 64, /* of a request other than MAPVIEW and FEATURES */
	GAIAFS_MAX_REQUEST = 4096, /* the largest frame that a daemon takes */
	GAIAFS_MAX_TEXT = 1024,
	GAIAFS_KEY = 16,
	GAIAFS_MIN_VERSION = 1,
	GAIAFS_MAX_VERSION = 2,
	GAIAFS_PAGE = 4096,
};

#define GAIAFS_HELLO_MAGIC UINT32_C(0x41494147)

enum gaiafs_type {
	GAIAFS_HELLO = 1,
	GAIAFS_MAP = 2,
	GAIAFS_ACQUIRE = 3,
	GAIAFS_RELEASE = 4,
	GAIAFS_SYNC = 5,
	GAIAFS_ADVISE = 6,
	GAIAFS_UNMAP = 7,
	GAIAFS_STATUS = 8,
	GAIAFS_PING = 9,
	GAIAFS_FEATURES = 13,
	GAIAFS_ATTACH = 14,
	GAIAFS_ANSWER = 15,
	GAIAFS_MAPVIEW = 16,
	GAIAFS_BEGINGROUP = 20,
	GAIAFS_RELEASEGROUP = 21,
	GAIAFS_ABORTGROUP = 22,
	GAIAFS_ACQUIREALL = 23,
	GAIAFS_USE = 40,
	GAIAFS_DONE = 41,
	GAIAFS_CHECK = 0x4001, /* from here to 0x4005: sent by the daemon unasked */
	GAIAFS_MOVE = 0x4002,
	GAIAFS_RECALL = 0x4005,
	GAIAFS_INVALIDATED = 0x4003,
	GAIAFS_BUDGET = 0x4004,
	GAIAFS_WELCOME = 0x8001,
	GAIAFS_MAPPED = 0x8002,
	GAIAFS_EXTENTS = 0x8003,
	GAIAFS_RESULT = 0x8004,
	GAIAFS_DOCUMENT = 0x8005,
	GAIAFS_ERROR = 0x8006,
	GAIAFS_NUMBERED = 0x8007,
};

enum { GAIAFS_MORE = 1, GAIAFS_LARGE = 2 };           /* in the flags of a header */
enum { GAIAFS_READ = 1, GAIAFS_WRITE = 2 };           /* the prot of a MAP */
enum { GAIAFS_MAP_LAZY = 1, GAIAFS_MAP_LAUNDER = 2 }; /* the flags of a MAP and of a MAPVIEW */
enum { GAIAFS_MAP_MOVABLE = 4, GAIAFS_MAP_LARGE_MOVABLE = 8 }; /* of a MAP */
enum { GAIAFS_USE_NESTED = 1, GAIAFS_USE_KEEP = 2 };  /* the flags of a USE */
enum { GAIAFS_ACQUIRE_LAUNDER = 1 };
enum { GAIAFS_SYNC_DURABLE = 1 };
enum { GAIAFS_TIER_DEVICE = 1, GAIAFS_TIER_HOST = 2, GAIAFS_TIER_NONE = 3 };

/* Feature bits of a daemon's offer and requirements, and those that this library uses. */
#define GAIAFS_FEATURE_SERVICE UINT64_C(1)
#define GAIAFS_FEATURE_LARGE UINT64_C(2)
#define GAIAFS_FEATURE_MOVE UINT64_C(4)
#define GAIAFS_FEATURE_VIEW UINT64_C(8)
#define GAIAFS_FEATURE_GROUP UINT64_C(16)
#define GAIAFS_FEATURE_TENANT UINT64_C(32) /* chosen if GAIAFS_TENANT is set */
#define GAIAFS_FEATURE_KEEP UINT64_C(256)
#define GAIAFS_FEATURE_USES UINT64_C(512)
#define GAIAFS_USED_FEATURES                                                                                           \
	(GAIAFS_FEATURE_KEEP | GAIAFS_FEATURE_USES | GAIAFS_FEATURE_SERVICE | GAIAFS_FEATURE_LARGE | GAIAFS_FEATURE_MOVE | \
		GAIAFS_FEATURE_VIEW | GAIAFS_FEATURE_GROUP)

struct gaiafs_header {
	uint32_t length;
	uint16_t type;
	uint16_t flags;
	uint64_t id;
};

struct gaiafs_welcome {
	uint16_t version;
	uint32_t max_requests;
	uint32_t kinds; /* of memory on the mount's devices: 1 << (kind - 1) for each */
	/* From version 2 on; otherwise 0. */
	uint64_t offered, required; /* features */
	uint8_t key[GAIAFS_KEY];    /* names the connection in its service connection's ATTACH */
};

struct gaiafs_mapped {
	uint64_t mapping;
	uint32_t kind;
	uint32_t device;
	int64_t size; /* of the file at home; negative: unknown */
	uint32_t extents;
	uint8_t uuid[GAIAFS_UUID]; /* of the GPU; zeros if the kind has none */
	bool movable;              /* it has memory in brackets only */
};

struct gaiafs_place {
	int64_t off, size;
	/* From version 2 on; otherwise 0. */
	uint32_t kind, tier;
	uint64_t generation; /* grows each time the extent moves */
};

struct gaiafs_move {
	uint64_t mapping;
	struct gaiafs_place extent; /* with the new kind, tier and generation */
	uint64_t previous;          /* the generation before */
};

struct gaiafs_extents {
	uint32_t first, count;
	struct gaiafs_place place[GAIAFS_MAX_EXTENTS];
};

struct gaiafs_result {
	uint32_t errnum;
	int64_t pages;
	const char *text; /* in the frame, not terminated */
	size_t text_len;
};

/* The ioctl's answer. */
enum { GAIAFS_GRANT_SIZE = 128, GAIAFS_SOCKET_PATH = 104 };

struct gaiafs_grant {
	bool status;
	uint8_t token[GAIAFS_TOKEN];
	char socket[GAIAFS_SOCKET_PATH];
};

/* Encoders of bodies return the number of bytes stored, at most GAIAFS_MAX_BODY. */
void gaiafs_put_header(uint8_t *b, uint16_t type, uint16_t flags, uint64_t id, size_t body);
size_t gaiafs_put_hello(uint8_t *b);
size_t gaiafs_put_map(uint8_t *b, const uint8_t token[GAIAFS_TOKEN], uint32_t device, const uint8_t uuid[GAIAFS_UUID],
		      uint32_t prot, uint32_t flags, uint32_t kind, uint64_t off, uint64_t len);
enum { GAIAFS_MAX_TENANT = 255, GAIAFS_MAX_FEATURES = 16 + GAIAFS_MAX_TENANT };

/*
 * gaiafs_put_features takes the name of a tenant if GAIAFS_FEATURE_TENANT is chosen, otherwise "". The name has at most
 * GAIAFS_MAX_TENANT bytes. b has room for GAIAFS_MAX_FEATURES bytes.
 */
size_t gaiafs_put_features(uint8_t *b, uint64_t chosen, const char *tenant);
size_t gaiafs_put_answer(uint8_t *b, uint32_t errnum, uint64_t generation);
/* A bracket that has ended, and how often it was used without asking the daemon. */
struct gaiafs_ended {
	uint64_t bracket;
	uint32_t uses;
};
enum { GAIAFS_ENDED = 12 };
/*
 * gaiafs_put_ended encodes the answer to a RECALL: the ended brackets, and if uses is set their uses. b has room for 16
 * bytes, and GAIAFS_ENDED for each bracket. gaiafs_put_done encodes a DONE, without the uses if they are 0.
 */
size_t gaiafs_put_ended(uint8_t *b, const struct gaiafs_ended *ended, size_t n, bool uses);
size_t gaiafs_put_done(uint8_t *b, struct gaiafs_ended ended);
size_t gaiafs_put_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len, uint32_t arg);
size_t gaiafs_put_unmap(uint8_t *b, uint64_t mapping);
size_t gaiafs_put_large(uint8_t *b, uint64_t size);

/* A MAPVIEW has a head, a token for each file, and its segments. */
enum { GAIAFS_VIEW_HEAD = 48, GAIAFS_VIEW_SEGMENT = 40 };
size_t gaiafs_put_view(uint8_t *b, uint32_t device, uint32_t kind, const uint8_t uuid[GAIAFS_UUID], uint32_t flags,
		       uint32_t files, uint64_t align, uint32_t segments);
size_t gaiafs_put_segment(uint8_t *b, uint64_t off, uint64_t len, uint64_t stride, uint64_t count, uint32_t file);

/* The list of a group's ranges has a head, then the ranges. In an ACQUIREALL it follows the request's own fields. */
enum { GAIAFS_RANGES_HEAD = 8, GAIAFS_RANGE = 24 };
size_t gaiafs_put_ranges(uint8_t *b, uint32_t ranges);
size_t gaiafs_put_group_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len);
size_t gaiafs_put_acquire_all(uint8_t *b, uint64_t least, uint32_t milliseconds, uint32_t flags);
/* A USE has a head, then its ranges. */
enum { GAIAFS_USE_HEAD = 24, GAIAFS_USE_RANGE = 24, GAIAFS_MOST_RANGES = 1 << 16 };
size_t gaiafs_put_use(uint8_t *b, uint64_t bracket, uint32_t flags, uint32_t patience, uint32_t ranges);
size_t gaiafs_put_use_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len);

/*
 * Decoders return false for malformed bytes. From version 2 on, they ignore fields that a newer daemon adds at the end.
 */
bool gaiafs_get_header(const uint8_t *b, size_t n, struct gaiafs_header *h);
bool gaiafs_get_welcome(const uint8_t *body, size_t n, struct gaiafs_welcome *w);
bool gaiafs_get_mapped(const uint8_t *body, size_t n, unsigned version, struct gaiafs_mapped *m);
bool gaiafs_get_extents(const uint8_t *body, size_t n, unsigned version, struct gaiafs_extents *e);
bool gaiafs_get_move(const uint8_t *body, size_t n, struct gaiafs_move *m);
bool gaiafs_get_numbered(const uint8_t *body, size_t n, uint64_t *number);
bool gaiafs_get_result(const uint8_t *body, size_t n, struct gaiafs_result *r);
bool gaiafs_get_grant(const uint8_t *b, size_t n, struct gaiafs_grant *g);

#endif
