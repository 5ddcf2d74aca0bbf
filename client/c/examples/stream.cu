/*
 * A pipeline without waiting. The CPU writes blocks of a file. Streams acquire, change and release the blocks in order
 * while the CPU writes the next ones.
 */
#include "example.h"

static const std::size_t blocks = 8;

__global__ void change(unsigned *values, std::size_t n)
{
	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
		i += std::size_t(gridDim.x) * blockDim.x)
		values[i] = 3 * values[i] + 1;
}

static void example(const arguments &args)
{
	const std::string path = args.folder + "/stream.values";
	const std::size_t n = args.count;
	std::vector<unsigned> values(n);
	cudaStream_t streams[2];

	write_file(path, std::vector<unsigned>(blocks * n));
	gaiafs::mapping<unsigned> device_values(path, 0, gaiafs::window{0, gaiafs::rest, true, nullptr});
	for (cudaStream_t &s : streams)
		CUDA(cudaStreamCreate(&s));
	std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
	for (std::size_t block = 0; block < blocks; block++) {
		cudaStream_t s = streams[block % 2];

		for (std::size_t i = 0; i < n; i++)
			values[i] = static_cast<unsigned>(block * n + i);
		file.write(reinterpret_cast<const char *>(values.data()), static_cast<std::streamsize>(n * sizeof(unsigned)))
			.flush();
		if (!file)
			throw std::runtime_error("writing " + path + " failed");
		auto held = device_values.hold(s, block * n, n); /* the stream acquires: it sees what was written before */
		change<<<256, 256, 0, s>>>(held.data(), held.size());
		CUDA(cudaGetLastError());
		held.close(); /* the stream releases, when the kernel is done */
	}
	for (cudaStream_t s : streams)
		CUDA(cudaStreamSynchronize(s));
	device_values.check_async(); /* throws failures from the streams */

	const std::vector<unsigned> got = read_file<unsigned>(path, blocks * n);
	for (std::size_t i = 0; i < blocks * n; i++)
		if (got[i] != 3 * static_cast<unsigned>(i) + 1)
			throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(got[i]));
	device_values.close();
	for (cudaStream_t s : streams)
		CUDA(cudaStreamDestroy(s));
}

int main(int argc, char **argv)
{
	return run("stream", example, parse(argc, argv, "Changes 8 blocks of COUNT numbers in the order of two streams.", 1 << 20));
}
