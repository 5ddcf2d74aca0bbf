/* Encodes and decodes frames. Pure functions. */
#include "wire.h"

#include <string.h>

static void put16(uint8_t *b, uint16_t v)
{
	b[0] = (uint8_t)v;
	b[1] = (uint8_t)(v >> 8);
}

static void put32(uint8_t *b, uint32_t v)
{
	put16(b, (uint16_t)v);
	put16(b + 2, (uint16_t)(v >> 16));
}

static void put64(uint8_t *b, uint64_t v)
{
	put32(b, (uint32_t)v);
	put32(b + 4, (uint32_t)(v >> 32));
}

static uint16_t get16(const uint8_t *b)
{
	return (uint16_t)(b[0] | (unsigned)b[1] << 8);
}

static uint32_t get32(const uint8_t *b)
{
	return get16(b) | (uint32_t)get16(b + 2) << 16;
}

static uint64_t get64(const uint8_t *b)
{
	return get32(b) | (uint64_t)get32(b + 4) << 32;
}

void gaiafs_put_header(uint8_t *b, uint16_t type, uint16_t flags, uint64_t id, size_t body)
{
	put32(b, (uint32_t)(GAIAFS_HEADER + body));
	put16(b + 4, type);
	put16(b + 6, flags);
	put64(b + 8, id);
}

size_t gaiafs_put_hello(uint8_t *b)
{
	put32(b, GAIAFS_HELLO_MAGIC);
	put16(b + 4, GAIAFS_MIN_VERSION);
	put16(b + 6, GAIAFS_MAX_VERSION);
	return 8;
}

size_t gaiafs_put_map(uint8_t *b, const uint8_t token[GAIAFS_TOKEN], uint32_t device, const uint8_t uuid[GAIAFS_UUID],
		      uint32_t prot, uint32_t flags, uint32_t kind, uint64_t off, uint64_t len)
{
	memcpy(b, token, GAIAFS_TOKEN);
	put32(b + 16, device);
	put32(b + 20, prot);
	put32(b + 24, flags);
	put32(b + 28, kind);
	put64(b + 32, off);
	put64(b + 40, len);
	memcpy(b + 48, uuid, GAIAFS_UUID);
	return 64;
}

size_t gaiafs_put_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len, uint32_t arg)
{
	put64(b, mapping);
	put64(b + 8, off);
	put64(b + 16, len);
	put32(b + 24, arg);
	put32(b + 28, 0);
	return 32;
}

size_t gaiafs_put_unmap(uint8_t *b, uint64_t mapping)
{
	put64(b, mapping);
	return 8;
}

size_t gaiafs_put_large(uint8_t *b, uint64_t size)
{
	put64(b, size);
	return 8;
}

size_t gaiafs_put_view(uint8_t *b, uint32_t device, uint32_t kind, const uint8_t uuid[GAIAFS_UUID], uint32_t flags,
		       uint32_t files, uint64_t align, uint32_t segments)
{
	put32(b, device);
	put32(b + 4, kind);
	memcpy(b + 8, uuid, GAIAFS_UUID);
	put32(b + 24, flags);
	put32(b + 28, files);
	put64(b + 32, align);
	put32(b + 40, segments);
	put32(b + 44, GAIAFS_VIEW_SEGMENT);
	return GAIAFS_VIEW_HEAD;
}

size_t gaiafs_put_segment(uint8_t *b, uint64_t off, uint64_t len, uint64_t stride, uint64_t count, uint32_t file)
{
	put64(b, off);
	put64(b + 8, len);
	put64(b + 16, stride);
	put64(b + 24, count);
	put32(b + 32, file);
	put32(b + 36, 0);
	return GAIAFS_VIEW_SEGMENT;
}

size_t gaiafs_put_use(uint8_t *b, uint64_t bracket, uint32_t flags, uint32_t patience, uint32_t ranges)
{
	put64(b, bracket);
	put32(b + 8, flags);
	put32(b + 12, patience);
	put32(b + 16, ranges);
	put32(b + 20, GAIAFS_USE_RANGE);
	return GAIAFS_USE_HEAD;
}

size_t gaiafs_put_use_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len)
{
	return gaiafs_put_group_range(b, mapping, off, len);
}

size_t gaiafs_put_ranges(uint8_t *b, uint32_t ranges)
{
	put32(b, ranges);
	put32(b + 4, GAIAFS_RANGE);
	return GAIAFS_RANGES_HEAD;
}

size_t gaiafs_put_group_range(uint8_t *b, uint64_t mapping, uint64_t off, uint64_t len)
{
	put64(b, mapping);
	put64(b + 8, off);
	put64(b + 16, len);
	return GAIAFS_RANGE;
}

size_t gaiafs_put_acquire_all(uint8_t *b, uint64_t least, uint32_t milliseconds, uint32_t flags)
{
	put64(b, least);
	put32(b + 8, milliseconds);
	put32(b + 12, flags);
	return 16;
}

size_t gaiafs_put_features(uint8_t *b, uint64_t chosen, const char *tenant)
{
	const size_t n = strlen(tenant);

	put64(b, chosen);
	put64(b + 8, n);
	memcpy(b + 16, tenant, n);
	return 16 + n;
}

