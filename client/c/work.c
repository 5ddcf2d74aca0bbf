/*
 * The library's own threads. They do what must not be done in place: in a CUDA host function, which must not wait, or
 * in a call that a signal has ended. They are started on demand, up to MOST_THREADS, and never end. All signals are
 * blocked in them.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

enum { MOST_THREADS = 8 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held for a few instructions; no other is taken under it */
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;

/* Guarded by lock. */
static struct gaiafs_job *first, **last = &first;
static unsigned queued, idle, threads;

static void *serve(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&lock);
	for (;;) {
		struct gaiafs_job *j = first;

		if (j == NULL) {
			idle++;
			pthread_cond_wait(&more, &lock);
			idle--;
			continue;
		}
		first = j->next;
		if (first == NULL)
			last = &first;
		queued--;
		pthread_mutex_unlock(&lock);
		j->run(j); /* j may be freed now */
		pthread_mutex_lock(&lock);
	}
	return NULL;
}

int gaiafs_start_thread(void *(*run)(void *), void *argument, pthread_t *started, struct gaiafs_fail *f)
{
	sigset_t all, old;
	pthread_attr_t a;
	pthread_t t;
	int err = pthread_attr_init(&a);

	if (err == 0) {
		if (started == NULL)
			(void)pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
		(void)sigfillset(&all);
		(void)pthread_sigmask(SIG_SETMASK, &all, &old);
		err = pthread_create(started != NULL ? started : &t, &a, run, argument);
		(void)pthread_sigmask(SIG_SETMASK, &old, NULL);
		(void)pthread_attr_destroy(&a);
	}
	return err == 0 ? 0 : gaiafs_failed(f, err, "a thread could not be started: %s", strerror(err));
}

static int start_locked(struct gaiafs_fail *f)
{
	int err = gaiafs_start_thread(serve, NULL, NULL, f);

	threads += err == 0;
	return err;
}

int gaiafs_prepare_work(struct gaiafs_fail *f)
{
	int err = 0;

	pthread_mutex_lock(&lock);
	if (threads == 0)
		err = start_locked(f);
	pthread_mutex_unlock(&lock);
	return err;
}

void gaiafs_post(struct gaiafs_job *j)
{
	struct gaiafs_fail f;

	j->next = NULL;
	pthread_mutex_lock(&lock);
	*last = j;
	last = &j->next;
	queued++;
	if (queued > idle && threads < MOST_THREADS)
		(void)start_locked(&f); /* if that fails, an existing thread runs the job later */
	else
		pthread_cond_signal(&more);
	pthread_mutex_unlock(&lock);
}

void gaiafs_work_after_fork(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	more = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	first = NULL; /* the jobs are left to the parent's threads */
	last = &first;
	queued = idle = threads = 0;
}
