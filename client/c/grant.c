/* What the library asks the kernel about a file: the grant and the flush. */
#define _GNU_SOURCE
#include "internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define IOC_GRANT _IOR('G', 0x01, uint8_t[GAIAFS_GRANT_SIZE])
#define IOC_GRANT_SHOWN _IOWR('G', 0x02, uint8_t[GAIAFS_GRANT_SIZE])

int gaiafs_grant_patience = 30;

/*
 * The ioctl waits for the daemon, and only the end of the process interrupts it. So a thread makes the ioctl. If the
 * caller gives up, the thread stays, and the token that comes later is not used: the daemon forgets it.
 *
 * The caller reads a timer, which the thread lets expire when it is done. Calls with a time limit, such as
 * sem_timedwait, end after every signal handler; a read ends after those that do not restart calls.
 */
struct asked {
	int fd, err, timer;
	atomic_int owners; /* the caller and the thread */
	atomic_bool done;
	uint8_t answer[GAIAFS_GRANT_SIZE];
};

/*
 * ask_mount makes the ioctl and returns 0 or its errno. If the kernel opens the files of the mount, the daemon does not
 * know how fd was opened. Then it answers EBADFD, and the program shows it the descriptor.
 */
static int ask_mount(int fd, uint8_t *answer)
{
	if (ioctl(fd, IOC_GRANT, answer) == 0)
		return 0;
	if (errno != EBADFD)
		return errno;
	memset(answer, 0, GAIAFS_GRANT_SIZE);
	for (int i = 0; i < 4; i++)
		answer[i] = (uint8_t)((unsigned)fd >> 8 * i);
	return ioctl(fd, IOC_GRANT_SHOWN, answer) != 0 ? errno : 0;
}

static void disown(struct asked *a)
{
	if (atomic_fetch_sub(&a->owners, 1) == 1) {
		close(a->timer);
		free(a);
	}
}

static void *ask(void *argument)
{
	const struct itimerspec now = { .it_value.tv_nsec = 1 };
	struct asked *a = argument;

	a->err = ask_mount(a->fd, a->answer);
	atomic_store(&a->done, true);
	(void)timerfd_settime(a->timer, 0, &now, NULL);
	disown(a);
	return NULL;
}

char gaiafs_state_of(const char *pid)
{
	char name[64], text[512];
	FILE *in;
	size_t n;
	const char *end;

	(void)snprintf(name, sizeof name, "/proc/%.20s/stat", pid);
	in = fopen(name, "re");
	if (in == NULL)
		return 0;
	n = fread(text, 1, sizeof text - 1, in);
	text[n] = '\0';
	fclose(in);
	end = strrchr(text, ')');
	return end != NULL && end[1] == ' ' ? end[2] : 0;
}

/*
 * serves reports whether a process serves the mount with this device number. It needs Linux 6.18, and the right to read
 * the process's fdinfo.
 */
static bool serves(const char *pid, unsigned device)
{
	char name[64], line[128];
	unsigned number;
	struct dirent *e;
	bool found = false;
	DIR *all;

	(void)snprintf(name, sizeof name, "/proc/%.20s/fdinfo", pid);
	all = opendir(name);
	while (all != NULL && !found && (e = readdir(all)) != NULL) {
		char path[128];
		FILE *in;

		(void)snprintf(path, sizeof path, "%.40s/%.20s", name, e->d_name);
		in = e->d_name[0] == '.' ? NULL : fopen(path, "re");
		while (in != NULL && !found && fgets(line, sizeof line, in) != NULL)
			found = sscanf(line, "fuse_connection: %u", &number) == 1 && number == device;
		if (in != NULL)
			fclose(in);
	}
	if (all != NULL)
		closedir(all);
	return found;
}

/* silent fails with a message that the daemon has not answered, which process it is, and what helps. */
static int silent(int fd, struct gaiafs_fail *f)
{
	char pid[21] = "", state = 0;
	struct statx st;
	struct dirent *e;
	DIR *all = NULL;

	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &st) == 0)
		all = opendir("/proc");
	while (all != NULL && state != 'T' && (e = readdir(all)) != NULL)
		if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && serves(e->d_name, st.stx_dev_minor)) {
			(void)snprintf(pid, sizeof pid, "%.20s", e->d_name);
			state = gaiafs_state_of(pid);
		}
	if (all != NULL)
		closedir(all);
	if (state == 'T' || state == 't')
		return gaiafs_failed(f, ETIMEDOUT,
				     "the daemon has not answered for %d s: process %s is stopped, and 'kill -CONT %s' continues it",
				     gaiafs_grant_patience, pid, pid);
	if (state != 0)
		return gaiafs_failed(f, ETIMEDOUT, "the daemon has not answered for %d s: process %s is busy or waits for something",
				     gaiafs_grant_patience, pid);
	return gaiafs_failed(f, ETIMEDOUT, "the daemon has not answered for %d s: 'gaiafs status' of the mountpoint says why",
			     gaiafs_grant_patience);
}

