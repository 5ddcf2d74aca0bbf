/*
 * A client of the C library for the tests. The first argument names a scenario, the second a file. It is linked with
 * the library's objects. Instead of the ioctl, it gets its grants from the socket named by GAIAFS_TEST_GRANTS. At the
 * first failed check it exits and prints the line.
 */
#include "check.h"

#include <sched.h>

/* past_end: the daemon has found stores past the end in 3 pages, and reports them once. */
static void past_end(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0, 1);
	struct gaia_call call = { 0 };

	CHECK(p != MAP_FAILED && gaia_note()[0] == '\0');
	CHECK(gaia_start(&call, GAIA_DO_RELEASE, p, PAGE, 0, GAIA_ALL_STREAMS) == 0 && gaia_note()[0] == '\0');
	while (gaia_wait(&call, 1000) != 0)
		CHECK(call.running != NULL);
	CHECK(strstr(gaia_note(), "(pages: 3)") != NULL);
	CHECK(gaia_mrelease(p, PAGE, 1) == 0 && gaia_note()[0] == '\0');
	CHECK(gaia_munmap(p, PAGE) == 0 && gaia_note()[0] == '\0');
	close(fd);
}

static void basic(const char *path)
{
	const size_t off = PAGE, len = ((size_t)4 << 20) + 5; /* three extents, the first and the last in part */
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)off, 1);
	char got[8] = { 0 };

	CHECK(p != MAP_FAILED);
	for (size_t i = 0; i < len; i++)
		CHECK(p[i] == at(off + i));
	memcpy(p + 10, "device", 6);
	CHECK(gaia_mrelease(p, len, 1) == 0);
	CHECK(pread(fd, got, 6, (off_t)off + 10) == 6 && memcmp(got, "device", 6) == 0);

	CHECK(pwrite(fd, "host", 4, (off_t)off + 100) == 4);
	CHECK(memcmp(p + 100, "host", 4) != 0);
	CHECK(gaia_macquire(p + 5, 1, 1) == 0);
	CHECK(memcmp(p + 100, "host", 4) == 0);

	memcpy(p + 20, "sync", 4);
	CHECK(gaia_msync(p, len, MS_SYNC) == 0);
	CHECK(pread(fd, got, 4, (off_t)off + 20) == 4 && memcmp(got, "sync", 4) == 0);
	memcpy(p + 20, "asyn", 4);
	CHECK(gaia_msync(p, PAGE, MS_ASYNC) == 0);
	CHECK(pread(fd, got, 4, (off_t)off + 20) == 4 && memcmp(got, "asyn", 4) == 0);
	CHECK(pwrite(fd, "news", 4, (off_t)off + 200) == 4);
	CHECK(gaia_msync(p, PAGE, MS_INVALIDATE) == 0);
	CHECK(memcmp(p + 200, "news", 4) == 0);
	CHECK(gaia_msync(p, PAGE, MS_SYNC | MS_INVALIDATE) == 0);
	CHECK(gaia_msync(p, 0, MS_SYNC) == 0);
	for (int advice = GAIA_MADV_NORMAL; advice <= GAIA_MADV_DONTNEED; advice++)
		CHECK(gaia_madvise(p, len, advice) == 0);

	/* An emulated device has no streams, so stream-ordered calls run at once. */
	memcpy(p + 40, "later", 5);
	CHECK(gaia_mrelease_async(p, len, 1, NULL) == 0);
	CHECK(pread(fd, got, 5, (off_t)off + 40) == 5 && memcmp(got, "later", 5) == 0);
	CHECK(pwrite(fd, "newer", 5, (off_t)off + 40) == 5);
	CHECK(gaia_macquire_async(p, len, 1, NULL) == 0);
	CHECK(memcmp(p + 40, "newer", 5) == 0);
	FAILS(gaia_macquire_async(p, len, 1, (gaia_stream_t)p), EINVAL);
	CHECK(gaia_async_error(p) == 0);

	/* A second, read-only mapping shares the memory. */
	uint8_t *q = gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, (off_t)off, 1);
	CHECK(q != MAP_FAILED && q != p);
	p[300] = 42;
	CHECK(q[300] == 42);
	CHECK(gaia_mrelease(q, PAGE, 1) == 0);
	CHECK(mprotect(q, PAGE, PROT_READ | PROT_WRITE) == -1);
	CHECK(gaia_munmap(q, PAGE) == 0);

	/* A lazy mapping fetches nothing until it is asked. */
	q = gaia_mmap(NULL, PAGE, PROT_READ, GAIA_LAZY, fd, (off_t)off + 4096, 0);
	CHECK(q != MAP_FAILED && q[0] == 0 && q[PAGE - 1] == 0);
	CHECK(gaia_macquire(q, PAGE, 0) == 0);
	CHECK(q[0] == at(off + 4096));
	CHECK(gaia_munmap(q, PAGE) == 0);

	memcpy(p + 30, "munmap", 6);
	CHECK(gaia_munmap(p, len) == 0);
	CHECK(pread(fd, got, 6, (off_t)off + 30) == 6 && memcmp(got, "munmap", 6) == 0);
	close(fd);
}

