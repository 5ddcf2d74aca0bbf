/*
 * Declarations that the parts of the library share.
 *
 * Locks, in the order they are taken:
 *
 *	gaiafs_fd_lock     held while received descriptors are stored where a forked child finds and closes them
 *	watching           kept brackets that kernels still use; held during calls of libcuda that do not wait
 *	gaiafs_table_lock  the table of mappings and the list of connections
 *	gaiafs_mapping.moving
 *	                   GPU memory that moves; taken before gaiafs_table_lock, and held during calls of libcuda
 *	gaiafs_conn.lock   the calls of one connection; frames are sent under it, without waiting
 *	those of stream.c, work.c and cuda.c, each of which is held for a few instructions
 *
 * fork takes the first two, so the child finds the table consistent. The child closes its copies of the connections and
 * descriptors. It leaks the few structures that the parent's other threads were using.
 *
 * Except for watching and gaiafs_mapping.moving, no lock is held during a call of libcuda. The host functions of
 * stream.c run in threads of CUDA and must not wait for anybody. They take only the last locks, and leave the work to a
 * thread of work.c.
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
/*
 * gaiafs_report makes *f this thread's last failure: errno and gaia_error. If err is 0, gaia_note returns the text of
 * *f; NULL means no note.
 */
void gaiafs_report(int err, const struct gaiafs_fail *f);

struct gaiafs_frame {
	struct gaiafs_header header;
	const uint8_t *body;
	size_t body_len;
	const int *fds; /* closed after take */
	size_t nfds;
	bool truncated; /* this process could not take all descriptors */
};

/*
 * The rest of a body that is longer than GAIAFS_MAX_BODY: bytes that follow it, or the whole body in a memfd. The
 * frame's body then gives the memfd's size.
 */
struct gaiafs_rest {
	uint8_t *bytes;
	size_t n;
	int memfd; /* -1: none */
};

struct gaiafs_parcel;

