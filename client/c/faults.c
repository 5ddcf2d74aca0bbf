/*
 * gaia_explain_faults: a message about a CPU load or store that ends a program. The handler interrupts the thread at
 * any point. So it allocates nothing, waits at most a second for a lock, and writes its line in one call.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int signals[] = { SIGSEGV, SIGBUS };
static struct sigaction before[sizeof signals / sizeof signals[0]]; /* immutable once the handlers are installed */

/* readable asks the kernel, which reads the set of signals before it rejects the operation, ~0, as unknown. */
static bool readable(const void *addr)
{
	const uintptr_t at = (uintptr_t)addr & ~(uintptr_t)7;

	return syscall(SYS_rt_sigprocmask, ~0UL, at, NULL, 8) == 0 || errno != EFAULT;
}

/* name_of returns the path of a descriptor, in room, or "a file". */
static const char *name_of(int fd, char *room, size_t size)
{
	char link[32];
	ssize_t n;

	(void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd); /* takes no lock for a number */
	n = fd < 0 ? -1 : readlink(link, room, size - 1);
	if (n < 0)
		return "a file";
	room[n] = '\0';
	return room;
}

static const char *reason(const struct gaiafs_mapping *m, const void *addr)
{
	if (m->generation != gaiafs_generation)
		return "which belongs to the process that this one was forked from: map the file here";
	if (m->kind == &gaiafs_held_kind)
		return "which the device holds and this process did not map (GAIA_MAP_HOLD)";
	if (m->kind->open != NULL)
		return "which is memory of a GPU, and not for the CPU: use gaia_read and gaia_write, or a kernel";
	if (!readable(addr))
		return m->movable ? "whose memory moves, and no bracket uses it: enclose the access in gaia_use and gaia_done "
				    "(gaiafs.use in Python)" :
				    "which has no memory there";
	if (!m->writable)
		return "which is only read, by a store: map it for writing";
	return "whose memory the kernel could not give";
}

/*
 * lock_soon takes the table's lock, which other threads hold only briefly. A faulting thread that holds the lock itself
 * would wait for ever, so this gives up after a second.
 */
static bool lock_soon(void)
{
	const struct timespec moment = { .tv_nsec = 1000000 };

	for (int tries = 0; tries < 1000; tries++) {
		if (pthread_mutex_trylock(&gaiafs_table_lock) == 0)
			return true;
		(void)nanosleep(&moment, NULL);
	}
	return false;
}

/* explain prints what is known of an address, if a mapping contains it. */
static void explain(const void *addr)
{
	char line[GAIAFS_MAX_TEXT + 1024], room[512];
	const struct gaiafs_mapping *m;
	int n = 0;

	if (!lock_soon())
		return;
	m = gaiafs_table_at_locked(addr);
	if (m != NULL)
		n = snprintf(line, sizeof line, "gaiafs: fault at %p, byte %llu of a mapping of %s on device %d, %s\n", addr,
			     (unsigned long long)((uintptr_t)addr - (uintptr_t)m->base), name_of(m->fd, room, sizeof room), m->dev,
			     reason(m, addr));
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (n > 0 && write(STDERR_FILENO, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1) < 0)
		return; /* nowhere to report it */
}

static void handle(int signal, siginfo_t *info, void *context)
{
	const struct sigaction *old = &before[signal == SIGSEGV ? 0 : 1];
	int saved = errno;

	if (info->si_code > 0) /* from the kernel, not sent by a process */
		explain(info->si_addr);
	errno = saved;
	if (old->sa_flags & SA_SIGINFO) {
		old->sa_sigaction(signal, info, context);
	} else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
		old->sa_handler(signal);
	} else {
		(void)sigaction(signal, old, NULL); /* the access is repeated, and ends the program */
		if (info->si_code <= 0)
			(void)raise(signal);
	}
}

static int installed; /* the errno of the installation, or 0 */

static void install(void)
{
	struct sigaction a = { .sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };

	(void)sigemptyset(&a.sa_mask);
	for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
		if (sigaction(signals[i], NULL, &before[i]) != 0 || sigaction(signals[i], &a, NULL) != 0)
			installed = errno;
}

int gaia_explain_faults(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct gaiafs_fail f = { 0 };
	int state;

	gaiafs_enter(&state);
	(void)pthread_once(&once, install);
	if (installed != 0)
		(void)gaiafs_failed(&f, installed, "the handlers could not be installed: %s", strerror(installed));
	return gaiafs_leave(state, f.errnum, &f);
}
