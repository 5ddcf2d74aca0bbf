/* Groups, on a mount: group SCENARIO DIRECTORY. */
#include "check.h"

enum { SIZE = 4 * PAGE };

static unsigned char *map(const char *dir, const char *name, int prot, int dev)
{
	char path[512];
	int fd;
	void *p;

	snprintf(path, sizeof path, "%s/%s", dir, name);
	fd = open(path, O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0);
	p = gaia_mmap(NULL, SIZE, prot, MAP_SHARED, fd, 0, dev);
	CHECK(p != MAP_FAILED);
	close(fd);
	return p;
}

static void together(const char *dir)
{
	unsigned char *a = map(dir, "first", PROT_READ | PROT_WRITE, 0), *b = map(dir, "second", PROT_READ | PROT_WRITE, 0);
	unsigned char *far[] = { map(dir, "first", PROT_READ, 1), map(dir, "second", PROT_READ, 1) };
	const struct gaia_range ours[] = { { a, SIZE }, { b + 5, PAGE } };
	const struct gaia_range theirs[] = { { far[0], SIZE }, { far[1], SIZE } };
	uint64_t version = 77;
	struct gaia_group *g = gaia_group_begin(ours, 2);

	CHECK(g != NULL);
	a[0] = b[5] = 1;
	CHECK(gaia_acquire_all(theirs, 2, 0, 0, &version) == 0 && version == 0 && far[0][0] == 0 && far[1][5] == 0);
	FAILS(gaia_acquire_all(theirs, 2, 1, 20, NULL), ETIMEDOUT);
	FAILS(gaia_mrelease(a, SIZE, 0), EBUSY);
	CHECK(gaia_group_begin(ours, 1) == NULL && errno == EBUSY);
	CHECK(gaia_group_release(g, &version) == 0 && version == 1);
	CHECK(gaia_acquire_all(theirs, 2, 1, -1, &version) == 0 && version == 1 && far[0][0] == 1 && far[1][5] == 1);
	g = gaia_group_begin(ours, 2);
	CHECK(g != NULL);
	a[0] = 2;
	gaia_group_abort(g);
	CHECK(a[0] == 1);
	gaia_group_abort(NULL);

	CHECK(gaia_group_begin(ours, 0) == NULL && errno == EINVAL);
	CHECK(gaia_group_begin(theirs, 1) == NULL && errno == EACCES);
	CHECK(gaia_group_begin(&(struct gaia_range){ a, 0 }, 1) == NULL && errno == EINVAL);
	CHECK(gaia_group_begin(&(struct gaia_range){ a + 1, SIZE }, 1) == NULL && errno == EINVAL);
	CHECK(gaia_group_begin(&(struct gaia_range){ &version, 1 }, 1) == NULL && errno == ENOMEM);
	FAILS(gaia_acquire_all(NULL, 1, 0, 0, NULL), EINVAL);
	FAILS(gaia_group_release(NULL, NULL), EINVAL);

	static struct gaia_range many[100000];
	for (unsigned i = 0; i < 100000; i++)
		many[i] = (struct gaia_range){ (i % 2 ? a : b) + i % SIZE, 1 };
	g = gaia_group_begin(many, 100000);
	CHECK(g != NULL);
	a[7] = b[7] = 9;
	CHECK(gaia_munmap(b, SIZE) == 0);
	FAILS(gaia_group_release(g, NULL), ECANCELED);
	gaia_group_abort(g);
	CHECK(a[7] == 0);
	CHECK(gaia_munmap(a, SIZE) == 0 && gaia_munmap(far[0], SIZE) == 0 && gaia_munmap(far[1], SIZE) == 0);
}

/* A writer is killed half-way. A program that waits for its version learns that the version will not come. */
static void killed(const char *dir)
{
	int pipes[2];
	char c;
	pid_t writer;
	int status;

	CHECK(pipe(pipes) == 0);
	writer = fork();
	CHECK(writer >= 0);
	if (writer == 0) {
		unsigned char *a = map(dir, "first", PROT_READ | PROT_WRITE, 0), *b = map(dir, "second", PROT_READ | PROT_WRITE, 1);
		const struct gaia_range both[] = { { a, SIZE }, { b, SIZE } };

		CHECK(gaia_group_begin(both, 2) != NULL);
		a[3] = b[3] = 3;
		CHECK(write(pipes[1], "x", 1) == 1);
		pause();
	}
	unsigned char *a = map(dir, "first", PROT_READ | PROT_WRITE, 0), *b = map(dir, "second", PROT_READ, 0);
	const struct gaia_range both[] = { { a, SIZE }, { b, SIZE } };
	CHECK(read(pipes[0], &c, 1) == 1);
	CHECK(kill(writer, SIGKILL) == 0 && waitpid(writer, &status, 0) == writer);
	errno = 0;
	for (int tries = 0; gaia_acquire_all(both, 2, 1, 100, NULL) == -1 && errno == ETIMEDOUT && tries < 5; tries++)
		;
	CHECK(errno == EPIPE || errno == ETIMEDOUT); /* ETIMEDOUT: the writer was gone before the wait began */
	for (int tries = 0; a[3] != 0; tries++) { /* the end of the writer's connection takes it back */
		CHECK(tries < 60000);
		usleep(1000);
	}
	CHECK(gaia_acquire_all(both, 2, 0, 0, NULL) == 0 && a[3] == 0 && b[3] == 0);
	CHECK(gaia_mrelease(a, SIZE, 0) == 0 && a[3] == 0);
	CHECK(gaia_munmap(a, SIZE) == 0 && gaia_munmap(b, SIZE) == 0);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	if (strcmp(argv[1], "together") == 0)
		together(argv[2]);
	else if (strcmp(argv[1], "killed") == 0)
		killed(argv[2]);
	else
		CHECK(!"a scenario");
	return 0;
}
