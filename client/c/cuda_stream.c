/* Work in GPU streams: host functions, the words that streams wait for, and captures. */
#define _GNU_SOURCE
#include "cuda.h"

#include <errno.h>
#include <stdlib.h>

/*
 * Words lie in pages that are registered once, for all contexts, and stay. The pages are shared memory, so that after a
 * fork the GPU still reads the parent's pages.
 */
enum { PAGE = 4096, WORDS = PAGE / sizeof(uint32_t) };

static pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER; /* not held during calls of libcuda */
static struct gaiafs_word *free_words;                         /* guarded by words_lock */

static void word_done(struct gaiafs_word *w)
{
	__atomic_store_n(w->at, w->value, __ATOMIC_RELEASE);
	pthread_mutex_lock(&words_lock);
	w->next = free_words;
	free_words = w;
	pthread_mutex_unlock(&words_lock);
}

/* more_words registers a page of words. A context must be current. */
static int more_words(struct gaiafs_fail *f)
{
	struct gaiafs_word *all = calloc(WORDS, sizeof *all);
	struct visit v = { 0 };
	uint32_t *page;
	int err;

	if (all == NULL)
		return gaiafs_failed(f, ENOMEM, "out of memory");
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED) {
		free(all);
		return gaiafs_failed(f, ENOMEM, "out of memory");
	}
	gaiafs_cu_relax(&v);
	err = gaiafs_cu_check(gaiafs_cu.host_register(page, PAGE, PORTABLE | MAPPED), "cuMemHostRegister", f);
	gaiafs_cu_leave(&v);
	if (err != 0) {
		(void)munmap(page, PAGE);
		free(all);
		return err;
	}
	pthread_mutex_lock(&words_lock);
	for (size_t i = 0; i < WORDS; i++) {
		all[i].at = &page[i];
		all[i].done = word_done;
		all[i].next = free_words;
		free_words = &all[i];
	}
	pthread_mutex_unlock(&words_lock);
	return 0;
}

/* word returns a word that says "not yet", and its address on the current context's device. NULL: *f says why. */
static struct gaiafs_word *word(address *at, struct gaiafs_fail *f)
{
	struct gaiafs_word *w;

	for (;;) {
		pthread_mutex_lock(&words_lock);
		w = free_words;
		if (w != NULL)
			free_words = w->next;
		pthread_mutex_unlock(&words_lock);
		if (w != NULL)
			break;
		if (more_words(f) != 0)
			return NULL;
	}
	if (gaiafs_cu_check(gaiafs_cu.host_pointer(at, w->at, 0), "cuMemHostGetDevicePointer", f) != 0) {
		word_done(w);
		return NULL;
	}
	w->value++;
	return w;
}

/* capture gives the work to the graph, if the stream is being captured. */
static int capture(stream s, struct gaiafs_work *w, bool *captured, struct gaiafs_fail *f)
{
	int status = 0;
	uint64_t id;
	graph g = NULL;
	void *object;

	if (gaiafs_cu.capture_info != NULL) {
		if (gaiafs_cu_check(gaiafs_cu.capture_info(s, &status, &id, &g, NULL, NULL), "cuStreamGetCaptureInfo", f) != 0)
			return f->errnum;
	} else if (gaiafs_cu.is_capturing != NULL) {
		if (gaiafs_cu_check(gaiafs_cu.is_capturing(s, &status), "cuStreamIsCapturing", f) != 0)
			return f->errnum;
	}
	if (status != CAPTURE_ACTIVE)
		return 0;
	if (g == NULL || gaiafs_cu.object_create == NULL || gaiafs_cu.object_release == NULL ||
		gaiafs_cu.graph_retain == NULL)
		return gaiafs_failed(f, ENOTSUP, "the stream is captured, and this driver's graphs cannot keep what the call "
				     "needs: install one for CUDA 11.3 or newer");
	w->leave(w);
	if (gaiafs_cu_check(gaiafs_cu.object_create(&object, w, w->free, 1, WITHOUT_SYNC), "cuUserObjectCreate", f) != 0)
		return f->errnum;
	*captured = w->captured = true; /* from here on the object owns w, and may free it */
	if (gaiafs_cu_check(gaiafs_cu.graph_retain(g, object, 1, MOVE), "cuGraphRetainUserObject", f) == 0)
		return 0;
	(void)gaiafs_cu.object_release(object, 1);
	return f->errnum;
}

int gaiafs_cu_enqueue(struct gaiafs_gpu *gpu, gaia_stream_t in, struct gaiafs_work *w, bool *captured, bool *launched,
		      struct gaiafs_fail *f)
{
	struct gaiafs_cuda *c = gaiafs_cu_of(gpu);
	stream s = in;
	struct gaiafs_word *mine = NULL;
	struct visit v = { 0 };
	address at = 0;
	uint32_t value;
	context of = NULL;
	device d = -1;
	int err;

