/* A connection: conn.c makes it, and call.c uses it. */
#ifndef GAIAFS_CONN_H
#define GAIAFS_CONN_H

#include "internal.h"

enum { CONNECTING, READY, LOST };

struct gaiafs_conn {
	struct gaiafs_welcome welcome;   /* immutable once READY */
	uint8_t *record;                 /* GAIAFS_MAX_FRAME bytes, the reading thread's */
	char socket[GAIAFS_SOCKET_PATH]; /* immutable */
	pthread_mutex_t lock;

	/* Held for a STATUS: a connection may run one at a time. Only lock is taken under it. */
	pthread_mutex_t looking;

	/* Guarded by gaiafs_table_lock. */
	int state;
	bool listed;
	unsigned refs;
	struct gaiafs_conn *next;
	bool served; /* a service connection was begun; service.c has it */
	int service; /* its socket; -1: none */

	/* Changed under gaiafs_table_lock and lock. Only the reading thread closes it, and reads it without a lock. */
	int fd; /* -1: closed */

	/* Guarded by lock. */
	struct gaiafs_request *calls; /* without a complete reply yet, in order of arrival */
	uint32_t running;             /* how many of them were sent and count toward the daemon's limit */
	uint32_t uses;                /* how many of those ask for brackets; atomic, as service.c reads it without lock */
	uint32_t abandoned;           /* how many of them nobody waits for */
	uint64_t last_id;
	bool reading;            /* a thread reads */
	bool full;               /* a request did not fit into the socket's buffer */
	bool pushing;            /* push is queued or runs, with a reference; it sends what did not fit */
	struct gaiafs_job push;
	bool sweeping;           /* one of the library's own threads waits for the replies of abandoned calls */
	uint32_t sweep;          /* that thread's futex */
	struct gaiafs_fail lost; /* errnum not 0: the connection is useless */
};

/*
 * gaiafs_hear waits for one frame of a socket, at most timeout milliseconds, or without limit if timeout is negative.
 * It puts the frame's bytes into record and its descriptors into fds. It returns 0 with gaiafs_fd_lock held, or an
 * errno without the lock. After ETIMEDOUT and EINTR the frame is still to come. Any signal handler causes EINTR;
 * without a timeout, only one that does not restart calls.
 */
int gaiafs_hear(int fd, uint8_t *record, int timeout, struct gaiafs_frame *frame, int fds[GAIAFS_MAX_EXTENTS],
		struct gaiafs_fail *f);
/*
 * gaiafs_look polls a socket for at most so many nanoseconds, if there are enough processors, and reports whether there
 * is something to receive. It stops early when *as_long_as is 0, unless as_long_as is NULL.
 */
bool gaiafs_look(int fd, long most, const uint32_t *as_long_as);
/* gaiafs_greet connects a socket to a daemon and does the handshake. It returns an errno. */
int gaiafs_greet(int fd, const char *path, uint8_t *record, struct gaiafs_welcome *w, struct gaiafs_fail *f);
/*
 * gaiafs_say sends one frame of at most GAIAFS_MAX_FEATURES bytes, without waiting. It returns an errno.
 * gaiafs_say_rest adds the rest of a body, if any.
 */
int gaiafs_say(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n);
int gaiafs_say_rest(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n, const struct gaiafs_rest *rest);
/* gaiafs_read_fail decodes the body of a RESULT or ERROR into *f. */
int gaiafs_read_fail(const struct gaiafs_frame *frame, struct gaiafs_fail *f);
/*
 * gaiafs_lose marks c useless, with the reason, and closes its socket. The daemon then frees what it had for this
 * process.
 */
void gaiafs_lose(struct gaiafs_conn *c, const struct gaiafs_fail *why);
void gaiafs_conn_ref(struct gaiafs_conn *c);
/* gaiafs_calls_free frees the calls that are left. c has no other user. */
void gaiafs_calls_free(struct gaiafs_conn *c);
/* A frame with descriptors that its request's thread has yet to take. */
struct gaiafs_parcel {
	struct gaiafs_parcel *next;       /* in the request's list; guarded by the connection's lock */
	struct gaiafs_parcel *up, **back; /* in the list of all parcels; guarded by gaiafs_fd_lock */
	struct gaiafs_frame frame;
	int fds[GAIAFS_MAX_EXTENTS];
	uint8_t body[];
};

/*
 * gaiafs_parcel_of copies a frame's body and takes its descriptors. The caller holds gaiafs_fd_lock. NULL: out of
 * memory, and the descriptors are closed.
 */
struct gaiafs_parcel *gaiafs_parcel_of(const struct gaiafs_frame *frame);
/* gaiafs_parcels_free frees a list of parcels, and closes their descriptors. */
void gaiafs_parcels_free(struct gaiafs_parcel *p);
/* gaiafs_parcels_after_fork closes the child's copies of the parcels' descriptors. The caller holds gaiafs_fd_lock. */
void gaiafs_parcels_after_fork(void);

#endif