static void bad(const char *path)
{
	int fd = open_file(path, O_RDWR), pipes[2];
	int read_only = open_file(path, O_RDONLY), write_only = open_file(path, O_WRONLY);
	int by_path = open_file(path, O_PATH), dir = open_file("/", O_RDONLY | O_DIRECTORY);

	CHECK(pipe(pipes) == 0);
	MMAP_FAILS(gaia_mmap(NULL, 0, PROT_READ, 0, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 1, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, -PAGE, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, INT64_MAX - PAGE + 1, 0), EOVERFLOW);
	MMAP_FAILS(gaia_mmap(NULL, SIZE_MAX, PROT_READ, 0, fd, 0, 0), EOVERFLOW);
	MMAP_FAILS(gaia_mmap(NULL, (size_t)1 << 60, PROT_READ, GAIA_LAZY, fd, 0, 7), ENODEV);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_NONE, 0, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ | PROT_EXEC, 0, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap((void *)1, PAGE, PROT_READ, MAP_FIXED, fd, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, -1), ENODEV);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 2), ENODEV);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, -1, 0, 0), EBADF);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, by_path, 0, 0), EBADF);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, dir, 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, pipes[0], 0, 0), EINVAL);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_WRITE, 0, read_only, 0, 0), EACCES);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, write_only, 0, 0), EACCES);

	uint8_t *p = gaia_mmap(NULL, 5000, PROT_WRITE, 0, fd, 0, 0);
	CHECK(p != MAP_FAILED);
	FAILS(gaia_macquire(&fd, 1, 0), ENOMEM);
	FAILS(gaia_macquire(NULL, 1, 0), ENOMEM);
	FAILS(gaia_macquire(p + 2 * PAGE, 1, 0), ENOMEM);
	FAILS(gaia_macquire(p - 1, 1, 0), ENOMEM);
	FAILS(gaia_macquire(p, 2 * PAGE + 1, 0), EINVAL);
	FAILS(gaia_macquire(p + PAGE, SIZE_MAX, 0), EINVAL);
	FAILS(gaia_macquire(p, 0, 0), EINVAL);
	FAILS(gaia_macquire(p, 1, 1), ENODEV);
	FAILS(gaia_mrelease(p, 1, 1), ENODEV);
	FAILS(gaia_mrelease(p, 0, 0), EINVAL);
	FAILS(gaia_mrelease(NULL, 1, 0), ENOMEM);
	FAILS(gaia_macquire_async(p, 1, 1, NULL), ENODEV);
	FAILS(gaia_mrelease_async(p, 0, 0, NULL), EINVAL);
	FAILS(gaia_mrelease_async(&fd, 1, 0, NULL), ENOMEM);
	FAILS(gaia_async_error(&fd), ENOMEM);
	CHECK(gaia_async_error(NULL) == 0);
	FAILS(gaia_msync(p + 1, 1, MS_SYNC), EINVAL);
	FAILS(gaia_msync(p, 1, MS_SYNC | MS_ASYNC), EINVAL);
	FAILS(gaia_msync(p, 1, 1 << 20), EINVAL);
	FAILS(gaia_msync(NULL, 1, MS_SYNC), ENOMEM);
	FAILS(gaia_madvise(p, 1, 99), EINVAL);
	FAILS(gaia_madvise(p, 1, -1), EINVAL);
	FAILS(gaia_madvise(p + 1, 1, 0), EINVAL);
	FAILS(gaia_munmap(p, PAGE), EINVAL);
	FAILS(gaia_munmap(p + PAGE, PAGE), EINVAL);
	FAILS(gaia_munmap(p, 0), EINVAL);
	FAILS(gaia_munmap(p, 3 * PAGE), EINVAL);
	FAILS(gaia_munmap(p, SIZE_MAX), EINVAL);
	CHECK(gaia_macquire(p + 2 * PAGE - 1, 1, 0) == 0); /* the last byte of the last page */
	CHECK(gaia_mrelease(p, 2 * PAGE, 0) == 0);
	CHECK(gaia_munmap(p, 2 * PAGE) == 0); /* the length rounds up to the same pages */
	FAILS(gaia_munmap(p, 5000), EINVAL);
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
}

