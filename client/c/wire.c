/* Encoding and decoding of frames: bytes in, structures out, and nothing else. */
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

void gaiafs_put_header(uint8_t *b, uint16_t type, uint64_t id, size_t body)
{
	put32(b, (uint32_t)(GAIAFS_HEADER + body));
	put16(b + 4, type);
	put16(b + 6, 0);
	put64(b + 8, id);
}

size_t gaiafs_put_hello(uint8_t *b)
{
	put32(b, GAIAFS_HELLO_MAGIC);
	put16(b + 4, GAIAFS_VERSION);
	put16(b + 6, GAIAFS_VERSION);
	return 8;
}

size_t gaiafs_put_map(uint8_t *b, const uint8_t token[GAIAFS_TOKEN], uint32_t device, const uint8_t uuid[GAIAFS_UUID],
		      uint32_t prot, uint32_t flags, uint64_t off, uint64_t len)
{
	memcpy(b, token, GAIAFS_TOKEN);
	put32(b + 16, device);
	put32(b + 20, prot);
	put32(b + 24, flags);
	put32(b + 28, 0);
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
	if (n != 24)
		return false;
	w->version = get16(body);
	w->max_requests = get32(body + 4);
	w->kinds = get32(body + 16);
	return w->version == GAIAFS_VERSION && w->max_requests > 0;
}

bool gaiafs_get_mapped(const uint8_t *body, size_t n, struct gaiafs_mapped *m)
{
	if (n != 48)
		return false;
	m->mapping = get64(body);
	m->kind = get32(body + 8);
	m->device = get32(body + 12);
	m->size = (int64_t)get64(body + 16);
	m->extents = get32(body + 24);
	memcpy(m->uuid, body + 32, GAIAFS_UUID);
	return true;
}

bool gaiafs_get_extents(const uint8_t *body, size_t n, struct gaiafs_extents *e)
{
	if (n < 8)
		return false;
	e->first = get32(body);
	e->count = get32(body + 4);
	if (e->count > GAIAFS_MAX_EXTENTS || n != 8 + 16 * (size_t)e->count)
		return false;
	for (uint32_t i = 0; i < e->count; i++) {
		e->place[i].off = (int64_t)get64(body + 8 + 16 * (size_t)i);
		e->place[i].size = (int64_t)get64(body + 16 + 16 * (size_t)i);
	}
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
