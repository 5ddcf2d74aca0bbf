/*
 * Measures the minimum cost of FUSE for many small files, as a baseline for a mount of gaiafs. Build it with libfuse
 * 3.12 or later:
 *
 *     cc -O2 floor.c -o floor $(pkg-config --cflags --libs fuse3) -pthread
 *     ./floor no-open SOURCE MOUNTPOINT &     # the kernel opens files itself, as with gaiafs mount --kernel-opens
 *     ./floor open SOURCE MOUNTPOINT &        # OPEN and RELEASE are requests
 *     find SOURCE -type f | sed s,^SOURCE,MOUNTPOINT, | ./floor read NAME [PID]    # four threads read them
 *
 * The mounts only look up names, open and read. read prints processor time: its own, and that of the process that
 * serves the mount. Run `echo 2 >/proc/sys/vm/drop_caches` first to make the kernel forget files.
 */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 20, READERS = 4, KEPT = 60 };

static int source, no_open;
static char *paths[MOST]; /* of nodes, below source, or of files to read */
static int count = 2;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	char path[4096];
	struct fuse_entry_param e = {.attr_timeout = KEPT, .entry_timeout = KEPT};

	snprintf(path, sizeof path, "%s/%s", parent == 1 ? "." : paths[parent], name);
	if (fstatat(source, path, &e.attr, AT_SYMLINK_NOFOLLOW)) {
		fuse_reply_err(req, errno);
		return;
	}
	pthread_mutex_lock(&mutex);
	e.ino = count++;
	pthread_mutex_unlock(&mutex);
	if (e.ino >= MOST)
		exit(1);
	paths[e.ino] = strdup(path);
	fuse_reply_entry(req, &e);
}

static void get_attributes(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
	struct stat st;

	(void)file;
	if (fstatat(source, ino == 1 ? "." : paths[ino], &st, AT_SYMLINK_NOFOLLOW))
		fuse_reply_err(req, errno);
	else
		fuse_reply_attr(req, &st, KEPT);
}

static void open_file(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
	int fd = no_open ? -1 : openat(source, paths[ino], O_RDONLY);

	if (fd < 0) {
		fuse_reply_err(req, no_open ? ENOSYS : errno);
		return;
	}
	file->fh = fd;
	file->keep_cache = 1;
	fuse_reply_open(req, file);
}

static void release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
	(void)ino;
	close(file->fh);
	fuse_reply_err(req, 0);
}

static void read_file(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *file)
{
	static __thread char buf[1 << 20];
	int fd = no_open ? openat(source, paths[ino], O_RDONLY) : (int)file->fh;
	ssize_t got = pread(fd, buf, size < sizeof buf ? size : sizeof buf, off);

	if (no_open)
		close(fd);
	if (got < 0)
		fuse_reply_err(req, EIO);
	else
		fuse_reply_buf(req, buf, got);
}

static void flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
	(void)ino, (void)file;
	fuse_reply_err(req, ENOSYS);
}

static int serve(const char *at)
{
	static const struct fuse_lowlevel_ops ops = {
		.lookup = lookup, .getattr = get_attributes, .open = open_file, .release = release, .read = read_file,
		.flush = flush,
	};
	char *options[] = {"floor", "-oro,default_permissions"};
	struct fuse_args args = FUSE_ARGS_INIT(2, options);
	struct fuse_session *session = fuse_session_new(&args, &ops, sizeof ops, NULL);
	struct fuse_loop_config *loop = fuse_loop_cfg_create();
	int failed;

	if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, at))
		return 1;
	failed = fuse_session_loop_mt(session, loop);
	fuse_session_unmount(session);
	return failed != 0;
}

static void *reader(void *first)
{
	static __thread char buf[1 << 20];

	for (int i = (int)(long)first; i < count; i += READERS) {
		int fd = open(paths[i], O_RDONLY | O_CLOEXEC);

		if (fd < 0 || read(fd, buf, sizeof buf) < 0) {
			perror(paths[i]);
			exit(1);
		}
		close(fd);
	}
	return NULL;
}

static double seconds(clockid_t clock)
{
	struct timespec t = {0, 0};

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static int read_all(const char *list, int server)
{
	static char line[4096];
	clockid_t serving = CLOCK_PROCESS_CPUTIME_ID;
	pthread_t threads[READERS];
	double began, mine, its;

	count = 0;
	while (count < MOST && fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\n")] = 0;
		paths[count++] = strdup(line);
	}
	if (!count || (server && clock_getcpuclockid(server, &serving)))
		return 1;
	began = seconds(CLOCK_MONOTONIC), mine = seconds(CLOCK_PROCESS_CPUTIME_ID), its = seconds(serving);
	for (long i = 0; i < READERS; i++)
		pthread_create(&threads[i], NULL, reader, (void *)i);
	for (int i = 0; i < READERS; i++)
		pthread_join(threads[i], NULL);
	printf("%s: %.0f files/s, processor time of a file: reader %.1f us", list,
	       count / (seconds(CLOCK_MONOTONIC) - began), (seconds(CLOCK_PROCESS_CPUTIME_ID) - mine) * 1e6 / count);
	if (server)
		printf(", server %.1f us", (seconds(serving) - its) * 1e6 / count);
	puts("");
	return 0;
}

int main(int argc, char **argv)
{
	if (argc >= 3 && !strcmp(argv[1], "read"))
		return read_all(argv[2], argc > 3 ? atoi(argv[3]) : 0);
	if (argc != 4 || (strcmp(argv[1], "open") && strcmp(argv[1], "no-open"))) {
		fprintf(stderr, "the beginning of floor.c says how to use it\n");
		return 2;
	}
	no_open = argv[1][0] == 'n';
	source = open(argv[2], O_RDONLY | O_DIRECTORY);
	return source < 0 ? 1 : serve(argv[3]);
}