static void foreign(const char *path)
{
	int fd = open_file(path, O_RDWR);

	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0), ENOTTY);
	CHECK(strstr(gaia_error(), "not on a gaiafs mount") != NULL);
}

static void addresses(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *free_range = mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(free_range != MAP_FAILED);
	/* Exactly at the address, replacing what was there. */
	uint8_t *p = gaia_mmap(free_range, 4 * PAGE, PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0, 0);
	CHECK(p == free_range && p[100] == at(100));
	/* But not over a mapping of the library's nor, with NOREPLACE, over anything. */
	MMAP_FAILS(gaia_mmap(free_range + 3 * PAGE, 2 * PAGE, PROT_READ, MAP_FIXED, fd, 0, 0), EEXIST);
	MMAP_FAILS(gaia_mmap(free_range + 5 * PAGE, PAGE, PROT_READ, MAP_FIXED_NOREPLACE, fd, 0, 0), EEXIST);
	CHECK(gaia_macquire(p, 4 * PAGE, 0) == 0); /* the failures did not touch it */
	CHECK(gaia_munmap(p, 4 * PAGE) == 0);
	/* The hint is used if there is room. */
	p = gaia_mmap(free_range, 4 * PAGE, PROT_READ, MAP_FIXED_NOREPLACE, fd, PAGE, 0);
	CHECK(p == free_range && p[0] == at(PAGE));
	CHECK(gaia_munmap(p, 4 * PAGE) == 0);
	p = gaia_mmap(free_range, 4 * PAGE, PROT_READ, 0, fd, 0, 0);
	CHECK(p == free_range);
	/* And another address is found if there is none. */
	uint8_t *q = gaia_mmap(free_range, 4 * PAGE, PROT_READ, 0, fd, 0, 0);
	CHECK(q != MAP_FAILED && q != p);
	CHECK(gaia_munmap(q, 4 * PAGE) == 0);
	CHECK(gaia_munmap(p, 4 * PAGE) == 0);
}

enum { THREADS = 16, ROUNDS = 25 };

static int shared_fd;
static uint8_t *shared_map;