/* A call in progress. */
struct gaiafs_request {
	/*
	 * take gets each frame of the reply. It returns 0, or an errno with fail filled in. The first failure counts; take
	 * still gets the rest of the reply.
	 */
	int (*take)(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
	/*
	 * If own is set, the thread that made the request calls take, under no lock, and take may be slow. Otherwise the
	 * thread that reads calls it, under the connection's lock.
	 */
	bool own;
	const struct gaiafs_rest *rest; /* of the body; the caller's while the call runs. NULL: none */
	struct gaiafs_fail fail; /* errnum 0: success */

	/* Owned by call.c; guarded by the connection's lock while the call runs. */
	uint16_t type;
	uint64_t id;
	uint8_t body[GAIAFS_MAX_BODY];
	size_t body_len;
	int state;
	uint32_t wake;                 /* the futex of its thread */
	bool waiting;                  /* its thread waits there */
	bool abandoned;                /* nobody waits for it: a signal interrupted the call */
	bool mapped;                   /* the reply has a mapping, whose number follows */
	uint64_t mapping;
	uint64_t number;               /* from NUMBERED, if take kept it */
	int64_t begun;                 /* in milliseconds; 0 once stderr has it that the daemon is stopped */
	struct gaiafs_parcel *parcels; /* still to be taken, in order */
	struct gaiafs_request *next;
};

struct gaiafs_conn;

/*
 * gaiafs_conn_open returns this process's connection to a socket, with a reference for the caller. It makes the
 * connection if there is none. NULL: *f says why.
 */
struct gaiafs_conn *gaiafs_conn_open(const char *socket, struct gaiafs_fail *f);
void gaiafs_conn_unref(struct gaiafs_conn *c);
/* gaiafs_conn_kinds returns a bit, 1 << (kind - 1), for each kind of memory that the daemon has. */
uint32_t gaiafs_conn_kinds(const struct gaiafs_conn *c);
/* gaiafs_conn_version returns the protocol version of the connection. */
unsigned gaiafs_conn_version(const struct gaiafs_conn *c);
/* gaiafs_conn_features returns the chosen features. */
uint64_t gaiafs_conn_features(const struct gaiafs_conn *c);
/* gaiafs_conn_may_map fails if GAIAFS_TENANT is set and the daemon has no named tenants. It returns an errno. */
int gaiafs_conn_may_map(const struct gaiafs_conn *c, struct gaiafs_fail *f);
/*
 * gaiafs_conn_serve makes the connection's service connection, once, in the background. A failure is ignored: the
 * process works without it.
 */
void gaiafs_conn_serve(struct gaiafs_conn *c);
/*
 * gaiafs_call sends a request and waits for its reply. It returns r->fail.errnum. EINTR: a signal handler ran that does
 * not restart calls. The daemon may still carry out the request. An interrupted MAP is undone, and an interrupted UNMAP
 * is certain to happen.
 */
int gaiafs_call(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r);
/*
 * gaiafs_call_begin sends a request, or queues it until there is room. It returns an errno. After 0, wait for r with
 * gaiafs_call_wait, which returns 0 once the reply is complete; r->fail then has the result. Until then it returns
 * ETIMEDOUT after timeout milliseconds (negative: never) and EINTR after a signal handler: call it again.
 * gaiafs_call_abandon gives the request up and does not wait. An UNMAP or DONE that was not sent yet is still sent. r
 * must be from malloc; it is freed when its reply has come.
 */
int gaiafs_call_begin(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_request *r);
int gaiafs_call_wait(struct gaiafs_conn *c, struct gaiafs_request *r, int timeout);
void gaiafs_call_abandon(struct gaiafs_conn *c, struct gaiafs_request *r);
/* gaiafs_tell sends a request that nobody waits for. */
void gaiafs_tell(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n);
/* gaiafs_simple is gaiafs_call for requests that one RESULT answers. */
int gaiafs_simple(struct gaiafs_conn *c, uint16_t type, const uint8_t *body, size_t n, struct gaiafs_fail *f);
/*
 * gaiafs_call_long and gaiafs_simple_long are gaiafs_call and gaiafs_simple for bodies of any length. Only the feature
 * LARGE allows the longest ones.
 */
int gaiafs_call_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_request *r);
int gaiafs_simple_long(struct gaiafs_conn *c, uint16_t type, uint8_t *all, size_t n, struct gaiafs_fail *f);
/* gaiafs_take_simple is the take of requests that one RESULT answers. gaiafs_take_result decodes a RESULT. */
int gaiafs_take_simple(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
int gaiafs_take_result(const struct gaiafs_frame *frame, struct gaiafs_fail *fail);

/* Work for one of the library's own threads. Once run is called, the job belongs to its owner again. */
struct gaiafs_job {
	void (*run)(struct gaiafs_job *j);
	struct gaiafs_job *next; /* work.c's */
};

/*
 * gaiafs_start_thread starts a thread with all signals blocked. It returns an errno. If started is NULL the thread is
 * detached; otherwise the caller joins or detaches it.
 */
int gaiafs_start_thread(void *(*run)(void *), void *argument, pthread_t *started, struct gaiafs_fail *f);
/* gaiafs_prepare_work makes sure that there is a thread for jobs. It returns an errno. */
/* gaiafs_prepare_work sees to it that there is a thread. It returns an errno. */
int gaiafs_prepare_work(struct gaiafs_fail *f);
/* gaiafs_post queues a job. It does not wait. */
void gaiafs_post(struct gaiafs_job *j);
void gaiafs_work_after_fork(void);

extern pthread_mutex_t gaiafs_fd_lock, gaiafs_table_lock;
/*
 * gaiafs_generation counts the forks between this process and the first one that used the library. Guarded by
 * gaiafs_table_lock.
 */
extern unsigned gaiafs_generation;
/* gaiafs_prepare_fork registers the fork handlers, once. It returns an errno. */
int gaiafs_prepare_fork(void);

struct gaiafs_mapping;
struct gaiafs_work;
/* A GPU as a mapping uses it. Only the functions of its kind look into it. */
struct gaiafs_gpu;

/*
 * How the memory of one kind of device is mapped. The calls are begin, add for each extent in order, and finish, which
 * leaves m in the table with its base. Later come leave, if m came into the table, and drop, in any case: even if one
 * of the others failed or was not called. int functions return 0, or an errno with *f filled in.
 */
struct gaiafs_kind {
	uint32_t number;
	/*
	 * For GPUs. Each process numbers them for itself; the daemon knows them by UUID. All of these are NULL for kinds
	 * whose devices have the mount's numbers. open finds the GPU that this process counts as m->dev and stores it as
	 * m->gpu. If the memory will be used here, open also gets a context. drop gives back what open took; free only
	 * frees memory, even after fork.
	 */
	int (*open)(struct gaiafs_mapping *m, bool used, struct gaiafs_fail *f);
	const uint8_t *(*uuid)(const struct gaiafs_gpu *gpu);
	void (*free)(struct gaiafs_gpu *gpu);
	/*
	 * enqueue puts work into a stream of the GPU. If it sets *captured, a graph owns the work and frees it, even if the
	 * call failed. Otherwise *launched says whether the stream owns the work, even if the call failed; the work may
	 * have run already.
	 */
	int (*enqueue)(struct gaiafs_gpu *gpu, gaia_stream_t stream, struct gaiafs_work *w, bool *captured, bool *launched,
		       struct gaiafs_fail *f);
	/*
	 * after calls call once all work that was begun in a stream of the GPU is done. call must not wait. EINVAL: the
	 * stream is being captured.
	 */
	int (*after)(struct gaiafs_gpu *gpu, gaia_stream_t stream, void (*call)(void *), void *argument,
		     struct gaiafs_fail *f);
	/*
	 * stream_number gives a stream a number that no other stream of the process has, now or later; a handle may stand
	 * for several. mark makes *event stand for all work that was begun in a stream of the GPU; it creates the event if
	 * *event is NULL. EINVAL: the stream is being captured. passed reports whether that work is done, or will never be
	 * because the context has failed. It does not wait. unmark frees the event; with wait it waits for the work first.
	 */
	int (*stream_number)(struct gaiafs_gpu *gpu, gaia_stream_t stream, uint64_t *number, struct gaiafs_fail *f);
	int (*mark)(struct gaiafs_gpu *gpu, gaia_stream_t stream, void **event, struct gaiafs_fail *f);
	bool (*passed)(void *event);
	void (*unmark)(struct gaiafs_gpu *gpu, void *event, bool wait);
	/* lost reports whether the context has failed, so that nothing queued in its streams will run; *f says why. */
	bool (*lost)(void *context, struct gaiafs_fail *f);

	/* begin runs when the daemon has made the mapping. addr is from gaia_map; flags are those of mmap. */
	int (*begin)(struct gaiafs_mapping *m, void *addr, int flags, struct gaiafs_fail *f);
	/* add takes an extent and its part of the file. It does not keep the descriptor. */
	int (*add)(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f);
	int (*finish)(struct gaiafs_mapping *m, void *addr, struct gaiafs_fail *f);
	/*
	 * move maps the memory of fd in place of an extent of a movable mapping; with fd -1 it leaves a hole. It does not
	 * keep the descriptor. If it fails, the place is a hole. It is called under gaiafs_table_lock for emulated memory,
	 * and under m->moving for a GPU's.
	 */
	int (*move)(struct gaiafs_mapping *m, const struct gaiafs_place *extent, int fd, struct gaiafs_fail *f);
	/* leave runs when m leaves the table, under gaiafs_table_lock. */
	void (*leave)(struct gaiafs_mapping *m);
	/*
	 * drop waits until no begun work uses m, then gives back what m still has. Only the process that made m calls it.
	 * With gently it ends no stream capture; if it cannot wait without ending one, it keeps the memory until the
	 * process ends.
	 */
	int (*drop)(struct gaiafs_mapping *m, bool gently, struct gaiafs_fail *f);
	/* quiesce waits for work that was begun in a stream, or in the whole context with GAIA_ALL_STREAMS. */
	int (*quiesce)(struct gaiafs_mapping *m, gaia_stream_t stream, struct gaiafs_fail *f);
	/* read and write copy bytes between m's memory and the process's. When they return, the bytes are there. */
	int (*read)(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
	int (*write)(struct gaiafs_mapping *m, void *to, const void *from, size_t n, struct gaiafs_fail *f);
	/*
	 * copies allocates memory on of's device for m, which has only its size. It copies bytes of of into it, and adds m
	 * to the table.
	 */
	int (*copies)(struct gaiafs_mapping *m, const struct gaiafs_mapping *of, const struct gaia_copy *list, size_t count,
		      struct gaiafs_fail *f);
};

/* gaiafs_kind_of returns NULL for a kind that this library cannot map. */
const struct gaiafs_kind *gaiafs_kind_of(uint32_t number);
/*
 * gaiafs_kind_among returns the kind with the number, or with GAIA_KIND_ANY the first among the daemon's kinds. NULL:
 * the daemon does not have it.
 */
const struct gaiafs_kind *gaiafs_kind_among(int number, uint32_t kinds);
#define GAIAFS_DECLARE_KIND(name, NAME) extern const struct gaiafs_kind gaiafs_##name##_kind;
GAIAFS_KINDS(GAIAFS_DECLARE_KIND)
/*
 * Memory that the daemon holds and this process does not map: addresses alone, to name it in calls. It has no number.
 */
extern const struct gaiafs_kind gaiafs_held_kind;

/*
 * A word in memory that a stream waits for. Its value only grows, and a wait ends once its value was reached. So a word
 * can be reused as soon as its last user has stored into it.
 */
struct gaiafs_word {
	uint32_t *at;    /* in memory that every GPU reads */
	uint32_t value;  /* means "done"; one less means "not yet" */
	struct gaiafs_word *next;
	void (*done)(struct gaiafs_word *w); /* stores "done", and gives the word back */
};

/*
 * Work for a stream. run is called once with the work or, if a graph captured it, each time that the graph runs it. It
 * must not wait. Later work of the stream waits until the word says "done".
 */
struct gaiafs_work {
	void (*run)(void *work);
	void (*leave)(void *work); /* a graph is about to capture the work */
	void (*free)(void *work);  /* frees captured work that no graph will run any more */
	struct gaiafs_word *word;  /* the work's own; it gives the word back with word->done. NULL: not enqueued yet */
	void *context;             /* the stream's, once known; atomic */
	bool captured;             /* immutable once enqueued */
};

/* gaiafs_state_of returns a process's state letter in /proc/PID/stat, or 0 if there is no such process. */
char gaiafs_state_of(const char *pid);
/* Gets the grant of an open file, by ioctl. Tests without a mount replace it before the first call. */
extern int (*gaiafs_request_grant)(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f);
extern int gaiafs_grant_patience; /* seconds that it waits for the daemon; tests set fewer */

/*
 * gaiafs_flush_kernel writes what CPU programs stored by mmap into the file home. If it sets *launder, this kernel does
 * not wait for the write, and the daemon must.
 */
int gaiafs_flush_kernel(int fd, uint64_t off, uint64_t n, bool *launder, struct gaiafs_fail *f);

/*
 * gaiafs_start_flush makes the kernel start that write, many pages at a time. Without it, a release that drops these
 * pages would write them one by one. It does not wait, and it consumes no write error that an fsync should report.
 */
void gaiafs_start_flush(int fd, uint64_t off, uint64_t n);
/* gaiafs_release_at_least compares a kernel release such as "6.1.0-13-amd64" with a version. */
bool gaiafs_release_at_least(const char *release, unsigned major, unsigned minor);

/* The part of a mapping that only views have. */
struct gaiafs_view {
	const struct gaia_view_args *args; /* the caller's, while the view is being mapped */
	uint32_t files;
	/*
	 * kept: each fd is a duplicate of the caller's descriptor. A view of many files keeps none: fd is the caller's, and
	 * later -1.
	 */
	bool kept;
	struct gaiafs_view_file {
		int fd;
		uint64_t from, to;           /* the segments of this file lie in between; equal: there are none */
		uint8_t token[GAIAFS_TOKEN]; /* from the last grant */
	} file[];
};

/* A mapping of a part of a file, or a view. */
struct gaiafs_mapping {
	uint8_t *base;   /* immutable once in the table */
	uint64_t len;    /* as asked for; immutable */
	uint64_t size;   /* len in whole pages; immutable */
	uint64_t off;    /* in the file; 0 for a view; immutable */
	uint64_t align;  /* of its address, a power of two; less than a page means a page; immutable */
	struct gaiafs_view *view; /* NULL: not a view; immutable */
	bool writable;   /* immutable */
	bool movable;    /* has memory in brackets only, and the memory moves; immutable once in the table */
	pthread_mutex_t moving; /* held while GPU memory moves, or goes for good */
	int dev;         /* immutable */
	uint64_t flags;  /* this library's flags, as asked for; immutable */
	int64_t home;    /* size of the file when it was mapped; negative: not known; immutable once in the table */
	int fd;          /* a duplicate of the caller's descriptor; -1: none; immutable */
	uint64_t id;     /* the daemon's number; immutable once ready */
	uint64_t serial; /* unique among the mappings of this process; immutable once in the table */
	unsigned generation;            /* of the process that made it; immutable once in the table */
	const struct gaiafs_kind *kind; /* NULL: not known yet; immutable once in the table */
	const struct gaiafs_kind *of;   /* the kind of gpu, even if kind is gaiafs_held_kind; NULL: dev is no GPU */
	struct gaiafs_conn *conn;       /* immutable once ready; NULL: memory of gaia_copies, unknown to the daemon */
	struct gaiafs_gpu *gpu;         /* NULL: dev is no GPU */

	/* Guarded by gaiafs_table_lock. */
	bool ready;                  /* gaia_mmap has returned it */
	bool listed;                 /* in the table */
	unsigned refs;               /* the calls that use it, and the table */
	struct gaiafs_later *queued; /* unfinished stream-ordered calls; they keep m in the table */
	struct gaiafs_fail late;     /* the first failure of such a call that was not reported yet; errnum 0: none */
};

static inline uint64_t gaiafs_whole_pages(uint64_t n)
{
	return (n + GAIAFS_PAGE - 1) & ~(uint64_t)(GAIAFS_PAGE - 1);
}

/* gaiafs_acquire and gaiafs_release send the request for a range within m. They do not wait for work on the device. */
int gaiafs_acquire(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f);
int gaiafs_release(struct gaiafs_mapping *m, const void *addr, size_t len, struct gaiafs_fail *f);
/* gaiafs_find returns the mapping that contains the len bytes at addr, with a reference, or NULL with *f filled in. */
struct gaiafs_mapping *gaiafs_find(const void *addr, size_t len, struct gaiafs_fail *f);
/* gaiafs_check_device fails with ENODEV if dev is not the mapping's device. */
int gaiafs_check_device(const struct gaiafs_mapping *m, int dev, struct gaiafs_fail *f);
/*
 * gaiafs_enter and gaiafs_leave enclose every call: they disable cancellation, because a cancelled thread would keep
 * its locks. gaiafs_leave returns the call's result and, after a failure, sets errno last.
 */
void gaiafs_enter(int *state);
int gaiafs_leave(int state, int err, const struct gaiafs_fail *f);

/*
 * gaiafs_later_pause sleeps briefly while stream-ordered calls keep a mapping, and gives up the calls of a lost
 * context. round counts from 0. False: a signal handler ran.
 */
bool gaiafs_later_pause(const void *addr, unsigned round);
/* gaiafs_later_fail takes m's late failure, if it has one. It returns an errno, or 0. */
int gaiafs_later_fail(struct gaiafs_mapping *m, struct gaiafs_fail *f);

/* A request about a range of a mapping, ready to be sent. */
struct gaiafs_ready {
	uint16_t type; /* 0: nothing to send */
	uint8_t body[GAIAFS_MAX_BODY];
	size_t n;
};
/*
 * gaiafs_prepare does everything before one of the GAIA_DO_ requests is sent, as gaia_start says, for a range within m.
 */
int gaiafs_prepare(struct gaiafs_mapping *m, int what, const void *addr, size_t len, int argument, gaia_stream_t stream,
		   struct gaiafs_ready *ready, struct gaiafs_fail *f);

/*
 * gaiafs_duplicate duplicates a descriptor that a mapping keeps. It takes a number that select(2) cannot use, if the
 * process may have one, and so leaves the low numbers to the program. It returns -1 on failure.
 */
int gaiafs_duplicate(int fd);
/*
 * gaiafs_mapping_new makes a mapping with a duplicate of the descriptor (-1: without one), and a reference for the
 * caller. From gaiafs_table_ready on, that reference is the table's. NULL: *f says why.
 */
struct gaiafs_mapping *gaiafs_mapping_new(int fd, struct gaiafs_fail *f);
/*
 * gaiafs_table_room_locked makes room for one mapping; it returns 0 or ENOMEM. gaiafs_table_add_locked adds m, not yet
 * ready, with its base and kind set. gaiafs_table_overlaps_locked reports whether a range overlaps a mapping.
 */
int gaiafs_table_room_locked(void);
void gaiafs_table_add_locked(struct gaiafs_mapping *m);
/* gaiafs_table_add makes room and adds m; it takes the lock. */
int gaiafs_table_add(struct gaiafs_mapping *m, struct gaiafs_fail *f);
bool gaiafs_table_overlaps_locked(const void *addr, uint64_t n);
/* gaiafs_table_at_locked returns the ready mapping that contains addr, or NULL. */
struct gaiafs_mapping *gaiafs_table_at_locked(const void *addr);
/* gaiafs_table_has reports whether the table has the mapping with this number of the daemon's. */
bool gaiafs_table_has(const struct gaiafs_conn *c, uint64_t id);
/* gaiafs_table_numbered_locked returns the mapping with this number of the daemon's, or NULL. */
struct gaiafs_mapping *gaiafs_table_numbered_locked(const struct gaiafs_conn *c, uint64_t id);
/*
 * gaiafs_within begins a bracket over a range of m that belongs to no thread; gaiafs_without ends it. A mapping that
 * does not move needs none.
 */
int gaiafs_within(struct gaiafs_mapping *m, const void *addr, size_t len, uint64_t *bracket, struct gaiafs_fail *f);
void gaiafs_without(struct gaiafs_mapping *m, uint64_t bracket);
/* gaiafs_tell_done tells the daemon of m that a bracket has ended. */
void gaiafs_tell_done(struct gaiafs_mapping *m, struct gaiafs_ended ended);
/*
 * A bracket, and the request that the daemon must grant before the bracket is open. If nothing moves, or if the bracket
 * joined a kept one, there is no request (m is NULL).
 */
struct gaiafs_bracket;
struct gaiafs_want {
	struct gaiafs_mapping *m; /* the bracket's */
	uint8_t *body;            /* from malloc; the caller's */
	size_t size;
};
/*
 * gaiafs_bracket_of makes a bracket and the request for it. NULL: *f says why. gaiafs_bracket_open makes the bracket
 * the thread's, keeps it if the daemon's answer allows that, and returns its number. gaiafs_take_use is the take of
 * such requests.
 */
struct gaiafs_bracket *gaiafs_bracket_of(const struct gaia_range *ranges, size_t n, gaia_stream_t stream,
	uint32_t patience, struct gaiafs_want *want, struct gaiafs_fail *f);
uint64_t gaiafs_bracket_open(struct gaiafs_bracket *b, const struct gaiafs_request *answered);
int gaiafs_take_use(struct gaiafs_request *r, const struct gaiafs_frame *frame, struct gaiafs_fail *fail);
/*
 * gaiafs_bracket_end ends a bracket that no thread owns; it is granted, or may yet be. gaiafs_bracket_forget is for a
 * refused bracket. Both free it.
 */
void gaiafs_bracket_end(struct gaiafs_bracket *b);
void gaiafs_bracket_forget(struct gaiafs_bracket *b);
/*
 * A kept bracket. Each successful gaiafs_keep_find or gaiafs_keep adds a user, until gaiafs_keep_done. A user has a
 * reference on the mapping of the first range.
 */
struct gaiafs_kept;
/* A range of a movable mapping. */
struct gaiafs_span {
	struct gaiafs_mapping *m;
	uint64_t off, len;
};
/* Brackets with more ranges than this are not kept. */
enum { GAIAFS_MOST_SPANS = 256 };
/* gaiafs_keep_find returns the kept bracket of exactly these ranges, or NULL. n is at least 1. */
struct gaiafs_kept *gaiafs_keep_find(const struct gaiafs_span *spans, size_t n);
/* gaiafs_keep keeps a bracket that the daemon allows to keep. NULL: it stays an ordinary bracket of the caller's. */
struct gaiafs_kept *gaiafs_keep(uint64_t bracket, const struct gaiafs_span *spans, size_t n);
void gaiafs_keep_done(struct gaiafs_kept *k);
/*
 * gaiafs_keep_mark keeps k in use, even without users, until all work that was begun in a stream of a GPU is done.
 * EBUSY: there is no free mark. EINVAL: the stream is being captured. ENOTSUP: the driver is too old.
 */
int gaiafs_keep_mark(struct gaiafs_kept *k, gaia_stream_t stream, struct gaiafs_fail *f);
/*
 * gaiafs_keep_recall ends a connection's kept brackets that have no users. It stores those that the daemon may regard
 * as ended, and returns their number. If that is most, there may be more. The other brackets end by themselves. It does
 * not wait.
 */
size_t gaiafs_keep_recall(const struct gaiafs_conn *c, struct gaiafs_ended *ended, size_t most);
/*
 * gaiafs_keep_drop ends the kept brackets that have a range of m, which has left the table, once no kernel uses them.
 * The daemon gets their DONEs before the caller's next request.
 */
void gaiafs_keep_drop(const struct gaiafs_mapping *m);
void gaiafs_keep_after_fork(void);
/* gaiafs_table_after_fork removes the memory of the parent's movable mappings from the child. */
void gaiafs_table_after_fork(void);
/* gaiafs_move carries out a MOVE. fd is the descriptor or -1, and stays the caller's. It returns an errno. */
int gaiafs_move(const struct gaiafs_conn *c, const struct gaiafs_move *move, int fd);
/* gaiafs_table_ready makes m visible to other calls. */
void gaiafs_table_ready(struct gaiafs_mapping *m);
/*
 * gaiafs_table_find returns the ready mapping that contains addr, with a reference, or NULL. *mine: this process made
 * it, not one that it was forked from.
 */
struct gaiafs_mapping *gaiafs_table_find(const void *addr, bool *mine);
/*
 * gaiafs_table_take removes the ready mapping that begins at addr and has the size, and passes its reference to the
 * caller. *busy: stream-ordered calls keep the mapping, and it was not removed.
 */
struct gaiafs_mapping *gaiafs_table_take(const void *addr, uint64_t size, bool *mine, bool *busy);
/* gaiafs_table_cancel removes m, which is not ready, if it is in the table. */
void gaiafs_table_cancel(struct gaiafs_mapping *m);
/* gaiafs_mapping_mine reports whether this process made m, and not one that it was forked from. */
bool gaiafs_mapping_mine(const struct gaiafs_mapping *m);
/* gaiafs_mapping_forget_gpu frees m's record of the GPU, without touching the GPU. */
void gaiafs_mapping_forget_gpu(struct gaiafs_mapping *m);
/* gaiafs_mapping_unref gives a reference back. The last one closes the descriptor and leaves the connection. */
void gaiafs_mapping_unref(struct gaiafs_mapping *m);

/*
 * gaiafs_read_args reads a structure of a program that was built with an older or a newer header. room is the size of
 * *to; first is the size of the structure's first version.
 */
int gaiafs_read_args(void *to, size_t room, const void *given, size_t size, size_t first, struct gaiafs_fail *f);
/* gaiafs_check_args and gaiafs_check_file find errors that do not need the daemon. */
int gaiafs_check_args(const struct gaia_map_args *a, struct gaiafs_fail *f);
int gaiafs_check_file(int fd, int prot, struct gaiafs_fail *f);
/* gaiafs_map_it asks the daemon for m, a new mapping, and maps it. It takes m over, even if it fails. */
int gaiafs_map_it(struct gaiafs_mapping *m, const struct gaia_map_args *a, void **base, struct gaiafs_fail *f);
/* gaiafs_grant_file gets the grant of an open file. */
int gaiafs_grant_file(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f);

/* gaiafs_flush is gaiafs_flush_kernel for n bytes of the mapping, beginning at byte at. */
int gaiafs_flush(const struct gaiafs_mapping *m, uint64_t at, uint64_t n, bool *launder, struct gaiafs_fail *f);
/*
 * gaiafs_memfd_of puts a body that is larger than a frame into a memfd for the daemon to read. A child forked during
 * that keeps a copy of the descriptor. It returns an errno.
 */
int gaiafs_memfd_of(const uint8_t *body, size_t n, int *memfd, struct gaiafs_fail *f);
/* gaiafs_view_grants gets the grants of a view's files. *g is the first file's. */
int gaiafs_view_grants(struct gaiafs_view *v, struct gaiafs_grant *g, struct gaiafs_fail *f);
/* gaiafs_view_call asks for a view on a device of a kind. */
int gaiafs_view_call(struct gaiafs_mapping *m, const uint8_t uuid[GAIAFS_UUID], int kind, uint32_t flags,
		     struct gaiafs_request *r);
/* gaiafs_view_mapped forgets the caller's arguments and descriptors, before other calls can find the mapping. */
void gaiafs_view_mapped(struct gaiafs_view *v);
void gaiafs_view_free(struct gaiafs_view *v);

#endif
