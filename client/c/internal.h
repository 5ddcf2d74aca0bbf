/*
 * What the parts of the library know of each other.
 *
 * Locks, in the order they are taken:
 *
 *	gaiafs_fd_lock     held while descriptors that arrive are put where a forked child finds and closes them
 *	gaiafs_table_lock  the table of mappings and the list of connections
 *	gaiafs_mapping.moving
 *	                   memory of a GPU that moves; taken before gaiafs_table_lock, and calls of libcuda are made
 *	                   under it
 *	gaiafs_conn.lock   the calls of one connection; what they send goes out under it, without waiting
 *	those of stream.c, work.c and cuda.c, each of which is held for a few instructions
 *
 * fork takes the first two, so that the child finds the table whole. The child closes its copies of the connections and
 * of descriptors, and leaks the few structures that threads it does not have were using.
 *
 * No call of libcuda is made under any other of them. The host functions of stream.c, which run in threads of CUDA's
 * and must wait for nobody, take the last ones only: they leave the work to a thread of work.c.
 */
#ifndef GAIAFS_INTERNAL_H
#define GAIAFS_INTERNAL_H

#include "gaiafs.h"
#include "kinds.h"
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
/* gaiafs_report makes *f this thread's last failure: errno and gaia_error. Where err is 0, the text of *f is what
 * gaia_note returns; NULL: nothing. */
void gaiafs_report(int err, const struct gaiafs_fail *f);

struct gaiafs_frame {
	struct gaiafs_header header;
	const uint8_t *body;
	size_t body_len;
	const int *fds; /* closed after take */
	size_t nfds;
	bool truncated; /* there were more descriptors than this process may have */
};

/* The rest of a body that is longer than GAIAFS_MAX_BODY: bytes behind it, or the whole in a memfd, whose size the body
 * says. */
struct gaiafs_rest {
	uint8_t *bytes;
	size_t n;
	int memfd; /* -1: none */
};

struct gaiafs_parcel;