static void *thread_main(void *argument)
{
	size_t me = (size_t)argument;
	int dev = (int)(me % 2);

	for (int i = 0; i < ROUNDS; i++) {
		uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, shared_fd, (off_t)(me * PAGE), dev);
		CHECK(p != MAP_FAILED);
		p[i] = (uint8_t)(me + 1);
		CHECK(gaia_mrelease(p, PAGE, dev) == 0);
		CHECK(gaia_macquire(shared_map + me * PAGE, PAGE, 0) == 0);
		CHECK(shared_map[me * PAGE + (size_t)i] == (uint8_t)(me + 1));
		FAILS(gaia_macquire(&dev, 1, 0), ENOMEM);
		CHECK(gaia_munmap(p, PAGE) == 0);
	}
	return NULL;
}

static void threads(const char *path)
{
	pthread_t all[THREADS];

	shared_fd = open_file(path, O_RDWR);
	shared_map = gaia_mmap(NULL, THREADS * PAGE, PROT_READ, 0, shared_fd, 0, 0);
	CHECK(shared_map != MAP_FAILED);
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&all[i], NULL, thread_main, (void *)i) == 0);
	for (size_t i = 0; i < THREADS; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	CHECK(gaia_munmap(shared_map, THREADS * PAGE) == 0);
}

static void forks(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		FAILS(gaia_macquire(p, 1, 0), ECHILD);
		FAILS(gaia_mrelease(p, 1, 0), ECHILD);
		FAILS(gaia_mrelease_async(p, 1, 0, NULL), ECHILD);
		FAILS(gaia_async_error(p), ECHILD);
		FAILS(gaia_msync(p, 1, MS_SYNC), ECHILD);
		FAILS(gaia_madvise(p, 1, GAIA_MADV_WILLNEED), ECHILD);
		p[5] = 77; /* the child shares the device's memory, too */
		uint8_t *q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
		CHECK(q != MAP_FAILED);
		q[5] = 78;
		CHECK(gaia_mrelease(q, PAGE, 0) == 0);
		CHECK(gaia_munmap(q, PAGE) == 0);
		CHECK(gaia_munmap(p, PAGE) == 0); /* unmaps it in the child only */
		FAILS(gaia_macquire(p, 1, 0), ENOMEM);
		_exit(0);
	}
	wait_for(child);
	uint8_t b;
	CHECK(pread(fd, &b, 1, PAGE + 5) == 1 && b == 78);
	CHECK(p[5] == 77);
	CHECK(gaia_mrelease(p, PAGE, 0) == 0); /* the parent's connection and mapping still work */
	CHECK(pread(fd, &b, 1, 5) == 1 && b == 77);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

static volatile int stop_threads;

static void *busy_main(void *argument)
{
	uint8_t *p = argument;

	while (!__atomic_load_n(&stop_threads, __ATOMIC_ACQUIRE)) {
		CHECK(gaia_macquire(p, PAGE, 0) == 0);
		uint8_t *q = gaia_mmap(NULL, PAGE, PROT_READ, 0, shared_fd, 0, 1);
		CHECK(q != MAP_FAILED);
		CHECK(gaia_munmap(q, PAGE) == 0);
	}
	return NULL;
}

/* Forks while other threads are in the library; the children use it, too. */
static void forks_among_threads(const char *path)
{
	pthread_t all[4];

	shared_fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_READ, 0, shared_fd, 0, 0);
	CHECK(p != MAP_FAILED);
	for (size_t i = 0; i < 4; i++)
		CHECK(pthread_create(&all[i], NULL, busy_main, p) == 0);
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			uint8_t *q = gaia_mmap(NULL, PAGE, PROT_READ, 0, shared_fd, 0, 0);
			CHECK(q != MAP_FAILED);
			CHECK(gaia_munmap(q, PAGE) == 0);
			CHECK(gaia_munmap(p, PAGE) == 0);
			_exit(0);
		}
		wait_for(child);
	}
	__atomic_store_n(&stop_threads, 1, __ATOMIC_RELEASE);
	for (size_t i = 0; i < 4; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	CHECK(gaia_munmap(p, PAGE) == 0);
}

/* Maps a file, stores into it, and is killed. */
static void stay(const char *path, const char *text)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	memcpy(p, text, strlen(text));
	say_and_wait("mapped");
}

