/* Common code of the test programs. */
#define _GNU_SOURCE
#include "../../internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "line %d: %s: errno %d, \"%s\"\n", __LINE__, #condition, errno, gaia_error());  \
			_exit(1);                                                                                      \
		}                                                                                                      \
	} while (0)

/* FAILS checks that the call returns -1 with that errno and a message. */
#define FAILS(call, want)                                                                                              \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		CHECK((call) == -1);                                                                                   \
		CHECK(errno == (want));                                                                                \
		CHECK(gaia_error()[0] != '\0');                                                                        \
	} while (0)

#define MMAP_FAILS(call, want)                                                                                         \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		CHECK((call) == MAP_FAILED);                                                                           \
		CHECK(errno == (want));                                                                                \
		CHECK(gaia_error()[0] != '\0');                                                                        \
	} while (0)

enum { PAGE = 4096 };

static inline int ask_for_grant(int fd, struct gaiafs_grant *g, struct gaiafs_fail *f)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	uint8_t one = 1, answer[256];
	struct iovec iov = { &one, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
			      .msg_controllen = sizeof control.bytes };
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	ssize_t n;

	CHECK(s >= 0);
	snprintf(address.sun_path, sizeof address.sun_path, "%s", getenv("GAIAFS_TEST_GRANTS"));
	while (connect(s, (struct sockaddr *)&address, sizeof address) != 0)
		CHECK(errno == EINTR);
	memset(&control, 0, sizeof control);
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	CHECK(sendmsg(s, &msg, 0) == 1);
	while ((n = recv(s, answer, sizeof answer, 0)) < 0)
		CHECK(errno == EINTR);
	close(s);
	CHECK(n > 0);
	if (!gaiafs_get_grant(answer, (size_t)n, g))
		return gaiafs_failed(f, EPROTO, "no grant");
	if (getenv("GAIAFS_TEST_SOCKET") != NULL) /* use another daemon than the grant's */
		snprintf(g->socket, sizeof g->socket, "%s", getenv("GAIAFS_TEST_SOCKET"));
	return 0;
}

static inline int open_file(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

/* The file's bytes, as the tests write them. */
static inline uint8_t at(size_t i)
{
	return (uint8_t)(i / 7);
}

static inline void wait_for(pid_t child)
{
	int status;

	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void ignore_signal(int number)
{
	(void)number;
}

/* interrupts sends a signal every few milliseconds, or stops that. The handler restarts calls, or does not. */
static inline void interrupts(bool come, int flags)
{
	struct sigaction a = { .sa_handler = ignore_signal, .sa_flags = flags };
	struct itimerval every = { { 0, come ? 3000 : 0 }, { 0, come ? 3000 : 0 } };

	CHECK(sigaction(SIGALRM, &a, NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
}

static inline void say_and_wait(const char *word)
{
	char b;

	printf("%s\n", word);
	fflush(stdout);
	while (read(0, &b, 1) != 1)
		CHECK(errno == EINTR);
}
