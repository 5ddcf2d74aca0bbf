/*
 * A fake libcufile for tests. It reads files into memory of the fake libcuda, which is host memory. FAKECUFILE says
 * which files it refuses: "direct" those without O_DIRECT, "all" all of them.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct description {
	int type;
	union {
		int fd;
		void *handle;
	};
	const void *operations;
};

static FILE *log_file;

static int is(const char *name, const char *value)
{
	const char *has = getenv(name);
	return has != NULL && strcmp(has, value) == 0;
}

uint64_t cuFileDriverOpen(void)
{
	char text[4096] = "", dir[1024], path[1100];
	const char *name = getenv("CUFILE_ENV_PATH_JSON");
	FILE *f = name != NULL ? fopen(name, "r") : NULL;
	if (f == NULL)
		return 5033;
	if (fread(text, 1, sizeof text - 1, f) == 0 || strstr(text, "\"allow_compat_mode\": true") == NULL)
		return 5034;
	const char *at = strstr(text, "\"dir\": \"");
	if (at == NULL || sscanf(at, "\"dir\": \"%1023[^\"]", dir) != 1)
		return 5022;
	snprintf(path, sizeof path, "%s/cufile_1.log", dir);
	log_file = fopen(path, "w");
	fclose(f);
	if (log_file == NULL)
		return 5025;
	setlinebuf(log_file);
	fprintf(log_file, " 21-11-2026 16:39:07:904 [pid=1 tid=1] INFO   cufio:1 set up\n\n");
	return 0;
}

uint64_t cuFileHandleRegister(void **handle, struct description *d)
{
	int flags = fcntl(d->fd, F_GETFL);
	if (d->type != 1 || d->operations != NULL || flags < 0)
		return 5022;
	if (is("FAKECUFILE", "all")) {
		fprintf(log_file, " 21-11-2026 16:39:07:904 [pid=1 tid=1] ERROR  cufio-udev:67 udev property not found: ID_FS_USAGE vda\n");
		return 5027;
	}
	if (is("FAKECUFILE", "direct") && !(flags & O_DIRECT)) {
		fprintf(log_file, " 21-11-2026 16:39:07:904 [pid=1 tid=1] ERROR  cufio:2 no O_DIRECT\n");
		return 5020;
	}
	*handle = (void *)(intptr_t)(d->fd + 1);
	return 0;
}

void cuFileHandleDeregister(void *handle)
{
	(void)handle;
}

int64_t cuFileRead(void *handle, char *to, size_t n, int64_t from, int64_t into)
{
	const size_t most = 1 << 18; /* reads less than requested */
	return pread((int)(intptr_t)handle - 1, to + into, n < most ? n : most, from);
}