/* A call in progress. */
struct gaiafs_request {
	/* take gets each frame of the reply. It returns 0, or an errno with fail filled in; the first failure counts, and
	 * the rest of the reply is still taken. */
	int (*take)(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
	/* take is called by the thread that made the request, under no lock, and may take its time. Otherwise the thread
	 * that happens to read calls it, under the connection's lock. */
	bool own;
	const struct gaiafs_rest *rest; /* of the body; the caller's while the call runs. NULL: none */
	struct gaiafs_fail fail; /* errnum 0: all well */

	/* call.c's, guarded by the connection's lock while the call runs. */
	uint16_t type;
	uint64_t id;
	uint8_t body[GAIAFS_MAX_BODY];
	size_t body_len;
	int state;
	uint32_t wake;                 /* a futex, for its thread */
	bool waiting;                  /* its thread waits there */
	bool abandoned;                /* nobody waits for it: a signal interrupted the call */
	bool mapped;                   /* the reply has a mapping, whose number follows */
	uint64_t mapping;
	uint64_t number;               /* that NUMBERED has, where take kept it */
	struct gaiafs_parcel *parcels; /* that take is to get, in order */
	struct gaiafs_request *next;
};

struct gaiafs_conn;

/*
 * gaiafs_conn_open returns this process's connection to a socket, which it makes where there is none, with a reference
 * for the caller. NULL: *f says why.
 */
struct gaiafs_conn *gaiafs_conn_open(const char *socket, struct gaiafs_fail *f);
void gaiafs_conn_unref(struct gaiafs_conn *c);
/* gaiafs_conn_kinds returns a bit, 1 << (kind - 1), for each kind of memory that the daemon has. */
uint32_t gaiafs_conn_kinds(const struct gaiafs_conn *c);
/* gaiafs_conn_version returns the version of the protocol that it speaks. */
unsigned gaiafs_conn_version(const struct gaiafs_conn *c);
/* gaiafs_conn_features returns the features that were chosen. */
uint64_t gaiafs_conn_features(const struct gaiafs_conn *c);
/* gaiafs_conn_may_map refuses to map where GAIAFS_TENANT is set and the daemon knows no tenants with names. It returns
 * an errno. */
int gaiafs_conn_may_map(const struct gaiafs_conn *c, struct gaiafs_fail *f);
/* gaiafs_conn_serve makes the connection's service connection, in the background, once. The process can do without. */
void gaiafs_conn_serve(struct gaiafs_conn *c);
/*
 * gaiafs_call sends a request and waits for its reply. It returns r->fail.errnum. EINTR: a signal's handler ran that
 * does not restart calls. Then what was asked for may happen all the same, but for a MAP, which is undone; an UNMAP
 * certainly happens.
 */
int gaiafs_call(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r);
/*
 * gaiafs_call_begin sends a request, or has it sent when there is room. It returns an errno; 0: r is to be waited for
 * by gaiafs_call_wait, which returns 0 once the reply is complete, with what came of it in r->fail. Until then it
 * returns ETIMEDOUT after timeout milliseconds (negative: never) and EINTR after a signal's handler: call it again.
 * gaiafs_call_abandon has nobody wait for it any more, and waits for nothing; r is from malloc, and freed when its
 * reply has come.
 */
int gaiafs_call_begin(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r);
int gaiafs_call_wait(struct gaiafs_conn *c, struct gaiafs_request *r, int timeout);
void gaiafs_call_abandon(struct gaiafs_conn *c, struct gaiafs_request *r);
/* gaiafs_tell sends a request that nobody waits for. */
void gaiafs_tell(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n);
/* gaiafs_simple is gaiafs_call for requests that one RESULT answers. */
int gaiafs_simple(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_fail *f);
/* gaiafs_call_long is gaiafs_call, and gaiafs_simple_long gaiafs_simple, for bodies of any length, which only LARGE
 * allows. */
int gaiafs_call_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_request *r);
int gaiafs_simple_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_fail *f);
/* gaiafs_take_simple is the take of requests that one RESULT answers, gaiafs_take_result takes a RESULT. */
int gaiafs_take_simple(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
int gaiafs_take_result(const struct gaiafs_frame *frame, struct gaiafs_fail *fail);

/* Work for a thread of the library's own. The job is its owner's again once run is called. */
struct gaiafs_job {
	void (*run)(struct gaiafs_job *j);
	struct gaiafs_job *next; /* work.c's */
};

/* gaiafs_start_thread starts a thread that no signal reaches. It returns an errno. Where started is NULL nobody waits
 * for the thread; otherwise the caller joins or detaches it. */
int gaiafs_start_thread(void *(*run)(void *), void *argument, pthread_t *started, struct gaiafs_fail *f);
/* gaiafs_prepare_work sees to it that there is a thread. It returns an errno. */
int gaiafs_prepare_work(struct gaiafs_fail *f);
/* gaiafs_post has a job run. It waits for nothing. */
void gaiafs_post(struct gaiafs_job *j);
void gaiafs_work_after_fork(void);

extern pthread_mutex_t gaiafs_fd_lock, gaiafs_table_lock;
/* gaiafs_generation counts the forks between the first process that used the library and this one; guarded by
 * gaiafs_table_lock. */
extern unsigned gaiafs_generation;
/* gaiafs_prepare_fork registers the fork handlers, once. It returns an errno. */
int gaiafs_prepare_fork(void);

struct gaiafs_mapping;
struct gaiafs_work;
/* A GPU as a mapping uses it. Only its kind looks into it. */
struct gaiafs_gpu;

/*
 * How the memory of one kind of device is mapped: begin, add for each extent in order, finish, which leaves m in the
 * table with its base; then leave, if m came into the table, and drop, also where one of the others failed or was not
 * called. int functions return 0, or an errno with *f filled in.
 */
struct gaiafs_kind {
	uint32_t number;
	/*
	 * Of GPUs. Each process numbers them for itself, and the daemon knows them by their UUIDs; all these are NULL where
	 * a device has the mount's number. open finds the GPU that this process counts as m->dev, makes it m->gpu, and
	 * where it is to be used sees to a context. drop gives back what it took; free only frees memory, also after fork.
	 */
	int (*open)(struct gaiafs_mapping *m, bool used, struct gaiafs_fail *f);
	const uint8_t *(*uuid)(const struct gaiafs_gpu *gpu);
	void (*free)(struct gaiafs_gpu *gpu);
	/*
	 * enqueue puts work into a stream of the GPU. *captured: the work is a graph's, which frees it, also where the call
	 * failed. Else *launched says whether it is the stream's, also where the call failed, and may have run already.
	 */
	int (*enqueue)(struct gaiafs_gpu *gpu, gaia_stream_t stream, struct gaiafs_work *w, bool *captured, bool *launched,
		       struct gaiafs_fail *f);
	/* after has call run after all work that was begun in a stream of the GPU. It must wait for nothing. EINVAL: the
	 * stream is being captured. */
	int (*after)(struct gaiafs_gpu *gpu, gaia_stream_t stream, void (*call)(void *), void *argument,
		     struct gaiafs_fail *f);
	/* mark has *event, which is made where it is NULL, stand for all work that was begun in a stream of the GPU.
	 * EINVAL: the stream is being captured. passed reports whether that is done; it waits for nothing. unmark frees the
	 * event, with wait once it is done. */
	int (*mark)(struct gaiafs_gpu *gpu, gaia_stream_t stream, void **event, struct gaiafs_fail *f);
	bool (*passed)(void *event);
	void (*unmark)(struct gaiafs_gpu *gpu, void *event, bool wait);
	/* lost: nothing that waits in a stream of the context will run any more; why is in *f. */
	bool (*lost)(void *context, struct gaiafs_fail *f);

	/* begin: the daemon made the mapping. addr is gaia_map's, and flags are those of mmap. */
	int (*begin)(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f);
	/* add takes an extent, with the part of the file that it is for. It keeps no descriptor. */
	int (*add)(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f);
	int (*finish)(struct gaiafs_mapping *m, void *addr, struct gaiafs_fail *f);
	/*
	 * move has an extent of a movable mapping from the memory of fd, or with -1 has nothing there. It keeps no
	 * descriptor. Where it fails, nothing is there. Of emulated memory it is called under gaiafs_table_lock, of a GPU's
	 * under m->moving.
	 */
	int (*move)(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f);
	/* leave: m leaves the table, under gaiafs_table_lock. */
	void (*leave)(struct gaiafs_mapping *m);
	/*
	 * drop gives back what m still has, once nothing that was begun uses it, in the process that made it only. With
	 * gently it disturbs no capture of a stream, and where it cannot wait so, it leaves the memory to the process's
	 * end.
	 */
	int (*drop)(struct gaiafs_mapping *m, bool gently, struct gaiafs_fail *f);
	/* quiesce waits for the work of a stream that was begun, or with GAIA_ALL_STREAMS of the whole context. */
	int (*quiesce)(struct gaiafs_mapping *m, gaia_stream_t stream, struct gaiafs_fail *f);
	/* read and write copy bytes between m's memory and that of the process, and return when they are there. */
	int (*read)(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
	int (*write)(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
	/* copies gives m, which has its size only, memory on the device of another mapping, with copies of that one's
	 * bytes, and adds it to the table. */
	int (*copies)(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list, size_t count,
		      struct gaiafs_fail *f);
};

/* gaiafs_kind_of returns NULL for a kind that this library cannot map. */
const struct gaiafs_kind *gaiafs_kind_of(uint32_t number);
/* gaiafs_kind_among returns that of the number, or with GAIA_KIND_ANY the first one among a daemon's kinds. NULL: none.
 * */
const struct gaiafs_kind *gaiafs_kind_among(int number, uint32_t kinds);
#define GAIAFS_DECLARE_KIND(name, NAME) extern const struct gaiafs_kind gaiafs_##name##_kind;
GAIAFS_KINDS(GAIAFS_DECLARE_KIND)
/* Memory that the daemon holds and this process does not map: addresses alone, for the calls. It is of no kind's
 * number. */
extern const struct gaiafs_kind gaiafs_held_kind;

/*
 * A word that a stream waits for. Its value only grows for those who wait: a wait for some value is over once that was
 * reached. So a word can be used again as soon as the last one that was to store into it has.
 */
struct gaiafs_word {
	uint32_t *at;    /* in memory that every GPU reads */
	uint32_t value;  /* that says "done"; one less says "not yet" */
	struct gaiafs_word *next;
	void (*done)(struct gaiafs_word *w); /* gives it back; it says "done" */
};

/*
 * Work for a stream: run is called with the work, once or, where a graph captured it, whenever and as often as that
 * runs. It must wait for nothing. Later work of the stream waits until the word says "done".
 */
struct gaiafs_work {
	void (*run)(void *work);
	void (*leave)(void *work); /* a graph is about to capture the work */
	void (*free)(void *work);  /* of captured work: no graph will run it any more */
	struct gaiafs_word *word;  /* NULL: not enqueued yet. The work's, which gives it back with its done */
	void *context;             /* of the stream, once known; atomic */
	bool captured;             /* immutable once enqueued */
};

/* The grant of an open file: the ioctl. Tests without a mount put something else here, before the first call. */
extern int (*gaiafs_request_grant)(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f);
extern int gaiafs_grant_patience; /* how many seconds it waits for the daemon; tests have less */

/* gaiafs_flush_kernel brings the stores of CPU programs that mapped the file home. *launder: the daemon has to see to
 * it, since this kernel does not wait. */
int gaiafs_flush_kernel(int fd, uint64_t off, uint64_t n, bool *launder, struct gaiafs_fail *f);

/* gaiafs_start_flush has the kernel begin with that, many pages at a time: a release that has it drop these pages would
 * write them one after another. Nothing waits for it, and no write error is used up that an fsync should report. */
void gaiafs_start_flush(int fd, uint64_t off, uint64_t n);
/* gaiafs_release_at_least compares a kernel release such as "6.1.0-13-amd64" with a version. */
bool gaiafs_release_at_least(const char *release, unsigned major, unsigned minor);

/* What only the mapping of a view has. */
struct gaiafs_view {
	const struct gaia_view_args *args; /* as asked for, while it is being mapped */
	uint32_t files;
	/* fd is a duplicate of the caller's descriptor. Of many files none is kept: fd is the caller's, and -1 later. */
	bool kept;
	struct gaiafs_view_file {
		int fd;
		uint64_t from, to;           /* what the segments have of the file lies in between; equal: nothing */
		uint8_t token[GAIAFS_TOKEN]; /* of the last grant */
	} file[];
};

/* A mapping: a window on a file, or a view. */
struct gaiafs_mapping {
	uint8_t *base;   /* immutable once in the table */
	uint64_t len;    /* as asked for; immutable */
	uint64_t size;   /* len in whole pages; immutable */
	uint64_t off;    /* in the file; of a view 0; immutable */
	uint64_t align;  /* of its address, a power of two; less than a page means a page; immutable */
	struct gaiafs_view *view; /* NULL: a window; immutable */
	bool writable;   /* immutable */
	bool movable;    /* memory comes with brackets, and moves; immutable once in the table */
	pthread_mutex_t moving; /* held while memory of a GPU moves, or goes for good */
	int dev;         /* immutable */
	uint64_t flags;  /* this library's flags, as asked for; immutable */
	int64_t home;    /* size of the file when it was mapped; negative: not known; immutable once in the table */
	int fd;          /* a duplicate of the caller's descriptor; -1: none; immutable */
	uint64_t id;     /* the daemon's number; immutable once ready */
	uint64_t serial; /* of no other mapping of this process; immutable once in the table */
	unsigned generation;            /* of the process that made it; immutable once in the table */
	const struct gaiafs_kind *kind; /* NULL: not known yet; immutable once in the table */
	const struct gaiafs_kind *of;   /* the kind of gpu, also where that is held only; NULL: there is none */
	struct gaiafs_conn *conn;       /* immutable once ready; NULL: memory of gaia_copies, which no daemon knows */
	struct gaiafs_gpu *gpu;         /* NULL where dev is no GPU */

	/* Guarded by gaiafs_table_lock. */
	bool ready;                  /* gaia_mmap has returned it */
	bool listed;                 /* in the table */
	unsigned refs;               /* calls that use it, and the table */
	struct gaiafs_later *queued; /* stream-ordered calls that are not done; m stays in the table meanwhile */
	struct gaiafs_fail late;     /* the first failure of one that nobody asked for yet; errnum 0: none */
};

static inline uint64_t gaiafs_whole_pages(uint64_t n)
{
	return (n + GAIAFS_PAGE - 1) & ~(uint64_t)(GAIAFS_PAGE - 1);
}

/* gaiafs_acquire and gaiafs_release ask the daemon, for a range within m. They do not wait for the device. */
int gaiafs_acquire(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f);
int gaiafs_release(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f);
/* gaiafs_find returns the mapping that has addr with a reference, or NULL with *f filled in. len fits into it. */
struct gaiafs_mapping *gaiafs_find(const void *addr, size_t len, struct gaiafs_fail *f);
/* gaiafs_check_device: ENODEV where dev is not the mapping's. */
int gaiafs_check_device(const struct gaiafs_mapping *m, int dev, struct gaiafs_fail *f);
/* gaiafs_enter and gaiafs_leave enclose every call: a thread that is cancelled in the middle would take locks along.
 * gaiafs_leave returns the call's result and, for a failure, sets errno last. */
void gaiafs_enter(int *state);
int gaiafs_leave(int state, int err, const struct gaiafs_fail *f);

/* gaiafs_later_pause lets time pass for the stream-ordered calls that keep a mapping, and gives up those of a context
 * that is lost. round counts from 0. False: a signal's handler ran. */
bool gaiafs_later_pause(const void *addr, unsigned round);
/* gaiafs_later_fail takes m's late failure, if it has one; an errno, or 0. */
int gaiafs_later_fail(struct gaiafs_mapping *m, struct gaiafs_fail *f);

/* A request about a range of a mapping, ready to be sent. */
struct gaiafs_ready {
	uint16_t type; /* 0: there is nothing to ask */
	uint8_t body[GAIAFS_MAX_BODY];
	size_t n;
};
/* gaiafs_prepare does what comes before one of the GAIA_DO_ requests, as gaia_start says, for a range within m. */
int gaiafs_prepare(struct gaiafs_mapping *m, int what, const void *addr, size_t len, int argument, gaia_stream_t stream,
		   struct gaiafs_ready *ready, struct gaiafs_fail *f);

/* gaiafs_mapping_new makes a mapping with a duplicate of the descriptor (-1: without one), and a reference for the
 * caller, which is the table's from gaiafs_table_ready on. NULL: *f says why. */
struct gaiafs_mapping *gaiafs_mapping_new(int fd, struct gaiafs_fail *f);
/* gaiafs_table_room_locked makes room for one mapping, 0 or ENOMEM; gaiafs_table_add_locked puts it in, not ready, with
 * its base and kind set; gaiafs_table_overlaps_locked finds out whether a range is another's. */
int gaiafs_table_room_locked(void);
void gaiafs_table_add_locked(struct gaiafs_mapping *m);
/* gaiafs_table_add is the first two, under the lock. */
int gaiafs_table_add(struct gaiafs_mapping *m, struct gaiafs_fail *f);
bool gaiafs_table_overlaps_locked(const void *addr, uint64_t n);
/* gaiafs_table_at_locked returns the ready mapping that has addr, or NULL. */
struct gaiafs_mapping *gaiafs_table_at_locked(const void *addr);
/* gaiafs_table_has reports whether the table has the mapping to which a daemon gave the number. */
bool gaiafs_table_has(const struct gaiafs_conn *c, uint64_t id);
/* gaiafs_table_numbered_locked returns the mapping to which a daemon gave the number, or NULL. */
struct gaiafs_mapping *gaiafs_table_numbered_locked(const struct gaiafs_conn *c, uint64_t id);
/* gaiafs_within begins a bracket of no thread's over a range of m, and gaiafs_without ends it. A mapping that does not
 * move needs none. */
int gaiafs_within(struct gaiafs_mapping *m, const void *addr, size_t len, uint64_t *bracket, struct gaiafs_fail *f);
void gaiafs_without(struct gaiafs_mapping *m, uint64_t bracket);
/* A bracket, and the request that is to be granted before it is open: none (m is NULL) where nothing moves, and where
 * the bracket joined one that is kept. */
struct gaiafs_bracket;
struct gaiafs_want {
	struct gaiafs_mapping *m; /* the bracket's */
	uint8_t *body;            /* from malloc; the caller's */
	size_t size;
};
/* gaiafs_bracket_of makes a bracket and the request for it. NULL: *f says why. gaiafs_bracket_open makes it the
 * thread's, keeps it where the daemon's answer allows that, and returns its number. gaiafs_take_use is the take of such
 * requests. */
struct gaiafs_bracket *gaiafs_bracket_of(const struct gaia_range *ranges, size_t n, gaia_stream_t stream,
	uint32_t patience, struct gaiafs_want *want, struct gaiafs_fail *f);
uint64_t gaiafs_bracket_open(struct gaiafs_bracket *b, const struct gaiafs_request *answered);
int gaiafs_take_use(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
/* gaiafs_bracket_end ends one that is no thread's: granted, or perhaps about to be. gaiafs_bracket_forget is for one
 * that was refused. Both free it. */
void gaiafs_bracket_end(struct gaiafs_bracket *b);
void gaiafs_bracket_forget(struct gaiafs_bracket *b);
/* A bracket that is kept. Each gaiafs_keep_find and gaiafs_keep that returns one is a user, until gaiafs_keep_done; a
 * user has a reference on the mapping of the first range. */
struct gaiafs_kept;
/* A range of a movable mapping. */
struct gaiafs_span {
	struct gaiafs_mapping *m;
	uint64_t off, len;
};
/* More ranges than these are not kept. */
enum { GAIAFS_MOST_SPANS = 256 };
/* gaiafs_keep_find returns the one of exactly these ranges, of which there is at least one, or NULL. */
struct gaiafs_kept *gaiafs_keep_find(const struct gaiafs_span *spans, size_t n);
/* gaiafs_keep keeps a bracket that the daemon allowed to keep. NULL: it is the caller's, as any other. */
struct gaiafs_kept *gaiafs_keep(uint64_t bracket, const struct gaiafs_span *spans, size_t n);
void gaiafs_keep_done(struct gaiafs_kept *k);
/* gaiafs_keep_mark has k be in use, also without users, until all work is done that was begun in the stream of a GPU.
 * EBUSY: it cannot; EINVAL: the stream is being captured. */
int gaiafs_keep_mark(struct gaiafs_kept *k, gaia_stream_t stream, struct gaiafs_fail *f);
/* gaiafs_keep_recall ends those of a connection that nobody uses, and stores the brackets that the daemon may take for
 * ended. It returns how many these are; most: there may be more. The others end by themselves. It waits for nothing. */
size_t gaiafs_keep_recall(const struct gaiafs_conn *c, uint64_t *brackets, size_t most);
/* gaiafs_keep_drop ends those that have a range of m, which has left the table, and waits for nothing. */
void gaiafs_keep_drop(const struct gaiafs_mapping *m);
void gaiafs_keep_after_fork(void);
/* gaiafs_table_after_fork has nothing of the parent's movable mappings be in the child. */
void gaiafs_table_after_fork(void);
/* gaiafs_move carries a MOVE out, with the descriptor, or -1, which stays the caller's. It returns an errno. */
int gaiafs_move(const struct gaiafs_conn *c, const struct gaiafs_move *move, int fd);
/* gaiafs_table_ready lets others find m. */
void gaiafs_table_ready(struct gaiafs_mapping *m);
/* gaiafs_table_find returns the ready mapping that has addr, with a reference, or NULL. *mine: this process made it and
 * not one that it was forked from. */
struct gaiafs_mapping *gaiafs_table_find(const void *addr, bool *mine);
/* gaiafs_table_take removes the ready mapping that begins at addr and has the size; its reference is the caller's.
 * *busy: there is one, and stream-ordered calls keep it. */
struct gaiafs_mapping *gaiafs_table_take(const void *addr, uint64_t size, bool *mine, bool *busy);
/* gaiafs_table_cancel removes m, which is not ready, if it is in the table. */
void gaiafs_table_cancel(struct gaiafs_mapping *m);
/* gaiafs_mapping_mine: this process made it, and not one that it was forked from. */
bool gaiafs_mapping_mine(const struct gaiafs_mapping *m);
/* gaiafs_mapping_forget_gpu frees what m knows of a GPU, and leaves the GPU alone. */
void gaiafs_mapping_forget_gpu(struct gaiafs_mapping *m);
/* gaiafs_mapping_unref gives a reference back; the last one closes the descriptor and leaves the connection. */
void gaiafs_mapping_unref(struct gaiafs_mapping *m);

/* gaiafs_read_args takes a structure of a program that was built with an older or a newer header: to has room bytes,
 * and had first when it was made. */
int gaiafs_read_args(void *to, size_t room, const void *given, size_t size, size_t first, struct gaiafs_fail *f);
/* gaiafs_check_args and gaiafs_check_file look at what can be known to be wrong before the daemon is asked. */
int gaiafs_check_args(const struct gaia_map_args *a, struct gaiafs_fail *f);
int gaiafs_check_file(int fd, int prot, struct gaiafs_fail *f);
/* gaiafs_map_it asks the daemon for m, a new mapping, and maps it. Whatever comes of it, m is the caller's no more. */
int gaiafs_map_it(struct gaiafs_mapping *m, const struct gaia_map_args *a, void **base, struct gaiafs_fail *f);
/* gaiafs_grant_file gets the grant of an open file. */
int gaiafs_grant_file(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f);

/* gaiafs_flush is gaiafs_flush_kernel for the bytes from at on of the mapping. */
int gaiafs_flush(const struct gaiafs_mapping *m, uint64_t at, uint64_t n, bool *launder, struct gaiafs_fail *f);
/* gaiafs_memfd_of puts a body that is larger than a frame where a daemon reads it. A child that is forked meanwhile
 * keeps a copy of the descriptor. It returns an errno. */
int gaiafs_memfd_of(const uint8_t *body, size_t n, int *memfd, struct gaiafs_fail *f);
/* gaiafs_view_grants gets the grants of a view's files. *g is that of the first. */
int gaiafs_view_grants(struct gaiafs_view *v, struct gaiafs_grant *g, struct gaiafs_fail *f);
/* gaiafs_view_call asks for a view on a device of a kind. */
int gaiafs_view_call(struct gaiafs_mapping *m, const uint8_t uuid[GAIAFS_UUID], int kind, uint32_t flags,
		     struct gaiafs_request *r);
/* gaiafs_view_mapped forgets what is the caller's, before others can find the mapping. */
void gaiafs_view_mapped(struct gaiafs_view *v);
void gaiafs_view_free(struct gaiafs_view *v);

#endif
