/*
 * A client of the C library for the tests: the first argument names a scenario, the second a file. It is linked with the
 * library's objects and gets its grants from the socket named by GAIAFS_TEST_GRANTS in the place of the ioctl. It
 * fails, with the line, at the first thing that is not as it should be.
 */
#include "check.h"

#include <sched.h>

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

	/* An emulated device has no streams: in stream order is at once. */
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

	/* A lazy one fetches nothing until it is asked. */
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
	CHECK(gaia_munmap(p, 2 * PAGE) == 0); /* as many pages */
	FAILS(gaia_munmap(p, 5000), EINVAL);
	FAILS(gaia_macquire(p, 1, 0), ENOMEM);
}

static void foreign(const char *path)
{
	int fd = open_file(path, O_RDWR);

	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0), ENOTTY);
	CHECK(strstr(gaia_error(), "not of a gaiafs mount") != NULL);
}

static void addresses(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *free_range = mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(free_range != MAP_FAILED);
	/* Exactly there, over what was there. */
	uint8_t *p = gaia_mmap(free_range, 4 * PAGE, PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0, 0);
	CHECK(p == free_range && p[100] == at(100));
	/* But neither over a mapping of ours nor, without replacing, over anything. */
	MMAP_FAILS(gaia_mmap(free_range + 3 * PAGE, 2 * PAGE, PROT_READ, MAP_FIXED, fd, 0, 0), EEXIST);
	MMAP_FAILS(gaia_mmap(free_range + 5 * PAGE, PAGE, PROT_READ, MAP_FIXED_NOREPLACE, fd, 0, 0), EEXIST);
	CHECK(gaia_macquire(p, 4 * PAGE, 0) == 0); /* the failures left it alone */
	CHECK(gaia_munmap(p, 4 * PAGE) == 0);
	/* The hint is taken where there is room. */
	p = gaia_mmap(free_range, 4 * PAGE, PROT_READ, MAP_FIXED_NOREPLACE, fd, PAGE, 0);
	CHECK(p == free_range && p[0] == at(PAGE));
	CHECK(gaia_munmap(p, 4 * PAGE) == 0);
	p = gaia_mmap(free_range, 4 * PAGE, PROT_READ, 0, fd, 0, 0);
	CHECK(p == free_range);
	/* And another address is found where there is none. */
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
		p[5] = 77; /* the memory is the device's, for the child too */
		uint8_t *q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
		CHECK(q != MAP_FAILED);
		q[5] = 78;
		CHECK(gaia_mrelease(q, PAGE, 0) == 0);
		CHECK(gaia_munmap(q, PAGE) == 0);
		CHECK(gaia_munmap(p, PAGE) == 0); /* the child's view */
		FAILS(gaia_macquire(p, 1, 0), ENOMEM);
		_exit(0);
	}
	wait_for(child);
	uint8_t b;
	CHECK(pread(fd, &b, 1, PAGE + 5) == 1 && b == 78);
	CHECK(p[5] == 77);
	CHECK(gaia_mrelease(p, PAGE, 0) == 0); /* the parent's connection and mapping are as they were */
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

/* Forking while other threads are in the library, with the child using it too. */
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

/* Maps, stores, and is killed. */
static void stay(const char *path, const char *text)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0);

	CHECK(p != MAP_FAILED);
	memcpy(p, text, strlen(text));
	say_and_wait("mapped");
}

/* The daemon goes at the first word and is back at the second. */
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
	say_and_wait("third"); /* and once more, so that the next call is the one to notice */
	q = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, PAGE, 0);
	CHECK(q != MAP_FAILED);
	CHECK(gaia_munmap(q, PAGE) == 0);
	FAILS(gaia_munmap(p, PAGE), ENOTCONN);
}

/* While the daemon is stopped, every call ends with a signal, and what comes later is dropped. */
static void interrupted(const char *path)
{
	int fd = open_file(path, O_RDWR);
	uint8_t *p = gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0), *q = gaia_mmap(NULL, 2 * PAGE, PROT_WRITE, 0, fd, 0, 0);
	char got[5];

	CHECK(p != MAP_FAILED && q != MAP_FAILED);
	say_and_wait("mapped"); /* stopped */
	interrupts(true, 0);
	for (int i = 0; i < 70; i++) { /* more than a daemon takes at once, in all */
		FAILS(gaia_macquire(p, PAGE, 0), EINTR);
		FAILS(gaia_madvise(p, PAGE, GAIA_MADV_NORMAL), EINTR);
	}
	memcpy(p, "p end", 5);
	FAILS(gaia_mrelease(p, PAGE, 0), EINTR);
	FAILS(gaia_msync(p, PAGE, MS_SYNC), EINTR);
	FAILS(gaia_munmap(p, PAGE), EINPROGRESS);
	FAILS(gaia_munmap(p, PAGE), EINVAL);
	interrupts(false, 0);
	say_and_wait("interrupted"); /* goes on */
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

