#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxPushCurrent_v2(void *);
int cuMemImportFromShareableHandle(uint64_t *, void *, int);
int cuMemRelease(uint64_t);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
int cuMemAddressFree(uint64_t, size_t);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long);
int cuMemUnmap(uint64_t, size_t);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);
int cuMemcpyHtoD_v2(uint64_t, const void *, size_t);
int cuStreamCreate(void **, unsigned);
int cuStreamDestroy_v2(void *);
int cuStreamSynchronize(void *);
int cuLaunchHostFunc(void *, void (*)(void *), void *);

#define IS(want, call)                                                                                             \
	do {                                                                                                           \
		int got_ = call;                                                                                           \
		if (got_ != want) {                                                                                        \
			fprintf(stderr, "line %d, %.*s: %d, not %d\n", __LINE__, (int)strcspn(#call, "("), #call, got_, want); \
			fprintf(stderr, "%.*s: %d\n", (int)strcspn(#call, "("), #call, got_);                                  \
			exit(1);                                                                                               \
		}                                                                                                          \
	} while (0)

static void increment(void *p)
{
	usleep(20000);
	++*(int *)p;
}

int main(void)
{
	const size_t n = 2 << 20;
	int fd = memfd_create("extent", MFD_CLOEXEC), done = 0;
	void *ctx, *stream;
	uint64_t handle, at;
	int access[3] = {1, 0, 3};

	if (fd < 0 || ftruncate(fd, (off_t)n))
		return 2;
	IS(3, cuDevicePrimaryCtxRetain(&ctx, 0));
	IS(0, cuInit(0));
	IS(0, cuDevicePrimaryCtxRetain(&ctx, 0));
	IS(101, cuDevicePrimaryCtxRetain(&ctx, 7));
	IS(201, cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, 1));
	IS(0, cuCtxPushCurrent_v2(ctx));
	IS(0, cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, 1));
	IS(0, cuMemAddressReserve(&at, n, 0, 0, 0));
	IS(801, cuMemMap(at, n / 2, n / 2, handle, 0));
	IS(1, cuMemMap(at, n / 2, 0, handle, 0));
	IS(0, cuMemMap(at, n, 0, handle, 0));
	IS(1, cuMemMap(at, n, 0, handle, 0));
	IS(0, cuMemSetAccess(at, n, access, 1));
	IS(0, cuMemRelease(handle));
	IS(0, cuMemcpyHtoD_v2(at + 5, "hello", 5));
	char *whole = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0);
	if (!memcmp(whole + 5, "hello", 5)) /* the bytes are still on their way */
		return 3;
	IS(0, cuStreamSynchronize(NULL));
	if (memcmp(whole + 5, "hello", 5))
		return 3;
	IS(1, cuMemAddressFree(at, n));
	IS(0, cuStreamCreate(&stream, 0));
	IS(0, cuLaunchHostFunc(stream, increment, &done));
	IS(0, cuLaunchHostFunc(stream, increment, &done));
	if (done == 2)
		return 4;
	IS(0, cuStreamSynchronize(stream));
	if (done != 2)
		return 5;
	IS(0, cuStreamDestroy_v2(stream));
	cuMemUnmap(at, n);
	cuMemAddressFree(at, n);
	IS(0, cuDevicePrimaryCtxRelease_v2(0));
	return 0;
}