/* The daemon stops at the first word and is back at the second. */
static void restart(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	say_and_wait("mapped");
	FAILS(gaia_macquire(p, 1, 0), ENOTCONN);
	FAILS(gaia_mrelease(p, 1, 0), ENOTCONN);
	p[0] = 1; /* the memory is still there */
	say_and_wait("lost");
	uint8_t *q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	CHECK(q != MAP_FAILED);
	CHECK(gaia_macquire(q, PAGE, 0) == 0);
	FAILS(gaia_munmap(p, PAGE), ENOTCONN);
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
	say_and_wait("mapped again"); /* the daemon is replaced while the connection is kept and unused */
	CHECK(gaia_munmap(q, PAGE) == -1 && errno == ENOTCONN);
	p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);
	CHECK(p != MAP_FAILED);
	say_and_wait("third"); /* replaced again, so that the next call notices it */
	q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
	CHECK(q != MAP_FAILED);
	CHECK(gaia_munmap(q, PAGE) == 0);
	FAILS(gaia_munmap(p, PAGE), ENOTCONN);
}

/* While the daemon is stopped, a signal ends every call, and late replies are dropped. */
static void interrupted(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0),
			*q = gaia_mmap(NULL, 2 * PAGE, PROT_WRITE, 0, fd, 0, 0);
	char got[5];

	CHECK(p != MAP_FAILED && q != MAP_FAILED);
	say_and_wait("mapped"); /* stopped */
	gaiafs_grant_patience = 1;
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0), ETIMEDOUT);
	puts(gaia_error());
	interrupts(true, SA_RESTART);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0), ETIMEDOUT);
	gaiafs_grant_patience = 1000;
	interrupts(true, 0);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0), EINTR);
	for (int i = 0; i < 70; i++) { /* in total more than a daemon takes at once */
		FAILS(gaia_macquire(p, PAGE, 0), EINTR);
		FAILS(gaia_madvise(p, PAGE, GAIA_MADV_NORMAL), EINTR);
	}
	memcpy(p, "p end", 5);
	FAILS(gaia_mrelease(p, PAGE, 0), EINTR);
	FAILS(gaia_msync(p, PAGE, MS_SYNC), EINTR);
	FAILS(gaia_munmap(p, PAGE), EINPROGRESS);
	FAILS(gaia_munmap(p, PAGE), EINVAL);
	interrupts(false, 0);
	say_and_wait("interrupted"); /* the daemon continues */
	gaiafs_grant_patience = 30;
	interrupts(true, SA_RESTART);
	for (int i = 0; i < 100; i++) {
		CHECK(gaia_macquire(q, 2 * PAGE, 0) == 0);
		memcpy(q + PAGE, &i, sizeof i);
		CHECK(gaia_mrelease(q, 2 * PAGE, 0) == 0);
	}
	interrupts(false, 0);
	CHECK(pread(fd, got, 5, 0) == 5 && memcmp(got, "p end", 5) == 0);
	CHECK(gaia_munmap(q, 2 * PAGE) == 0);
	say_and_wait("done");
}

/* If a mapping arrives after its call was interrupted, it is undone, even if no further call enters the library. */
static void interrupted_mmap(const char *path)
{
	int fd = open_file(path, O_RDWR);

	interrupts(true, 0);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0), EINTR);
	MMAP_FAILS(gaia_mmap(NULL, 3 << 20, PROT_WRITE, 0, fd, 0, 1), EINTR);
	interrupts(false, 0);
	say_and_wait("interrupted");
}

/* The same with threads, which take over the interrupted thread's reading. */
static void *interrupted_main(void *argument)
{
	size_t me = (size_t)argument;
	int done = 0, tries = 0;

	while (done < ROUNDS) {
		uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, shared_fd, (off_t)(me * PAGE), 0);

		CHECK(p != MAP_FAILED || errno == EINTR);
		if (p == MAP_FAILED)
			continue;
		p[0] = (uint8_t)done;
		if (gaia_mrelease(p, PAGE, 0) == 0 && gaia_macquire(p, PAGE, 0) == 0)
			done++;
		else
			CHECK(errno == EINTR);
		CHECK(++tries < 100 * ROUNDS);
		CHECK(gaia_munmap(p, PAGE) == 0 || errno == EINPROGRESS);
	}
	return NULL;
}