/*
 * ask_patiently makes the ioctl and returns 0 or its errno. If a signal or the time limit ended the wait, it returns -1
 * with *f set.
 */
static int ask_patiently(int fd, uint8_t *answer, struct gaiafs_fail *f)
{
	const struct itimerspec limit = { .it_value.tv_sec = gaiafs_grant_patience };
	struct asked *a = calloc(1, sizeof *a);
	struct gaiafs_fail unused;
	pthread_t thread;
	uint64_t expired;
	bool interrupted;
	int err;

	if (a == NULL)
		return ENOMEM;
	a->fd = fd;
	a->owners = 2;
	a->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
	if (a->timer < 0 || timerfd_settime(a->timer, 0, &limit, NULL) != 0 ||
	    gaiafs_start_thread(ask, a, &thread, &unused) != 0) { /* without a timer or a thread, wait here */
		err = ask_mount(fd, answer);
		if (a->timer >= 0)
			close(a->timer);
		free(a);
		return err;
	}
	interrupted = read(a->timer, &expired, sizeof expired) < 0;
	if (atomic_load(&a->done)) {
		(void)pthread_join(thread, NULL); /* the program may fork next, and should have no extra thread then */
		err = a->err;
		memcpy(answer, a->answer, sizeof a->answer);
		disown(a);
		return err;
	}
	if (interrupted)
		(void)gaiafs_failed(f, EINTR, "a signal interrupted the wait for the mount to give access");
	else
		(void)silent(fd, f);
	(void)pthread_detach(thread);
	disown(a);
	return -1;
}

static int ioctl_grant(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f)
{
	uint8_t answer[GAIAFS_GRANT_SIZE] = { 0 };
	int err = ask_patiently(fd, answer, f);

	if (err < 0)
		return f->errnum;
	if (err != 0) {
		errno = err;
		if (errno == ENOTTY || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)
			return gaiafs_failed(f, errno, "it is not on a gaiafs mount (the command gaiafs mount makes one)");
		if (errno == ESRCH)
			return gaiafs_failed(f, errno, "the daemon does not see this process, which is in another PID namespace: "
					     "run it where the daemon can see it, or mount without --kernel-opens");
		return gaiafs_failed(f, errno, "the mount gave no access: %s", strerror(errno));
	}
	if (!gaiafs_get_grant(answer, sizeof answer, g))
		return gaiafs_failed(f, EPROTO, "the mount's answer is not one that this library knows");
	return 0;
}

int (*gaiafs_request_grant)(int, struct gaiafs_grant *, struct gaiafs_fail *) = ioctl_grant;

int gaiafs_grant_file(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f)
{
	int err = gaiafs_request_grant(fd, g, f);

	return err == 0 && g->status ? gaiafs_failed(f, EINVAL, "the descriptor is a directory") : err;
}

bool gaiafs_release_at_least(const char *release, unsigned major, unsigned minor)
{
	unsigned got[2] = { 0, 0 };

	for (int i = 0; i < 2; i++) {
		for (; *release >= '0' && *release <= '9' && got[i] < 1u << 20; release++)
			got[i] = 10 * got[i] + (unsigned)(*release - '0');
		if (*release != '.')
			break;
		release++;
	}
	return got[0] > major || (got[0] == major && got[1] >= minor);
}

/* Since Linux 6.16, sync_file_range on a FUSE file returns only after the daemon has served the write. */
static bool kernel_waits;
static pthread_once_t kernel_once = PTHREAD_ONCE_INIT;

static void look_at_kernel(void)
{
	struct utsname u;

	kernel_waits = uname(&u) == 0 && gaiafs_release_at_least(u.release, 6, 16);
}

int gaiafs_flush_kernel(int fd, uint64_t off, uint64_t n, bool *launder, struct gaiafs_fail *f)
{
	const unsigned all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;

	pthread_once(&kernel_once, look_at_kernel);
	while (sync_file_range(fd, (off64_t)off, (off64_t)n, all) != 0)
		if (errno != EINTR)
			return gaiafs_failed(f, errno, "the kernel's dirty pages could not be written: %s", strerror(errno));
	*launder = !kernel_waits;
	return 0;
}

void gaiafs_start_flush(int fd, uint64_t off, uint64_t n)
{
	(void)sync_file_range(fd, (off64_t)off, (off64_t)n, SYNC_FILE_RANGE_WRITE);
}
