/* What the library asks of the kernel about the file: the grant and the flush. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/utsname.h>

#define IOC_GRANT _IOR('G', 0x01, uint8_t[GAIAFS_GRANT_SIZE])

static int ioctl_grant(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f)
{
	uint8_t answer[GAIAFS_GRANT_SIZE] = { 0 };

	if (ioctl(fd, IOC_GRANT, answer) != 0) {
		if (errno == ENOTTY || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)
			return gaiafs_failed(f, errno, "it is not on a gaiafs mount (the command gaiafs mount makes one)");
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

	return err == 0 && g->status ? gaiafs_failed(f, EINVAL, "the descriptor is of a directory") : err;
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

/* Since Linux 6.16 sync_file_range on a FUSE file returns only after the write was served. */
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