static void interrupted_threads(const char *path)
{
	pthread_t all[4];

	shared_fd = open_file(path, O_RDWR);
	for (size_t i = 0; i < 4; i++)
		CHECK(pthread_create(&all[i], NULL, interrupted_main, (void *)i) == 0);
	interrupts(true, 0);
	for (size_t i = 0; i < 4; i++) {
		for (int n = 0; n < 100; n++) {
			(void)pthread_kill(all[i], SIGALRM);
			sched_yield();
		}
		CHECK(pthread_join(all[i], NULL) == 0);
	}
	interrupts(false, 0);
	say_and_wait("done");
}

/* Waits for a slow daemon in steps. Abandoned requests must not hinder others. */
static void pieces(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, 3 * PAGE, PROT_WRITE, GAIA_LAZY, fd, 0, 0), *held;
	struct gaia_map_args a = {
		.length = 3 * PAGE, .flags = GAIA_MAP_HOLD | GAIA_MAP_LAZY, .fd = fd, .prot = PROT_READ
	};
	struct gaia_call call = { 0 }, other = { 0 };
	struct gaia_info info;
	char got[6];

	CHECK(p != MAP_FAILED);
	CHECK(gaia_start(&call, GAIA_DO_ACQUIRE, p + 5, 2 * PAGE, 0, GAIA_ALL_STREAMS) == 0);
	FAILS(gaia_start(&call, GAIA_DO_ACQUIRE, p, PAGE, 0, GAIA_NO_STREAM), EBUSY);
	FAILS(gaia_wait(&call, 0), ETIMEDOUT);
	FAILS(gaia_wait(&call, 20), ETIMEDOUT);
	interrupts(true, SA_RESTART);
	FAILS(gaia_wait(&call, 60000), EINTR);
	interrupts(true, 0);
	FAILS(gaia_wait(&call, -1), EINTR);
	interrupts(false, 0);
	for (int i = 0; i < 200; i++) { /* more than a daemon takes at once */
		CHECK(gaia_start(&other, GAIA_DO_ACQUIRE, p, PAGE, 0, GAIA_NO_STREAM) == 0);
		gaia_cancel(&other);
		CHECK(other.running == NULL);
	}
	say_and_wait("waiting"); /* the daemon answers */
	while (gaia_wait(&call, -1) != 0) /* the thread sanitizer delivers signals late */
		CHECK(errno == EINTR && call.running != NULL);
	/* Another request may have counted the first page. */
	CHECK(call.running == NULL && (call.pages == 3 || call.pages == 2));
	CHECK(gaia_wait(&call, -1) == 0); /* nothing runs */
	gaia_cancel(&call);
	memcpy(p + PAGE, "pieces", 6);
	CHECK(gaia_start(&call, GAIA_DO_RELEASE, p, 3 * PAGE, 0, GAIA_ALL_STREAMS) == 0);
	CHECK(gaia_wait(&call, 60000) == 0 && call.pages == 1);
	CHECK(pread(fd, got, 6, PAGE) == 6 && memcmp(got, "pieces", 6) == 0);
	CHECK(gaia_start(&call, GAIA_DO_SYNC, p + 1, PAGE, 1, GAIA_ALL_STREAMS) == 0 && gaia_wait(&call, -1) == 0);
	CHECK(gaia_start(&call, GAIA_DO_ADVISE, p + 1, 1, GAIA_MADV_RANDOM, GAIA_NO_STREAM) == 0 &&
		gaia_wait(&call, -1) == 0);
	FAILS(gaia_start(&call, 5, p, PAGE, 0, GAIA_NO_STREAM), EINVAL);
	FAILS(gaia_start(&call, GAIA_DO_SYNC, p, 4 * PAGE, 0, GAIA_NO_STREAM), EINVAL);
	CHECK(call.running == NULL);

	/* A child can use the mapping's calls, but not the parent's running request. */
	CHECK(gaia_start(&call, GAIA_DO_ACQUIRE, p, PAGE, 0, GAIA_NO_STREAM) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(gaia_wait(&call, -1) == 0);
		gaia_cancel(&call);
		FAILS(gaia_start(&call, GAIA_DO_ACQUIRE, p, PAGE, 0, GAIA_NO_STREAM), ECHILD);
		gaia_drop(p, 3 * PAGE);
		FAILS(gaia_macquire(p, 1, 0), ENOMEM);
		_exit(0);
	}
	wait_for(child);
	CHECK(gaia_wait(&call, -1) == 0);

	/* A held mapping is not mapped here, but the daemon has it. */
	held = gaia_map(&a, sizeof a);
	CHECK(held != MAP_FAILED && held != p);
	CHECK(gaia_info(held, &info, sizeof info) == 0 && info.kind == 0 && info.flags == a.flags && info.size == 5 << 20);
	CHECK(gaia_macquire(held, 3 * PAGE, 0) == 0);
	FAILS(gaia_read(held, got, 1), EINVAL);
	MMAP_FAILS(gaia_copies(held, PAGE, NULL, 0), EINVAL);
	CHECK(gaia_munmap(held, 3 * PAGE) == 0);

	/* Copies belong to this process. */
	const struct gaia_copy list[] = { { 0, p + PAGE, 6 }, { 512, p, 2 } };
	uint8_t *c = gaia_copies(p, 514, list, 2);
	CHECK(c != MAP_FAILED && memcmp(c, "pieces", 6) == 0 && memcmp(c + 512, p, 2) == 0);
	CHECK(gaia_info(c, &info, sizeof info) == 0 && info.length == 514 && info.size == -1);
	CHECK(gaia_write(c, "copied", 6) == 0 && gaia_read(c, got, 6) == 0 && memcmp(got, "copied", 6) == 0 && p[PAGE] == 'p');
	FAILS(gaia_mrelease(c, 1, 0), EINVAL);
	FAILS(gaia_macquire(c, 1, 0), EINVAL);
	MMAP_FAILS(gaia_copies(p, 513, list, 2), EINVAL);
	MMAP_FAILS(gaia_copies(p + 1, 514, (struct gaia_copy[]){ { 0, p + 3 * PAGE, 1 } }, 1), EINVAL);
	gaia_drop(c, 514);
	FAILS(gaia_read(c, got, 1), ENOMEM);
	CHECK(gaia_read(c, got, 0) == 0);

	memcpy(p + PAGE, "no end", 6);
	gaia_drop(p, PAGE); /* does nothing: not the whole mapping */
	gaia_drop(p, 3 * PAGE);
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
	say_and_wait("dropped");
	CHECK(pread(fd, got, 6, PAGE) == 6 && memcmp(got, "no end", 6) == 0);
}