/* A mapping whose daemon takes its time is undone when it comes, though nobody calls the library any more. */
static void interrupted_mmap(const char *path)
{
	int fd = open_file(path, O_RDWR);

	interrupts(true, 0);
	MMAP_FAILS(gaia_mmap(NULL, PAGE, PROT_WRITE, 0, fd, 0, 0), EINTR);
	MMAP_FAILS(gaia_mmap(NULL, 3 << 20, PROT_WRITE, 0, fd, 0, 1), EINTR);
	interrupts(false, 0);
	say_and_wait("interrupted");
}

/* The same among threads, which take over from each other what an interrupted one was doing. */
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

/* The daemon breaks the protocol. The mapping stays, and the connection does not. */
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

/* Prints why a mapping is refused. */
static void refused(const char *path)
{
	int fd = open_file(path, O_RDWR);

	CHECK(gaia_mmap(NULL, PAGE, PROT_READ, 0, fd, 0, 0) == MAP_FAILED);
	printf("%d %s\n", errno, gaia_error());
}

/* The frames that every implementation of the protocol is tested against. */

static size_t frame_named(const char *path, const char *name, uint8_t *out)
{
	static char line[1 << 14];
	size_t n = 0, len = strlen(name);
	FILE *f = fopen(path, "r");

	CHECK(f != NULL);
	while (fgets(line, sizeof line, f) != NULL) {
		if (strncmp(line, name, len) != 0 || line[len] != ' ')
			continue;
		for (const char *p = line + len + 1; p[0] > ' ' && p[1] > ' '; p += 2) {
			unsigned byte;
			CHECK(sscanf(p, "%2x", &byte) == 1);
			out[n++] = (uint8_t)byte;
		}
	}
	fclose(f);
	CHECK(n > 0);
	return n;
}

static void same(const char *path, const char *name, uint16_t type, uint64_t id, const uint8_t *body, size_t n)
{
	uint8_t want[4096], got[4096];
	size_t wanted = frame_named(path, name, want);

	gaiafs_put_header(got, type, id, n);
	memcpy(got + GAIAFS_HEADER, body, n);
	if (wanted != GAIAFS_HEADER + n || memcmp(want, got, wanted) != 0) {
		fprintf(stderr, "frame %s is encoded differently\n", name);
		_exit(1);
	}
}

static const uint8_t *body_of(const char *path, const char *name, uint16_t type, uint16_t flags, uint64_t id, size_t *n)
{
	static uint8_t frame[4096];
	struct gaiafs_header h;
	size_t len = frame_named(path, name, frame);

	CHECK(gaiafs_get_header(frame, len, &h));
	CHECK(h.type == type && h.flags == flags && h.id == id && h.length == len);
	CHECK(!gaiafs_get_header(frame, len - 1, &h) && !gaiafs_get_header(frame, 15, &h));
	*n = len - GAIAFS_HEADER;
	return frame + GAIAFS_HEADER;
}