size_t gaiafs_put_answer(uint8_t *b, uint32_t errnum, uint64_t generation)
{
	put32(b, errnum);
	put32(b + 4, 0);
	put64(b + 8, generation);
	return 16;
}

size_t gaiafs_put_ended(uint8_t *b, const struct gaiafs_ended *ended, size_t n, bool uses)
{
	size_t at = gaiafs_put_answer(b, 0, n);

	for (size_t i = 0; i < n; i++, at += 8)
		put64(b + at, ended[i].bracket);
	for (size_t i = 0; uses && i < n; i++, at += 4)
		put32(b + at, ended[i].uses);
	return at;
}

size_t gaiafs_put_done(uint8_t *b, struct gaiafs_ended ended)
{
	put64(b, ended.bracket);
	if (ended.uses == 0)
		return 8;
	put32(b + 8, ended.uses);
	put32(b + 12, 0);
	return 16;
}

static bool fits(size_t n, unsigned version, size_t wanted)
{
	return n == wanted || (version >= 2 && n > wanted);
}

bool gaiafs_get_header(const uint8_t *b, size_t n, struct gaiafs_header *h)
{
	if (n < GAIAFS_HEADER)
		return false;
	h->length = get32(b);
	h->type = get16(b + 4);
	h->flags = get16(b + 6);
	h->id = get64(b + 8);
	return h->length == n;
}

bool gaiafs_get_welcome(const uint8_t *body, size_t n, struct gaiafs_welcome *w)
{
	*w = (struct gaiafs_welcome){ 0 };
	if (n < 24)
		return false;
	w->version = get16(body);
	w->max_requests = get32(body + 4);
	w->kinds = get32(body + 16);
	if (w->version < GAIAFS_MIN_VERSION || w->version > GAIAFS_MAX_VERSION || w->max_requests == 0 ||
	    !fits(n, w->version, w->version < 2 ? 24 : 56))
		return false;
	if (w->version >= 2) {
		w->offered = get64(body + 24);
		w->required = get64(body + 32);
		memcpy(w->key, body + 40, GAIAFS_KEY);
	}
	return true;
}

bool gaiafs_get_mapped(const uint8_t *body, size_t n, unsigned version, struct gaiafs_mapped *m)
{
	if (!fits(n, version, 48))
		return false;
	m->mapping = get64(body);
	m->kind = get32(body + 8);
	m->device = get32(body + 12);
	m->size = (int64_t)get64(body + 16);
	m->extents = get32(body + 24);
	m->movable = version >= 2 && (get32(body + 28) & 1) != 0;
	memcpy(m->uuid, body + 32, GAIAFS_UUID);
	return true;
}

bool gaiafs_get_extents(const uint8_t *body, size_t n, unsigned version, struct gaiafs_extents *e)
{
	size_t head = version < 2 ? 8 : 16, stride = 16;

	if (n < head)
		return false;
	e->first = get32(body);
	e->count = get32(body + 4);
	if (version >= 2) {
		stride = get32(body + 8);
		if (stride < 32 || stride > GAIAFS_MAX_FRAME)
			return false;
	}
	if (e->count > GAIAFS_MAX_EXTENTS || !fits(n, version, head + stride * e->count))
		return false;
	for (uint32_t i = 0; i < e->count; i++) {
		const uint8_t *b = body + head + stride * i;

		e->place[i] = (struct gaiafs_place){ .off = (int64_t)get64(b), .size = (int64_t)get64(b + 8) };
		if (version >= 2) {
			e->place[i].kind = get32(b + 16);
			e->place[i].tier = get32(b + 20);
			e->place[i].generation = get64(b + 24);
		}
	}
	return true;
}

bool gaiafs_get_move(const uint8_t *body, size_t n, struct gaiafs_move *m)
{
	if (n < 48)
		return false;
	m->mapping = get64(body);
	m->extent = (struct gaiafs_place){ .off = (int64_t)get64(body + 8), .size = (int64_t)get64(body + 16),
					   .kind = get32(body + 40), .tier = get32(body + 44), .generation = get64(body + 32) };
	m->previous = get64(body + 24);
	return true;
}

bool gaiafs_get_numbered(const uint8_t *body, size_t n, uint64_t *number)
{
	if (n < 16)
		return false;
	*number = get64(body);
	return true;
}

bool gaiafs_get_result(const uint8_t *body, size_t n, struct gaiafs_result *r)
{
	if (n < 16)
		return false;
	r->errnum = get32(body);
	r->text_len = get32(body + 4);
	r->pages = (int64_t)get64(body + 8);
	r->text = (const char *)body + 16;
	return r->text_len == n - 16;
}

bool gaiafs_get_grant(const uint8_t *b, size_t n, struct gaiafs_grant *g)
{
	if (n != GAIAFS_GRANT_SIZE || get32(b) != UINT32_C(0x61696167) || get16(b + 4) != 1)
		return false;
	g->status = get16(b + 6) & 1;
	memcpy(g->token, b + 8, GAIAFS_TOKEN);
	memcpy(g->socket, b + 24, GAIAFS_SOCKET_PATH);
	return g->socket[0] != '\0' && memchr(g->socket, '\0', GAIAFS_SOCKET_PATH) != NULL;
}
