/* Frames with descriptors that wait for the thread that will take them. A forked child closes its copies. */
#define _GNU_SOURCE
#include "conn.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct gaiafs_parcel *parcels; /* the list of all; guarded by gaiafs_fd_lock */

struct gaiafs_parcel *gaiafs_parcel_of(const struct gaiafs_frame *frame)
{
	struct gaiafs_parcel *p = malloc(sizeof *p + frame->body_len);

	if (p == NULL) {
		for (size_t i = 0; i < frame->nfds; i++)
			close(frame->fds[i]);
		return NULL;
	}
	p->frame = *frame;
	memcpy(p->body, frame->body, frame->body_len);
	memcpy(p->fds, frame->fds, frame->nfds * sizeof *p->fds);
	p->frame.body = p->body;
	p->frame.fds = p->fds;
	p->next = NULL;
	p->up = parcels;
	p->back = &parcels;
	if (parcels != NULL)
		parcels->back = &p->up;
	parcels = p;
	return p;
}

void gaiafs_parcels_free(struct gaiafs_parcel *p)
{
	while (p != NULL) {
		struct gaiafs_parcel *next = p->next;

		pthread_mutex_lock(&gaiafs_fd_lock);
		*p->back = p->up;
		if (p->up != NULL)
			p->up->back = p->back;
		for (size_t i = 0; i < p->frame.nfds; i++)
			close(p->fds[i]);
		pthread_mutex_unlock(&gaiafs_fd_lock);
		free(p);
		p = next;
	}
}

void gaiafs_parcels_after_fork(void)
{
	for (struct gaiafs_parcel *p = parcels; p != NULL; p = p->up)
		for (size_t i = 0; i < p->frame.nfds; i++)
			close(p->fds[i]);
	parcels = NULL; /* not freed: threads that the child does not have may be using them */
}