static void wire(const char *path)
{
	static const char *const advice[] = { "advise-normal", "advise-random", "advise-sequential", "advise-willneed",
					      "advise-dontneed" };
	static const uint8_t no_uuid[GAIAFS_UUID];
	uint8_t b[GAIAFS_MAX_BODY], token[GAIAFS_TOKEN], uuid[GAIAFS_UUID];
	struct gaiafs_extents e;
	struct gaiafs_welcome w;
	struct gaiafs_mapped m;
	struct gaiafs_result r;
	struct gaiafs_grant g;
	const uint8_t *body;
	size_t n;

	for (unsigned i = 0; i < sizeof token; i++)
		token[i] = (uint8_t)i;
	for (unsigned i = 0; i < sizeof uuid; i++)
		uuid[i] = (uint8_t)(16 + i);
	same(path, "hello", GAIAFS_HELLO, 0, b, gaiafs_put_hello(b));
	same(path, "map", GAIAFS_MAP, 1, b, gaiafs_put_map(b, token, 3, uuid, GAIAFS_READ | GAIAFS_WRITE,
							   GAIAFS_MAP_LAZY | GAIAFS_MAP_LAUNDER, 0x200000, 0x123456789));
	same(path, "map-read", GAIAFS_MAP, 2, b, gaiafs_put_map(b, token, 0, no_uuid, GAIAFS_READ, 0, 0, 1));
	same(path, "acquire", GAIAFS_ACQUIRE, 3, b, gaiafs_put_range(b, 7, 4096, 8192, GAIAFS_ACQUIRE_LAUNDER));
	same(path, "release", GAIAFS_RELEASE, 4, b, gaiafs_put_range(b, 7, 0, 1, 0));
	same(path, "sync", GAIAFS_SYNC, 5, b, gaiafs_put_range(b, 7, 0, 0x123456789, GAIAFS_SYNC_DURABLE));
	for (uint32_t i = 0; i < 5; i++)
		same(path, advice[i], GAIAFS_ADVISE, 6 + i, b, gaiafs_put_range(b, 7, 0, 4096, i));
	same(path, "unmap", GAIAFS_UNMAP, 11, b, gaiafs_put_unmap(b, 7));
	same(path, "status", GAIAFS_STATUS, 12, token, sizeof token);
	same(path, "ping", GAIAFS_PING, UINT64_C(0xfedcba9876543210), b, 0);

	body = body_of(path, "welcome", GAIAFS_WELCOME, 0, 0, &n);
	CHECK(gaiafs_get_welcome(body, n, &w) && w.version == 1 && w.max_requests == 128 && w.kinds == 3);
	CHECK(!gaiafs_get_welcome(body, n - 1, &w));
	body = body_of(path, "mapped", GAIAFS_MAPPED, GAIAFS_MORE, 1, &n);
	CHECK(gaiafs_get_mapped(body, n, &m));
	CHECK(m.mapping == 7 && m.kind == 1 && m.device == 3 && m.size == 0x123456000 && m.extents == 2);
	CHECK(memcmp(m.uuid, no_uuid, sizeof no_uuid) == 0);
	CHECK(!gaiafs_get_mapped(body, n + 1, &m));
	body = body_of(path, "mapped-unknown-size", GAIAFS_MAPPED, GAIAFS_MORE, 2, &n);
	CHECK(gaiafs_get_mapped(body, n, &m));
	CHECK(m.mapping == 8 && m.kind == 2 && m.device == 0 && m.size == -1 && m.extents == 1);
	CHECK(memcmp(m.uuid, uuid, sizeof uuid) == 0);
	body = body_of(path, "extents", GAIAFS_EXTENTS, 0, 1, &n);
	CHECK(gaiafs_get_extents(body, n, &e) && e.first == 0 && e.count == 2);
	CHECK(e.place[0].off == 0x200000 && e.place[0].size == 0x200000);
	CHECK(e.place[1].off == 0x400000 && e.place[1].size == 0x200000);
	CHECK(!gaiafs_get_extents(body, n - 1, &e) && !gaiafs_get_extents(body, 7, &e));
	body = body_of(path, "result", GAIAFS_RESULT, 0, 3, &n);
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == 0 && r.pages == 0x1234567890 && r.text_len == 0);
	body = body_of(path, "result-enomem", GAIAFS_RESULT, 0, 4, &n);
	static const char text[] = "no room: 1 GiB budget of device 3 is spent \xc3\xa9";
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == ENOMEM && r.pages == 0);
	CHECK(r.text_len == sizeof text - 1 && memcmp(r.text, text, r.text_len) == 0);
	CHECK(!gaiafs_get_result(body, n - 1, &r) && !gaiafs_get_result(body, 15, &r));
	body = body_of(path, "error", GAIAFS_ERROR, 0, 0, &n);
	CHECK(gaiafs_get_result(body, n, &r) && r.errnum == ETIMEDOUT);
	CHECK(r.text_len == 16 && memcmp(r.text, "no HELLO in time", 16) == 0);
	(void)body_of(path, "document", GAIAFS_DOCUMENT, GAIAFS_MORE, 12, &n);
	CHECK(n == 5);

	uint8_t grant[512];
	CHECK(gaiafs_get_grant(grant, frame_named(path, "ioctl-grant", grant), &g));
	CHECK(!g.status && memcmp(g.token, token, sizeof token) == 0 && strcmp(g.socket, "/run/gaiafs/x.sock") == 0);
	CHECK(gaiafs_get_grant(grant, frame_named(path, "ioctl-grant-status", grant), &g) && g.status);
	memset(grant + 24, 'x', 104);
	CHECK(!gaiafs_get_grant(grant, 128, &g)); /* a path without an end */
	CHECK(!gaiafs_get_grant(grant, 127, &g));

	CHECK(gaiafs_release_at_least("6.16.0", 6, 16) && gaiafs_release_at_least("6.18.3-x", 6, 16));
	CHECK(gaiafs_release_at_least("7.0", 6, 16) && gaiafs_release_at_least("10.2-foo", 6, 16));
	CHECK(!gaiafs_release_at_least("6.15.9", 6, 16) && !gaiafs_release_at_least("5.20.1", 6, 16));
	CHECK(!gaiafs_release_at_least("6", 6, 16) && !gaiafs_release_at_least("", 6, 16));
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
	else if (strcmp(what, "breach") == 0)
		breach(path);
	else if (strcmp(what, "refused") == 0)
		refused(path);
	else if (strcmp(what, "wire") == 0)
		wire(path);
	else
		CHECK(!"a scenario of that name");
	return 0;
}
