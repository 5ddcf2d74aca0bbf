/* Adds up a file with the C functions. The device writes the sum into a second file. */
#include "example.h"

__global__ void reduce(const unsigned *values, std::size_t n, unsigned long long *sum)
{
	unsigned long long mine = 0;

	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
		i += std::size_t(gridDim.x) * blockDim.x)
		mine += values[i];
	for (int lanes = 16; lanes > 0; lanes /= 2)
		mine += __shfl_down_sync(0xffffffff, mine, lanes);
	if (threadIdx.x % 32 == 0)
		atomicAdd(sum, mine);
}

/* map maps a whole file of the given size. The mapping needs no descriptor afterwards. */
static void *map(const std::string &path, std::size_t bytes, int mode, int prot)
{
	int fd = open(path.c_str(), mode | O_CLOEXEC);
	void *p = fd < 0 ? MAP_FAILED : gaia_mmap(NULL, bytes, prot, MAP_SHARED, fd, 0, 0);

	if (fd < 0)
		throw std::runtime_error(path + ": " + std::strerror(errno));
	close(fd);
	if (p == MAP_FAILED)
		throw std::runtime_error(path + ": " + gaia_error());
	return p;
}

static void example(const arguments &args)
{
	const std::string values_path = args.folder + "/reduce.values", sum_path = args.folder + "/reduce.sum";
	const std::size_t bytes = args.count * sizeof(unsigned);
	std::vector<unsigned> values(args.count);
	unsigned long long want = 0;

	for (std::size_t i = 0; i < args.count; i++)
		want += values[i] = static_cast<unsigned>(i * 2654435761u);
	write_file(values_path, values);
	write_file(sum_path, std::vector<unsigned long long>(1));

	void *device_values = map(values_path, bytes, O_RDONLY, PROT_READ);
	void *device_sum = map(sum_path, sizeof want, O_RDWR, PROT_READ | PROT_WRITE);
	reduce<<<512, 256>>>(static_cast<const unsigned *>(device_values), args.count,
			     static_cast<unsigned long long *>(device_sum));
	CUDA(cudaGetLastError());
	CUDA(cudaDeviceSynchronize());
	if (gaia_mrelease(device_sum, sizeof want, 0) != 0)
		throw std::runtime_error(gaia_error());

	const unsigned long long got = read_file<unsigned long long>(sum_path, 1)[0];
	if (got != want)
		throw std::runtime_error("the sum is " + std::to_string(got) + ", not " + std::to_string(want));
	if (gaia_munmap(device_sum, sizeof want) != 0 || gaia_munmap(device_values, bytes) != 0)
		throw std::runtime_error(gaia_error());
}

int main(int argc, char **argv)
{
	return run("reduce", example, parse(argc, argv, "Adds up COUNT numbers of a file.", 1 << 24));
}