	*captured = *launched = false;
	if (gaiafs_cu.wait == NULL)
		return gaiafs_failed(f, ENOTSUP, "this driver's streams cannot wait for a word in memory: install one for CUDA 11.7 or "
				     "newer");
	if (s <= PER_THREAD_STREAM) {
		err = gaiafs_cu_enter(c, &v, f);
		if (err == 0 && v.relaxed) { /* a capture must see the launch */
			(void)gaiafs_cu.capture_mode(&v.mode);
			v.relaxed = false;
		}
		if (err == 0)
			err = gaiafs_cu_check(gaiafs_cu.ctx_current(&of), "cuCtxGetCurrent", f);
	} else {
		err = gaiafs_cu_check(gaiafs_cu.stream_ctx(s, &of), "cuStreamGetCtx", f);
		if (err == 0)
			err = gaiafs_cu_check(gaiafs_cu.ctx_push(of), "cuCtxPushCurrent", f);
		v.pushed = err == 0;
		if (err == 0)
			err = gaiafs_cu_check(gaiafs_cu.ctx_device(&d), "cuCtxGetDevice", f);
		if (err == 0 && d != c->device)
			err = gaiafs_failed(f, EINVAL, "the stream is of CUDA device %d and the mapping on %d", d, c->device);
	}
	if (err == 0) {
		__atomic_store_n(&w->context, of, __ATOMIC_RELEASE);
		mine = w->word = word(&at, f);
		err = mine == NULL ? f->errnum : capture(s, w, captured, f);
	}
	value = mine != NULL ? mine->value : 0;
	if (err == 0) {
		err = gaiafs_cu_check(gaiafs_cu.launch(s, w->run, w), "cuLaunchHostFunc", f);
		*launched = err == 0;
	}
	/* w may be freed now. The word's next user takes a larger value, which also ends this wait. */
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.wait(s, at, value, UNTIL_AT_LEAST), "cuStreamWaitValue32", f);
	gaiafs_cu_leave(&v);
	return err;
}

/* context_failed reports whether a result that is not success means that nothing in the context will run any more. */
static bool context_failed(result r)
{
	return r != NOT_READY && (r < CAPTURE_UNSUPPORTED || r > CAPTURE_WRONG_THREAD);
}

bool gaiafs_cu_lost(void *of, struct gaiafs_fail *f)
{
	struct visit v = { 0 };
	result r;

	gaiafs_cu_relax(&v);
	r = gaiafs_cu.ctx_push(of);
	if (r == 0) {
		v.pushed = true;
		r = gaiafs_cu.stream_query(PER_THREAD_STREAM);
	}
	gaiafs_cu_leave(&v);
	if (r == 0 || !context_failed(r))
		return false;
	(void)gaiafs_cu_check(r, "the stream", f);
	return true;
}

/* refuse_capture fails if the stream is being captured: a bracket ends once, but a graph may run many times. */
static int refuse_capture(stream s, struct gaiafs_fail *f)
{
	int capturing = 0, err = 0;

	if (gaiafs_cu.is_capturing != NULL)
		err = gaiafs_cu_check(gaiafs_cu.is_capturing(s, &capturing), "cuStreamIsCapturing", f);
	if (err == 0 && capturing != 0)
		err = gaiafs_failed(f, EINVAL, "the stream is being captured, but a bracket ends only once");
	return err;
}

int gaiafs_cu_after(
	struct gaiafs_gpu *gpu, gaia_stream_t in, void (*call)(void *), void *argument, struct gaiafs_fail *f)
{
	struct visit v;
	int err = gaiafs_cu_enter(gaiafs_cu_of(gpu), &v, f);

	if (err != 0)
		return err;
	err = refuse_capture(in, f);
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.launch(in, call, argument), "cuLaunchHostFunc", f);
	gaiafs_cu_leave(&v);
	return err;
}

int gaiafs_cu_stream_number(struct gaiafs_gpu *gpu, gaia_stream_t in, uint64_t *number, struct gaiafs_fail *f)
{
	unsigned long long id = 0;
	struct visit v = { 0 };
	int err = 0;

	if (gaiafs_cu.stream_id == NULL)
		return gaiafs_failed(f, ENOTSUP, "this driver does not number streams: install one for CUDA 12.0 or newer");
	if ((stream)in <= PER_THREAD_STREAM) /* of the current context */
		err = gaiafs_cu_enter(gaiafs_cu_of(gpu), &v, f);
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.stream_id(in, &id), "cuStreamGetId", f);
	gaiafs_cu_leave(&v);
	*number = id + 1; /* never 0 */
	return err;
}

int gaiafs_cu_mark(struct gaiafs_gpu *gpu, gaia_stream_t in, void **event, struct gaiafs_fail *f)
{
	struct visit v;
	int err = gaiafs_cu_enter(gaiafs_cu_of(gpu), &v, f);

	if (err != 0)
		return err;
	err = refuse_capture(in, f);
	if (err == 0 && *event == NULL)
		err = gaiafs_cu_check(gaiafs_cu.event_create(event, WITHOUT_TIMING), "cuEventCreate", f);
	if (err == 0)
		err = gaiafs_cu_check(gaiafs_cu.event_record(*event, in), "cuEventRecord", f);
	gaiafs_cu_leave(&v);
	return err;
}

bool gaiafs_cu_passed(void *event)
{
	struct visit v = { 0 };
	result r;

	gaiafs_cu_relax(&v);
	r = gaiafs_cu.event_query(event);
	gaiafs_cu_leave(&v);
	return r == 0 || context_failed(r);
}

void gaiafs_cu_unmark(struct gaiafs_gpu *gpu, void *event, bool wait)
{
	struct gaiafs_fail f;
	struct visit v;

	if (gaiafs_cu_enter(gaiafs_cu_of(gpu), &v, &f) != 0)
		return;
	if (wait)
		(void)gaiafs_cu.event_sync(event); /* it fails only if the context is lost, and then its kernels have ended */
	(void)gaiafs_cu.event_destroy(event);
	gaiafs_cu_leave(&v);
}
