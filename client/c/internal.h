/*
 * What the parts of the library know of each other.
 *
 * Locks, in the order they are taken:
 *
 *	gaiafs_fd_lock     held from receiving descriptors until they are mapped and closed, so that a fork between the two
 *	                   gives none of them to the child
 *	gaiafs_table_lock  the table of mappings and the list of connections
 *	gaiafs_conn.lock   the calls of one connection
 *	gaiafs_conn.send   one frame at a time goes out; taken with no other lock held
 *
 * fork takes the first two, so that the child finds the table whole. The child closes its copies of the connections, and
 * leaks the few structures that threads it does not have were using.
 */
#ifndef GAIAFS_INTERNAL_H
#define GAIAFS_INTERNAL_H

#include "gaiafs.h"
#include "wire.h"

#include <pthread.h>

/* Why something failed: an errno and words. */
struct gaiafs_fail {
	int errnum;
	char text[GAIAFS_MAX_TEXT + 1];
};

#if defined(__GNUC__)
#define GAIAFS_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define GAIAFS_PRINTF(f, a)
#endif

/* gaiafs_failed fills in *f and returns errnum, which is not 0. */
int gaiafs_failed(struct gaiafs_fail *f, int errnum, const char *format, ...) GAIAFS_PRINTF(3, 4);
/* gaiafs_report makes *f this thread's last failure: errno and gaia_error. */
void gaiafs_report(const struct gaiafs_fail *f);

/* A call in progress. Its owner waits in gaiafs_call; whichever thread reads the connection meanwhile calls take. */
struct gaiafs_frame {
	struct gaiafs_header header;
	const uint8_t *body;
	size_t body_len;
	const int *fds; /* closed after take */
	size_t nfds;
};

struct gaiafs_request {
	/* take gets each frame of the reply, under gaiafs_fd_lock. It returns 0, or an errno with fail filled in; the first
	 * failure counts, and the rest of the reply is still taken. */
	int (*take)(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
	struct gaiafs_fail fail; /* errnum 0: all well */

	/* The connection's. */
	uint64_t id;
	bool done;
	pthread_cond_t wake;
	struct gaiafs_request *next;
};

struct gaiafs_conn;

/*
 * gaiafs_conn_open returns this process's connection to a socket, which it makes where there is none, with a reference for
 * the caller. NULL: *f says why.
 */
struct gaiafs_conn *gaiafs_conn_open(const char *socket, struct gaiafs_fail *f);
void gaiafs_conn_unref(struct gaiafs_conn *c);
/* gaiafs_call sends a request and waits for its reply. It returns r->fail.errnum. */
int gaiafs_call(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r);
/* gaiafs_simple is gaiafs_call for requests that one RESULT answers. */
int gaiafs_simple(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_fail *f);
/* gaiafs_take_result takes a RESULT. */
int gaiafs_take_result(const struct gaiafs_frame *frame, struct gaiafs_fail *fail);

extern pthread_mutex_t gaiafs_fd_lock, gaiafs_table_lock;
/* gaiafs_generation counts the forks between the first process that used the library and this one; guarded by
 * gaiafs_table_lock. */
extern unsigned gaiafs_generation;
/* gaiafs_prepare_fork registers the fork handlers, once. It returns an errno. */
int gaiafs_prepare_fork(void);

/* How the memory of one kind of device is mapped. The functions return 0 or an errno. */
struct gaiafs_kind {
	uint32_t number;
	/* reserve makes an address range of n bytes in which nothing can be touched; addr and flags are gaia_mmap's. */
	int (*reserve)(void *addr, size_t n, int flags, void **base);
	/* place puts n bytes of an extent, from byte from on, into a reserved range. It keeps no descriptor. */
	int (*place)(void *at, size_t n, bool writable, int fd, int64_t from);
	/* drop gives a whole range back. */
	int (*drop)(void *base, size_t n);
};

/* gaiafs_kind_of returns NULL for a kind that this library cannot map. */
const struct gaiafs_kind *gaiafs_kind_of(uint32_t number);

/* The grant of an open file: the ioctl. Tests without a mount put something else here, before the first call. */
extern int (*gaiafs_request_grant)(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f);

/* gaiafs_flush_kernel brings the stores of CPU programs that mapped the file home. *launder: the daemon has to see to it,
 * since this kernel does not wait. */
int gaiafs_flush_kernel(int fd, uint64_t off, uint64_t n, bool *launder, struct gaiafs_fail *f);
/* gaiafs_release_at_least compares a kernel release such as "6.1.0-13-amd64" with a version. */
bool gaiafs_release_at_least(const char *release, unsigned major, unsigned minor);

/* A mapping. */
struct gaiafs_mapping {
	uint8_t *base;   /* immutable once in the table */
	uint64_t len;    /* as asked for; immutable */
	uint64_t size;   /* len in whole pages; immutable */
	uint64_t off;    /* in the file; immutable */
	bool writable;   /* immutable */
	int dev;         /* immutable */
	int fd;          /* a duplicate of the caller's descriptor; immutable */
	uint64_t id;     /* the daemon's number; immutable once ready */
	unsigned generation;            /* of the process that made it; immutable */
	const struct gaiafs_kind *kind; /* immutable once in the table */
	struct gaiafs_conn *conn;       /* immutable once ready */

	bool ready;    /* gaia_mmap has returned it; guarded by gaiafs_table_lock */
	unsigned refs; /* calls that use it, and the table; guarded by gaiafs_table_lock */
};

/* gaiafs_mapping_new makes a mapping with a duplicate of the descriptor, and a reference for the caller, which is the
 * table's from gaiafs_table_ready on. NULL: *f says why. */
struct gaiafs_mapping *gaiafs_mapping_new(int fd, struct gaiafs_fail *f);
/* gaiafs_table_reserve reserves the address range of m and puts m into the table, not ready. m->kind is set. */
int gaiafs_table_reserve(struct gaiafs_mapping *m, void *addr, int flags);
/* gaiafs_table_ready lets others find m. */
void gaiafs_table_ready(struct gaiafs_mapping *m);
/* gaiafs_table_find returns the ready mapping that has addr, with a reference, or NULL. *mine: this process made it and
 * not one that it was forked from. */
struct gaiafs_mapping *gaiafs_table_find(const void *addr, bool *mine);
/* gaiafs_table_take removes the ready mapping that begins at addr and has the size; its reference is the caller's. */
struct gaiafs_mapping *gaiafs_table_take(const void *addr, uint64_t size, bool *mine);
/* gaiafs_table_cancel removes m, which is not ready, and gives its address range back. */
void gaiafs_table_cancel(struct gaiafs_mapping *m);
/* gaiafs_mapping_unref gives a reference back; the last one closes the descriptor and leaves the connection. */
void gaiafs_mapping_unref(struct gaiafs_mapping *m);

#endif