static int threads_now(void)
{
	FILE *f = fopen("/proc/self/stat", "r");
	int n = 0;

	CHECK(f != NULL && fscanf(f, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d", &n) == 1);
	fclose(f);
	return n;
}

/* A process that asks for no threads has none. */
static void no_thread(const char *path)
{
	struct gaia_map_args a = {
		.length = PAGE, .flags = GAIA_MAP_NO_THREAD, .fd = open_file(path, O_RDWR), .prot = PROT_WRITE
	};
	struct gaia_call call = { 0 };

	for (int i = 0; i < 10; i++) {
		uint8_t *p = gaia_map(&a, sizeof a);

		CHECK(p != MAP_FAILED);
		CHECK(gaia_start(&call, GAIA_DO_ACQUIRE, p, PAGE, 0, GAIA_NO_STREAM) == 0);
		gaia_cancel(&call);
		if (i % 2 == 0)
			gaia_drop(p, PAGE);
		else
			CHECK(gaia_munmap(p, PAGE) == 0);
		CHECK(threads_now() == 1);
	}
}

/* The daemon breaks the protocol. The mapping stays, but the connection ends. */
static void breach(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	FAILS(gaia_macquire(p, PAGE, 0), EPROTO);
	FAILS(gaia_macquire(p, PAGE, 0), EPROTO);
	p[0] = 1;
	say_and_wait("lost");
	FAILS(gaia_munmap(p, PAGE), EPROTO);
}

/* A daemon of version 1 answers with recorded frames. */
static void old_daemon(const char *path)
{
	const size_t len = (size_t)4 << 20;
	struct gaia_map_args a = { .length = len,
		.offset = 2 << 20,
		.fd = open_file(path, O_RDWR),
		.prot = PROT_READ | PROT_WRITE,
		.device = 3,
		.kind = GAIA_KIND_EMULATED };
	uint8_t *p = gaia_map(&a, sizeof a);

	CHECK(p != MAP_FAILED);
	p[len - 1] = 1;
	CHECK(gaia_macquire(p, len, 3) == 0);
	CHECK(gaia_mrelease(p, len, 3) == 0);
	CHECK(gaia_msync(p, len, MS_SYNC) == 0);
	CHECK(gaia_madvise(p, len, GAIA_MADV_RANDOM) == 0);
	CHECK(gaia_munmap(p, len) == 0);
}

/* Prints the status of a mountpoint's daemon. */
static void status(const char *mountpoint)
{
	char *text = gaia_status(open_file(mountpoint, O_RDONLY | O_DIRECTORY));

	CHECK(text != NULL);
	puts(text);
	free(text);
	CHECK(gaia_status(-1) == NULL && errno == EBADF);
}

/* Prints why a mapping fails. */
static void refused(const char *path)
{
	int fd = open_file(path, O_RDWR);

	CHECK(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0) == MAP_FAILED);
	printf("%d %s\n", errno, gaia_error());
}

int main(int argc, char **argv)
{
	CHECK(argc >= 3);
	CHECK(gaia_error()[0] == '\0');
	if (getenv("GAIAFS_TEST_GRANTS") != NULL)
		gaiafs_request_grant = ask_for_grant;
	const char *what = argv[1], *path = argv[2];
	if (strcmp(what, "basic") == 0)
		basic(path);
	else if (strcmp(what, "past-end") == 0)
		past_end(path);
	else if (strcmp(what, "bad") == 0)
		bad(path);
	else if (strcmp(what, "foreign") == 0)
		foreign(path);
	else if (strcmp(what, "addresses") == 0)
		addresses(path);
	else if (strcmp(what, "threads") == 0)
		threads(path);
	else if (strcmp(what, "forks") == 0)
		forks(path);
	else if (strcmp(what, "forks-among-threads") == 0)
		forks_among_threads(path);
	else if (strcmp(what, "stay") == 0 && argc == 4)
		stay(path, argv[3]);
	else if (strcmp(what, "restart") == 0)
		restart(path);
	else if (strcmp(what, "interrupted") == 0)
		interrupted(path);
	else if (strcmp(what, "interrupted-mmap") == 0)
		interrupted_mmap(path);
	else if (strcmp(what, "interrupted-threads") == 0)
		interrupted_threads(path);
	else if (strcmp(what, "pieces") == 0)
		pieces(path);
	else if (strcmp(what, "no-thread") == 0)
		no_thread(path);
	else if (strcmp(what, "status") == 0)
		status(path);
	else if (strcmp(what, "breach") == 0)
		breach(path);
	else if (strcmp(what, "refused") == 0)
		refused(path);
	else if (strcmp(what, "old-daemon") == 0)
		old_daemon(path);
	else
		CHECK(!"a scenario of that name");
	return 0;
}
