/*
 * The fake libcuda with graphs of host functions: a capture records them, a launch runs them in order. It is strict where
 * the driver is: while a stream is captured, other threads may reserve memory only in relaxed mode, and what a graph was given
 * to keep is destroyed with it. With OLD_DRIVER defined graphs can keep nothing.
 */
#define cuLaunchHostFunc launch_now
#define cuMemAddressReserve reserve_now
#define cuStreamIsCapturing never_capturing
#include "../../../../internal/fakecuda/src/libcuda.c"
#undef cuLaunchHostFunc
#undef cuMemAddressReserve
#undef cuStreamIsCapturing

enum { MOST_NODES = 16, CAPTURE_UNSUPPORTED = 900 };

struct object {
	void *data;
	void (*destroy)(void *);
};

struct graph {
	int nodes, objects;
	void (*call[MOST_NODES])(void *);
	void *argument[MOST_NODES];
	struct object *kept[MOST_NODES];
};

static struct stream *captured; /* one at a time */
static struct graph *capturing;
static __thread int thread_mode; /* 0: global, 2: relaxed */

result cuThreadExchangeStreamCaptureMode(int *mode)
{
	int old = thread_mode;

	thread_mode = *mode;
	*mode = old;
	return SUCCESS;
}

result cuStreamBeginCapture_v2(struct stream *s, int mode)
{
	if (captured || mode != 0)
		return NOT_SUPPORTED;
	capturing = calloc(1, sizeof *capturing);
	captured = s;
	return capturing ? SUCCESS : OUT_OF_MEMORY;
}

result cuStreamEndCapture(struct stream *s, struct graph **g)
{
	if (s != captured)
		return INVALID_VALUE;
	*g = capturing;
	captured = NULL;
	return SUCCESS;
}

static void destroy(struct object *o)
{
	o->destroy(o->data);
	free(o);
}

result cuStreamIsCapturing(struct stream *s, int *status)
{
	*status = s && s == captured;
	return SUCCESS;
}

#ifndef OLD_DRIVER
result cuStreamGetCaptureInfo_v2(struct stream *s, int *status, uint64_t *id, struct graph **g, const void **nodes, size_t *n)
{
	ENTER(cuStreamGetCaptureInfo_v2);
	(void)id, (void)nodes, (void)n;
	*status = s && s == captured;
	*g = *status ? capturing : NULL;
	return SUCCESS;
}

result cuUserObjectCreate(struct object **o, void *data, void (*destroy)(void *), unsigned refs, unsigned flags)
{
	ENTER(cuUserObjectCreate);
	if (refs != 1 || flags != 1)
		return INVALID_VALUE;
	*o = calloc(1, sizeof **o);
	**o = (struct object){data, destroy};
	return SUCCESS;
}

result cuUserObjectRelease(struct object *o, unsigned refs)
{
	if (refs != 1)
		return INVALID_VALUE;
	destroy(o);
	return SUCCESS;
}

result cuGraphRetainUserObject(struct graph *g, struct object *o, unsigned refs, unsigned flags)
{
	ENTER(cuGraphRetainUserObject);
	if (refs != 1 || flags != 1 || g->objects == MOST_NODES)
		return INVALID_VALUE;
	g->kept[g->objects++] = o;
	return SUCCESS;
}

#endif

result cuGraphDestroy(struct graph *g)
{
	for (int i = 0; i < g->objects; i++)
		destroy(g->kept[i]);
	free(g);
	return SUCCESS;
}

result cuLaunchHostFunc(struct stream *s, void (*call)(void *), void *argument)
{
	ENTER(cuLaunchHostFunc);
	if (!s || s != captured)
		return launch_now(s, call, argument);
	if (capturing->nodes == MOST_NODES)
		return OUT_OF_MEMORY;
	capturing->call[capturing->nodes] = call;
	capturing->argument[capturing->nodes++] = argument;
	return SUCCESS;
}

result cuMemAddressReserve(address *at, size_t n, size_t alignment, address hint, unsigned long long flags)
{
	if (captured && thread_mode != 2)
		return CAPTURE_UNSUPPORTED;
	return reserve_now(at, n, alignment, hint, flags);
}

/* A graph is launched as it is, without an instance of it. */
result cuGraphLaunch(struct graph *g, struct stream *s)
{
	for (int i = 0; i < g->nodes; i++) {
		result code = launch_now(s, g->call[i], g->argument[i]);
		if (code)
			return code;
	}
	return SUCCESS;
}
