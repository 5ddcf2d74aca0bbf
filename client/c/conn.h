/* A connection as conn.c makes it and call.c uses it. */
#ifndef GAIAFS_CONN_H
#define GAIAFS_CONN_H

#include "internal.h"

enum { CONNECTING, READY, LOST };

struct gaiafs_conn {
	struct gaiafs_welcome welcome;   /* immutable once READY */
	uint8_t *record;                 /* GAIAFS_MAX_FRAME bytes, the reading thread's */
	char socket[GAIAFS_SOCKET_PATH]; /* immutable */
	pthread_mutex_t lock;

	/* held for a STATUS, of which a connection may run one; no other is taken under it but lock */
	pthread_mutex_t looking;

	/* Guarded by gaiafs_table_lock. */
	int state;
	bool listed;
	unsigned refs;
	struct gaiafs_conn *next;
	bool served; /* a service connection was begun; service.c has it */
	int service; /* its socket; -1: none */

	/* Changed under gaiafs_table_lock and lock together; the reading thread, which alone closes it, looks without. */
	int fd; /* -1: closed */

	/* Guarded by lock. */
	struct gaiafs_request *calls; /* whose reply is not complete, in the order in which they came */
	uint32_t running;             /* those of them that were sent */
	uint32_t abandoned;           /* those of them that nobody waits for */
	uint64_t last_id;
	bool reading;            /* a thread reads */
	bool sweeping;           /* a thread of the library's own waits for the replies of abandoned calls */
	uint32_t sweep;          /* its futex */
	struct gaiafs_fail lost; /* errnum not 0: of no use any more */
};

/* gaiafs_hear waits for one frame of a socket, at most timeout milliseconds; a negative timeout is none. It puts the
 * frame's bytes into record and its descriptors into fds, and returns 0 with gaiafs_fd_lock held, or an errno without.
 * ETIMEDOUT, or EINTR, after a signal's handler (without a timeout, only one that does not restart calls): the frame is
 * still to come. */
int gaiafs_hear(int fd, uint8_t *record, int timeout, struct gaiafs_frame *frame, int fds[GAIAFS_MAX_EXTENTS],
		struct gaiafs_fail *f);
/* gaiafs_greet connects a socket with a daemon and shakes hands. It returns an errno. */
int gaiafs_greet(int fd, const char *path, uint8_t *record, struct gaiafs_welcome *w, struct gaiafs_fail *f);
/* gaiafs_say sends one frame, of GAIAFS_MAX_FEATURES bytes at most, without waiting. It returns an errno.
   gaiafs_say_rest adds the rest of a body, if any. */
int gaiafs_say(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n);
int gaiafs_say_rest(int fd, uint16_t type, uint64_t id, const uint8_t *body, size_t n, const struct gaiafs_rest *rest);
/* gaiafs_read_fail decodes the body of a RESULT or ERROR into *f. */
int gaiafs_read_fail(const struct gaiafs_frame *frame, struct gaiafs_fail *f);
/* gaiafs_lose makes c useless, for the reason, and closes its socket: the daemon frees what it had for this process. */
void gaiafs_lose(struct gaiafs_conn *c, const struct gaiafs_fail *why);
void gaiafs_conn_ref(struct gaiafs_conn *c);
/* gaiafs_calls_free frees what nobody waits for any more. c has no other user. */
void gaiafs_calls_free(struct gaiafs_conn *c);
/* A frame with descriptors that waits for its request's thread. */
struct gaiafs_parcel {
	struct gaiafs_parcel *next;       /* of the request; guarded by the connection's lock */
	struct gaiafs_parcel *up, **back; /* in the list of all; guarded by gaiafs_fd_lock */
	struct gaiafs_frame frame;
	int fds[GAIAFS_MAX_EXTENTS];
	uint8_t body[];
};

/* gaiafs_parcel_of keeps a frame's body and descriptors, under gaiafs_fd_lock. NULL: there is no memory, and they are
 * closed. */
struct gaiafs_parcel *gaiafs_parcel_of(const struct gaiafs_frame *frame);
/* gaiafs_parcels_free frees a list of them, and closes what they have. */
void gaiafs_parcels_free(struct gaiafs_parcel *p);
/* gaiafs_parcels_after_fork closes the child's copies of descriptors on their way, under gaiafs_fd_lock. */
void gaiafs_parcels_after_fork(void);

#endif
