/*
 * The part of libcuda that the benchmarks need and internal/fakecuda does not have. It is compiled together with that.
 * Memory is host memory. Kernels are the C functions below; every module has them, whatever its contents.
 */
result cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	ENTER(cuMemHostAlloc);
	if (!current() || flags != 1)
		return INVALID_VALUE;
	*p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
	return *p ? SUCCESS : OUT_OF_MEMORY;
}

struct launch {
	int kernel;
	uint64_t a[6];
};

static void touch(uint64_t at, uint64_t step, uint64_t n, uint64_t value)
{
	for (uint64_t i = 0; i < n; i++)
		*(uint8_t *)(uintptr_t)(at + i * step) += (uint8_t)value;
}

static void paint(uint64_t at, uint64_t n, uint64_t width, uint64_t first, uint64_t writers, uint64_t seed)
{
	for (uint64_t i = 0; i < n; i++)
		if (i / width % writers == first)
			*(uint8_t *)(uintptr_t)(at + i) = (uint8_t)((i ^ i >> 8 ^ i >> 16) + seed);
}

static void run(void *argument)
{
	struct launch *l = argument;

	if (l->kernel == 1)
		touch(l->a[0], l->a[1], l->a[2], l->a[3]);
	else
		paint(l->a[0], l->a[1], l->a[2], l->a[3], l->a[4], l->a[5]);
	free(l);
}

result cuModuleLoadData(void **module, const char *image)
{
	ENTER(cuModuleLoadData);
	if (!current() || !strstr(image, ".entry"))
		return INVALID_VALUE;
	*module = (void *)image;
	return SUCCESS;
}

result cuModuleGetFunction(uintptr_t *f, void *module, const char *name)
{
	ENTER(cuModuleGetFunction);
	(void)module;
	*f = strcmp(name, "bench_touch") == 0 ? 1 : strcmp(name, "bench_stripes") == 0 ? 2 : 0;
	return *f ? SUCCESS : 500;
}

result cuLaunchKernel(uintptr_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
	unsigned shared, struct stream *s, void **params, void **extra)
{
	struct launch *l;

	ENTER(cuLaunchKernel);
	if (!current() || f < 1 || f > 2 || gx < 1 || gy != 1 || gz != 1 || bx != 256 || by != 1 || bz != 1 || shared ||
		extra)
		return INVALID_VALUE;
	l = calloc(1, sizeof *l);
	if (!l)
		return OUT_OF_MEMORY;
	l->kernel = (int)f;
	for (int i = 0; i < (f == 1 ? 4 : 6); i++)
		l->a[i] = *(uint64_t *)params[i];
	return enqueue(s, (struct work){.call = run, .argument = l});
}
