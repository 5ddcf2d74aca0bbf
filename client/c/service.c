/*
 * The service connection: the process's second connection, on which the daemon sends requests. One thread reads them
 * all the time and answers; all signals are blocked in it. It waits only for the daemon. The connection is optional:
 * without it, the daemon leaves the process's memory where it is.
 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* How many brackets an ANSWER can have. If it has this many, the daemon asks again. */
enum { MOST_ENDED = 256, ANSWER = 16 + GAIAFS_ENDED * MOST_ENDED };
_Static_assert(GAIAFS_HEADER + ANSWER <= GAIAFS_MAX_REQUEST, "a daemon does not take such an ANSWER");

/* The nanoseconds that the thread polls for the next MOVE of a bracket: copying an extent takes 1 ms. */
enum { NEXT_MOVE = 2000000 };

/* answer carries out a request of the daemon's and encodes the answer. It returns the size of the body. */
static size_t answer(const struct gaiafs_conn *c, const struct gaiafs_frame *frame, int fd, uint8_t *body)
{
	struct gaiafs_ended ended[MOST_ENDED];
	struct gaiafs_move m;
	size_t n;
	int err;

	switch (frame->header.type) {
	case GAIAFS_CHECK:
		return gaiafs_put_answer(body, 0, 0);
	case GAIAFS_RECALL:
		n = gaiafs_keep_recall(c, ended, MOST_ENDED);
		return gaiafs_put_ended(body, ended, n, (gaiafs_conn_features(c) & GAIAFS_FEATURE_USES) != 0);
	case GAIAFS_MOVE:
		if (!gaiafs_get_move(frame->body, frame->body_len, &m))
			return gaiafs_put_answer(body, EPROTO, 0);
		err = gaiafs_move(c, &m, fd);
		return gaiafs_put_answer(body, (uint32_t)err, err == 0 ? m.extent.generation : err == EPERM ? m.previous : 0);
	default:
		return gaiafs_put_answer(body, ENOSYS, 0);
	}
}

/* hear takes a frame and answers it. *attached: the daemon has accepted the ATTACH. False: the connection is over. */
static bool hear(const struct gaiafs_conn *c, int fd, uint8_t *record, bool *attached)
{
	int fds[GAIAFS_MAX_EXTENTS];
	uint8_t body[ANSWER];
	struct gaiafs_frame frame;
	struct gaiafs_fail f = { 0 };
	ssize_t n;
	char byte;
	bool on;

	/*
	 * While the program asks for a bracket, a MOVE follows another one, and the program waits for it. Other requests
	 * are not urgent, so the thread sleeps at once.
	 */
	if (*attached)
		(void)gaiafs_look(fd, NEXT_MOVE, &c->uses);
	while ((n = recv(fd, &byte, 1, MSG_PEEK)) < 0 && errno == EINTR)
		continue;
	if (n <= 0 || gaiafs_hear(fd, record, -1, &frame, fds, &f) != 0)
		return false;
	/* A child forked during a MOVE keeps a copy of the descriptor, and with it the memory, until the child ends. */
	pthread_mutex_unlock(&gaiafs_fd_lock);
	on = *attached || gaiafs_take_result(&frame, &f) == 0;
	if (*attached && frame.header.id != 0)
		n = (ssize_t)answer(c, &frame, frame.nfds > 0 ? fds[0] : -1, body);
	for (size_t i = 0; i < frame.nfds; i++)
		close(fds[i]); /* before the answer, so that no descriptor keeps the memory then */
	if (*attached && frame.header.id != 0)
		on = gaiafs_say_rest(fd, GAIAFS_ANSWER, frame.header.id, body, 0,
				     &(struct gaiafs_rest){ body, (size_t)n, -1 }) == 0;
	*attached = true;
	return on;
}

/* open_socket makes the socket and stores it in c, where fork and gaiafs_lose find it. */
static int open_socket(struct gaiafs_conn *c)
{
	int fd = -1;

	pthread_mutex_lock(&gaiafs_table_lock);
	if (c->state == READY)
		fd = c->service = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	pthread_mutex_unlock(&gaiafs_table_lock);
	return fd;
}

/*
 * The thread's argument. The thread itself allocates nothing: the program does not know of the thread and may fork at
 * any moment, and some allocators then deadlock in the child.
 */
struct start {
	struct gaiafs_conn *conn;
	uint8_t record[GAIAFS_MAX_FRAME];
};

static void *serve(void *argument)
{
	struct start *given = argument;
	struct gaiafs_conn *c = given->conn;
	uint8_t *record = given->record;
	struct gaiafs_fail f = { 0 };
	struct gaiafs_welcome w;
	bool attached = false;
	int fd = open_socket(c);

	if (fd >= 0 && gaiafs_greet(fd, c->socket, record, &w, &f) == 0 &&
	    gaiafs_say(fd, GAIAFS_ATTACH, 1, c->welcome.key, GAIAFS_KEY) == 0)
		while (hear(c, fd, record, &attached))
			continue;
	pthread_mutex_lock(&gaiafs_table_lock);
	c->service = -1;
	if (fd >= 0)
		close(fd);
	pthread_mutex_unlock(&gaiafs_table_lock);
	free(given);
	gaiafs_conn_unref(c);
	return NULL;
}

void gaiafs_conn_serve(struct gaiafs_conn *c)
{
	struct gaiafs_fail f;
	struct start *given;
	bool first;

	if ((c->welcome.offered & GAIAFS_FEATURE_SERVICE) == 0)
		return;
	pthread_mutex_lock(&gaiafs_table_lock);
	first = !c->served;
	c->served = true;
	c->refs += first; /* the thread's */
	pthread_mutex_unlock(&gaiafs_table_lock);
	if (!first)
		return;
	given = malloc(sizeof *given);
	if (given != NULL)
		given->conn = c;
	if (given == NULL || gaiafs_start_thread(serve, given, NULL, &f) != 0) {
		free(given);
		gaiafs_conn_unref(c);
	}
}
