/*
 * Programs whose memory moves. The first argument names a scenario, the second a file of 16 blocks of 64 KiB. The
 * device has room for 4 blocks, and pinned memory for 2.
 */
#include "check.h"

#include "../../conn.h"

enum { BLOCK = 64 << 10, BLOCKS = 16, DEVICE = 4, PINNED = 2 };

static uint8_t *map_movable(const char *path, int prot)
{
	int fd = open_file(path, (prot & PROT_WRITE) ? O_RDWR : O_RDONLY);
	uint8_t *p = gaia_mmap(NULL, (size_t)BLOCKS * BLOCK, prot, MAP_SHARED | GAIA_MOVABLE, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	close(fd);
	return p;
}

static int use(const uint8_t *p, int from, int n)
{
	const struct gaia_range r = { (void *)(uintptr_t)(p + (size_t)from * BLOCK), (uint64_t)n * BLOCK };

	return gaia_use(&r, 1, NULL);
}

/* dies reports whether touching the byte kills a child. */
static bool dies(volatile uint8_t *p)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		signal(SIGSEGV, SIG_DFL);
		(void)*p;
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

/* large checks that only a mapping that is larger than the device moves by default. */
static void large(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, (size_t)BLOCKS * BLOCK, PROT_READ, MAP_SHARED, fd, 0, 0);
	struct gaia_map_args a = {
		.length = (uint64_t)BLOCKS * BLOCK, .flags = MAP_SHARED | GAIA_MAP_STAYS, .fd = fd, .prot = PROT_READ
	};
	struct gaia_call call = { 0 };
	struct gaia_range ranges[300];
	struct gaia_info info;
	uint8_t *q;

	CHECK(p != MAP_FAILED && gaia_info(p, &info, sizeof info) == 0 && info.flags == GAIA_MAP_MOVABLE);
	for (int i = 0; i < BLOCKS; i++)
		CHECK(use(p, i, 1) == 0 && p[(size_t)i * BLOCK + 8] == at((size_t)i * BLOCK + 8) && gaia_done(NULL) == 0);
	MMAP_FAILS(gaia_map(&a, sizeof a), ENOMEM);
	a.flags = MAP_SHARED | GAIA_MAP_PEERS;
	MMAP_FAILS(gaia_map(&a, sizeof a), ENOMEM);
	a.flags = MAP_SHARED | GAIA_MAP_STAYS | GAIA_MAP_MOVABLE;
	MMAP_FAILS(gaia_map(&a, sizeof a), EINVAL);
	a.flags = MAP_SHARED | GAIA_MAP_NO_THREAD;
	q = gaia_map(&a, sizeof a);
	CHECK(q != MAP_FAILED && use(q, 9, 1) == 0 && q[9 * BLOCK] == at(9 * BLOCK) && gaia_done(NULL) == 0);
	CHECK(gaia_munmap(q, (size_t)BLOCKS * BLOCK) == 0);
	a.length = (uint64_t)DEVICE * BLOCK;
	q = gaia_map(&a, sizeof a);
	CHECK(q != MAP_FAILED && gaia_info(q, &info, sizeof info) == 0 && info.flags == GAIA_MAP_NO_THREAD);
	CHECK(q[3 * BLOCK] == at(3 * BLOCK));

	/* In steps: with few ranges, with many, without ranges that move, cancelled, and refused. */
	for (size_t i = 0; i < 300; i++)
		ranges[i] = (struct gaia_range){ p + i, 1 };
	for (size_t n = 1; n <= 300; n += 299) {
		CHECK(gaia_start_use(&call, ranges, n, NULL, 0) == 0);
		FAILS(gaia_start_use(&call, ranges, n, NULL, 0), EBUSY);
		CHECK(gaia_wait(&call, -1) == 0 && p[n - 1] == at(n - 1));
		CHECK(use(p, 1, 1) == 0 && gaia_done_use(call.pages) == 0 && p[BLOCK] == at(BLOCK)); /* the inner one is open */
		FAILS(gaia_done_use(call.pages), EINVAL);
		CHECK(gaia_done(NULL) == 0);
		ranges[0].length = 2; /* the other bracket is kept, and could be joined at once */
		CHECK(gaia_start_use(&call, ranges, n, NULL, 0) == 0);
		gaia_cancel(&call);
		FAILS(gaia_done(NULL), EINVAL);
		ranges[0].length = 1;
	}
	CHECK(gaia_start_use(&call, &(struct gaia_range){ q, 1 }, 1, NULL, 0) == 0 && call.running == NULL &&
		gaia_done(NULL) == 0);
	CHECK(gaia_start_use(&call, &(struct gaia_range){ p, (uint64_t)BLOCKS * BLOCK }, 1, NULL, 0) == 0);
	FAILS(gaia_wait(&call, -1), ENOMEM);
	FAILS(gaia_start_use(&call, ranges, 0, NULL, 0), EINVAL);
	CHECK(gaia_munmap(q, (size_t)DEVICE * BLOCK) == 0 && gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
}

/* explains ends with a fault, after printing the reason. */
static void explains(const char *path, const char *what)
{
	uint8_t *p = map_movable(path, PROT_READ);
	volatile uint8_t *at = p + BLOCK + 1;

	CHECK(gaia_explain_faults() == 0 && gaia_explain_faults() == 0);
	if (strcmp(what, "store") == 0) {
		CHECK(use(p, 1, 1) == 0);
		*at = 1;
	} else if (strcmp(what, "elsewhere") == 0) {
		*(volatile uint8_t *)(uintptr_t)getpagesize() = 1;
	} else {
		(void)*at;
	}
}

static void basic(const char *path)
{
	uint8_t *p = map_movable(path, PROT_READ | PROT_WRITE), *q;
	struct gaia_info info;
	struct gaia_range both[2] = { { p, BLOCK }, { p + 3 * BLOCK, 1 } };
	int fd = open_file(path, O_RDWR);
	char got[2];

	CHECK(gaia_info(p, &info, sizeof info) == 0 && (info.flags & GAIA_MAP_MOVABLE) != 0);
	for (int round = 0; round < 3; round++)
		for (int i = 0; i < BLOCKS; i++) {
			size_t b = (size_t)i * BLOCK;

			CHECK(use(p, i, 1) == 0);
			CHECK(p[b + 8] == (uint8_t)(at(b + 8) + round) && p[b + BLOCK - 1] == at(b + BLOCK - 1));
			p[b + 8]++;
			CHECK(gaia_done(NULL) == 0);
		}
	CHECK(gaia_msync(p, (size_t)BLOCKS * BLOCK, MS_SYNC) == 0);
	for (int i = 0; i < BLOCKS; i++) {
		size_t b = (size_t)i * BLOCK + 8;

		CHECK(pread(fd, got, 1, (off_t)b) == 1 && (uint8_t)got[0] == (uint8_t)(at(b) + 3));
	}
	/* Copies need no bracket, and reclaim memory that was used before. */
	uint8_t *all = malloc((size_t)BLOCKS * BLOCK);
	CHECK(all != NULL && gaia_read(p, all, BLOCK * 4) == 0 && all[BLOCK + 8] == (uint8_t)(at(BLOCK + 8) + 3));
	CHECK(gaia_write(p + 20, all + 20, BLOCK) == 0);
	free(all);
	MMAP_FAILS(gaia_copies(p, 1, NULL, 0), EINVAL);
	/* Several ranges, mappings that do not move, and nested brackets. */
	q = gaia_mmap(NULL, BLOCK, PROT_READ, MAP_SHARED, fd, 0, 0);
	CHECK(q != MAP_FAILED);
	CHECK(gaia_use(both, 2, NULL) == 0);
	CHECK(p[3 * BLOCK] == at(3 * BLOCK));
	CHECK(use(p, 1, 1) == 0);
	CHECK(p[BLOCK] == at(BLOCK) && p[0] == at(0));
	CHECK(use(q, 0, 1) == 0);
	CHECK(gaia_done(NULL) == 0 && gaia_done(NULL) == 0 && gaia_done(NULL) == 0);
	FAILS(gaia_done(NULL), EINVAL);
	FAILS(use(p, 0, BLOCKS), ENOMEM);
	CHECK(strstr(gaia_error(), "budget is 256 KiB") != NULL);
	FAILS(gaia_use(both, 0, NULL), EINVAL);
	/* All of the device except q's part, and all pinned memory; and then more. */
	CHECK(use(p, 4, DEVICE - 1 + PINNED) == 0);
	FAILS(use(p, 12, 1), EDEADLK);
	CHECK(gaia_done(NULL) == 0);
	/* Acquire and release of memory that is not there. */
	CHECK(use(p, 7, 1) == 0);
	p[7 * BLOCK + 1] = 77;
	CHECK(gaia_done(NULL) == 0);
	for (int i = 8; i < BLOCKS; i++)
		CHECK(use(p, i, 1) == 0 && gaia_done(NULL) == 0);
	CHECK(gaia_mrelease(p, (size_t)BLOCKS * BLOCK, 0) == 0 && gaia_macquire(p, (size_t)BLOCKS * BLOCK, 0) == 0);
	CHECK(gaia_msync(p, (size_t)BLOCKS * BLOCK, MS_SYNC) == 0);
	CHECK(pread(fd, got, 1, 7 * BLOCK + 1) == 1 && got[0] == 77);
	CHECK(gaia_munmap(q, BLOCK) == 0 && gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
}

/* Touching memory outside of brackets ends the program. A child has none of its parent's movable memory. */
static void holes(const char *path)
{
	uint8_t *p = map_movable(path, PROT_READ);

	CHECK(dies(p));
	CHECK(use(p, 0, 1) == 0);
	CHECK(p[9] == at(9));
	CHECK(dies(p));
	CHECK(p[9] == at(9));
	CHECK(gaia_done(NULL) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		FAILS(use(p, 0, 1), ECHILD);
		CHECK(gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
		uint8_t *own = map_movable(path, PROT_READ);
		CHECK(use(own, 2, 1) == 0 && own[2 * BLOCK] == at(2 * BLOCK) && gaia_done(NULL) == 0);
		_exit(0);
	}
	wait_for(child);
	CHECK(use(p, 1, 1) == 0 && p[BLOCK] == at(BLOCK) && gaia_done(NULL) == 0);
	CHECK(gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
}

static uint8_t *shared;

/* work adds to one thread's bytes, block by block, ROUNDS times. */
enum { ROUNDS = 4, THREADS = 3 };

static void *work(void *argument)
{
	size_t mine = (size_t)(uintptr_t)argument;

	for (int round = 0; round < ROUNDS; round++)
		for (int i = 0; i < BLOCKS; i++) {
			CHECK(use(shared, i, 1) == 0);
			shared[(size_t)i * BLOCK + mine]++;
			CHECK(gaia_done(NULL) == 0);
		}
	return NULL;
}

/* Several threads of several processes use the whole file, each its own bytes. */
static void many(const char *path, const char *number)
{
	size_t first = 16 + THREADS * (size_t)atoi(number);
	pthread_t threads[THREADS];

	shared = map_movable(path, PROT_READ | PROT_WRITE);
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(first + i)) == 0);
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(gaia_munmap(shared, (size_t)BLOCKS * BLOCK) == 0);
}

/* A program that stays, in a bracket or between two. */
static void stays(const char *path, bool within)
{
	uint8_t *p = map_movable(path, PROT_READ | PROT_WRITE);

	CHECK(use(p, 0, DEVICE) == 0);
	p[5] = 55;
	if (!within)
		CHECK(gaia_done(NULL) == 0);
	say_and_wait("ready");
	if (!within)
		CHECK(use(p, 0, 1) == 0);
	CHECK(p[5] == 55 && gaia_done(NULL) == 0);
	say_and_wait("done");
}

/* A program that uses the same ranges repeatedly, and asks the daemon only if there is no room. Then it uses what
another
 * program needs. */
static void keeps(const char *path)
{
	uint8_t *p = map_movable(path, PROT_READ | PROT_WRITE), *q = map_movable(path, PROT_READ);
	const struct gaia_range several[] = { { p + BLOCK, 100 }, { q + BLOCK, 100 }, { p + 3 * BLOCK, BLOCK } };

	for (int round = 0; round < 1000; round++) {
		for (int i = 0; i < DEVICE; i++) {
			size_t b = (size_t)i * BLOCK;

			CHECK(use(p, i, 1) == 0 && use(p, i, 1) == 0);
			CHECK(p[b + 8] == (uint8_t)(at(b + 8) + round));
			p[b + 8]++;
			CHECK(gaia_done(NULL) == 0 && gaia_done(NULL) == 0);
		}
		CHECK(gaia_use(several, 3, NULL) == 0);
		CHECK(p[BLOCK] == at(BLOCK) && q[BLOCK] == at(BLOCK) && p[3 * BLOCK] == at(3 * BLOCK));
		CHECK(gaia_done(NULL) == 0);
	}
	CHECK(use(p, 0, 1) == 0);
	say_and_wait("kept"); /* the others are ended, but this one stays */
	p[8]++;
	CHECK(gaia_done(NULL) == 0);
	CHECK(gaia_mrelease(p, (size_t)BLOCKS * BLOCK, 0) == 0);
	for (int i = 0; i < DEVICE; i++) {
		size_t b = (size_t)i * BLOCK + 8;

		CHECK(use(p, i, 1) == 0 && p[b] == (uint8_t)(at(b) + 1000 + (i == 0)) && gaia_done(NULL) == 0);
	}
	CHECK(gaia_use(several, 3, NULL) == 0 && gaia_done(NULL) == 0 && gaia_munmap(q, (size_t)BLOCKS * BLOCK) == 0);
	FAILS(gaia_use(several, 3, NULL), ENOMEM);
	CHECK(use(p, 0, 1) == 0 && gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0 && gaia_done(NULL) == 0);
}

/* has reports whether there is memory at p. */
static bool has(const uint8_t *p)
{
	int ends[2];
	ssize_t n;

	CHECK(pipe(ends) == 0);
	n = write(ends[1], p, 1);
	CHECK(n == 1 || errno == EFAULT);
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
	return n == 1;
}

/*
 * Under the rule that counts uses, kept brackets leave in the order of their uses. Those that were used least were used
 * last. One of them is in use when the daemon wants it back, so its uses are in its DONE.
 */
static void counts(const char *path)
{
	static const int uses[DEVICE] = { 5, 2, 3, 4 };
	uint8_t *p = map_movable(path, PROT_READ);

	for (int i = 0; i < DEVICE; i++)
		for (int k = 0; k < uses[i]; k++)
			CHECK(use(p, i, 1) == 0 && gaia_done(NULL) == 0);
	CHECK(use(p, 0, 1) == 0 && use(p, 4, 1) == 0);
	CHECK(has(p) && !has(p + BLOCK) && has(p + 2 * BLOCK) && has(p + 3 * BLOCK) && has(p + 4 * BLOCK));
	CHECK(gaia_done(NULL) == 0 && gaia_done(NULL) == 0);
	for (int k = 0; k < 4; k++)
		CHECK(use(p, 4, 1) == 0 && gaia_done(NULL) == 0);
	CHECK(use(p, 5, 1) == 0 && gaia_done(NULL) == 0);
	CHECK(has(p) && !has(p + 2 * BLOCK) && has(p + 3 * BLOCK) && has(p + 4 * BLOCK) && has(p + 5 * BLOCK));
	for (int i = 6; i < BLOCKS; i++)
		CHECK(use(p, i, 1) == 0 && gaia_done(NULL) == 0);
	CHECK(has(p) && has(p + 3 * BLOCK) && has(p + 4 * BLOCK) && has(p + (BLOCKS - 1) * BLOCK));
	CHECK(gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
}

/* A program that needs a part of the device, or all of it. */
static void needs(const char *path, int count)
{
	uint8_t *p = map_movable(path, PROT_READ);

	CHECK(use(p, 8, count) == 0);
	CHECK(p[8 * BLOCK] == at(8 * BLOCK) && gaia_done(NULL) == 0);
}

/*
 * The daemon takes 2 requests at once. Threads wait for the memory of a bracket, whose thread can still ask for
 * something else, and end the bracket.
 */
enum { CROWD = 4 };

static void *wait_in_crowd(void *argument)
{
	CHECK(use(shared, DEVICE + PINNED + (int)(uintptr_t)argument, 1) == 0 && gaia_done(NULL) == 0);
	return NULL;
}

static void crowd(const char *path)
{
	pthread_t threads[CROWD];

	shared = map_movable(path, PROT_READ | PROT_WRITE);
	CHECK(use(shared, 0, DEVICE + PINNED) == 0);
	for (size_t i = 0; i < CROWD; i++)
		CHECK(pthread_create(&threads[i], NULL, wait_in_crowd, (void *)(uintptr_t)i) == 0);
	say_and_wait("crowd");
	CHECK(gaia_mrelease(shared, BLOCK, 0) == 0 && gaia_done(NULL) == 0);
	for (size_t i = 0; i < CROWD; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(gaia_munmap(shared, (size_t)BLOCKS * BLOCK) == 0);
}

/* A daemon that does not offer USES gets a DONE without uses. */
static void tells_uses(uint64_t offered, size_t size)
{
	static struct gaiafs_conn c = { .state = READY, .refs = 1, .service = -1, .lock = PTHREAD_MUTEX_INITIALIZER };
	struct gaiafs_mapping m = { .conn = &c };
	uint8_t got[GAIAFS_MAX_FRAME];
	int pair[2];

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
	c.fd = pair[0];
	c.welcome = (struct gaiafs_welcome){ .max_requests = 8, .offered = offered };
	gaiafs_tell_done(&m, (struct gaiafs_ended){ 9, 5 });
	CHECK(recv(pair[1], got, sizeof got, 0) == (ssize_t)(GAIAFS_HEADER + size));
	gaiafs_tell_done(&m, (struct gaiafs_ended){ 9, 0 });
	CHECK(recv(pair[1], got, sizeof got, 0) == GAIAFS_HEADER + 8);
	CHECK(close(pair[0]) == 0 && close(pair[1]) == 0);
}

/* Everything told is sent, although calls wait for replies and the socket is full. There are no replies. */
static void tells(void)
{
	enum { MANY = 2000 };
	static struct gaiafs_conn c = { .state = READY, .refs = 1, .service = -1, .welcome = { .max_requests = 1 },
					.lock = PTHREAD_MUTEX_INITIALIZER };
	static struct gaiafs_request use[2];
	uint8_t body[GAIAFS_MAX_BODY], got[GAIAFS_MAX_FRAME];
	struct gaiafs_header h;
	int pair[2], uses = 0;

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
	c.fd = pair[0];
	for (int i = 0; i < 2; i++)
		CHECK(gaiafs_call_begin(&c, GAIAFS_USE, body, 0, &use[i]) == 0);
	for (uint64_t i = 0; i < MANY; i++)
		gaiafs_tell(&c, GAIAFS_DONE, body, gaiafs_put_unmap(body, i));
	for (int done = 0; done < MANY;) {
		ssize_t n = recv(pair[1], got, sizeof got, 0);

		CHECK(n > 0 && gaiafs_get_header(got, (size_t)n, &h));
		CHECK(h.type == GAIAFS_DONE || h.type == GAIAFS_USE);
		done += h.type == GAIAFS_DONE;
		uses += h.type == GAIAFS_USE;
	}
	CHECK(uses == 1);
	tells_uses(GAIAFS_FEATURE_KEEP, 8);
	tells_uses(GAIAFS_FEATURE_KEEP | GAIAFS_FEATURE_USES, 16);
}

/*
 * RECALLs come while brackets are in use, so each ends with its gaia_done. The daemon gets the DONE before the thread's
 * next request, which would be refused otherwise.
 */
static void *ask_in_vain(void *unused)
{
	const struct gaia_range r = { shared + 8 * BLOCK, (PINNED + 1) * BLOCK };

	(void)unused;
	FAILS(gaia_use_for(&r, 1, NULL, 1), ETIMEDOUT);
	return NULL;
}

static void order(const char *path)
{
	shared = map_movable(path, PROT_READ);
	for (int round = 0; round < 200; round++) {
		uint8_t *p = map_movable(path, PROT_READ);
		pthread_t other;

		CHECK(use(shared, 0, 1) == 0 && use(p, 1, DEVICE - 1) == 0);
		CHECK(pthread_create(&other, NULL, ask_in_vain, NULL) == 0 && pthread_join(other, NULL) == 0);
		CHECK(gaia_done(NULL) == 0 && use(p, DEVICE, DEVICE - 1) == 0 && gaia_done(NULL) == 0);
		CHECK(gaia_munmap(p, (size_t)BLOCKS * BLOCK) == 0);
		CHECK(use(shared, 1, DEVICE - 1) == 0 && gaia_done(NULL) == 0 && gaia_done(NULL) == 0);
	}
	CHECK(gaia_munmap(shared, (size_t)BLOCKS * BLOCK) == 0);
}

/* A program of the tenant in GAIAFS_TENANT. If it is refused, it prints why. */
static void tenant(const char *path)
{
	int fd = open(path, O_RDONLY);
	uint8_t *p = gaia_mmap(NULL, BLOCK, PROT_READ, MAP_SHARED, fd, 0, 0);

	if (p == MAP_FAILED) {
		printf("%d %s", errno, gaia_error());
		return;
	}
	CHECK(p[1] == at(1));
	say_and_wait("mapped");
	CHECK(gaia_munmap(p, BLOCK) == 0 && close(fd) == 0);
}

int main(int argc, char **argv)
{
	CHECK(argc >= 3);
	gaiafs_request_grant = ask_for_grant;
	if (strcmp(argv[1], "basic") == 0)
		basic(argv[2]);
	else if (strcmp(argv[1], "holes") == 0)
		holes(argv[2]);
	else if (strcmp(argv[1], "large") == 0)
		large(argv[2]);
	else if (strcmp(argv[1], "explains") == 0)
		explains(argv[2], argv[3]);
	else if (strcmp(argv[1], "many") == 0)
		many(argv[2], argv[3]);
	else if (strcmp(argv[1], "within") == 0)
		stays(argv[2], true);
	else if (strcmp(argv[1], "between") == 0)
		stays(argv[2], false);
	else if (strcmp(argv[1], "needs") == 0)
		needs(argv[2], DEVICE);
	else if (strcmp(argv[1], "needs some") == 0)
		needs(argv[2], DEVICE - 1);
	else if (strcmp(argv[1], "tenant") == 0)
		tenant(argv[2]);
	else if (strcmp(argv[1], "crowd") == 0)
		crowd(argv[2]);
	else if (strcmp(argv[1], "tells") == 0)
		tells();
	else if (strcmp(argv[1], "order") == 0)
		order(argv[2]);
	else if (strcmp(argv[1], "keeps") == 0)
		keeps(argv[2]);
	else if (strcmp(argv[1], "counts") == 0)
		counts(argv[2]);
	else
		return 2;
	return 0;
}
