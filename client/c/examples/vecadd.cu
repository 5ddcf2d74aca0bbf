/* Adds two files of floats into a third. */
#include "example.h"

__global__ void add(const float *a, const float *b, float *sum, std::size_t n)
{
	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
		i += std::size_t(gridDim.x) * blockDim.x)
		sum[i] = a[i] + b[i];
}

static void example(const arguments &args)
{
	const std::string a_path = args.folder + "/vecadd.a", b_path = args.folder + "/vecadd.b",
			  sum_path = args.folder + "/vecadd.sum";
	std::vector<float> a(args.count), b(args.count);

	for (std::size_t i = 0; i < args.count; i++) {
		a[i] = static_cast<float>(i % 1000);
		b[i] = static_cast<float>(i % 77) * 0.5f;
	}
	write_file(a_path, a);
	write_file(b_path, b);
	write_file(sum_path, std::vector<float>(args.count)); /* a mapping does not make a file longer */

	gaiafs::mapping<const float> device_a(a_path), device_b(b_path);
	gaiafs::mapping<float> device_sum(sum_path);
	add<<<1024, 256>>>(device_a.data(), device_b.data(), device_sum.data(), args.count);
	CUDA(cudaGetLastError());
	CUDA(cudaDeviceSynchronize());
	device_sum.close(); /* releases: from here on every read sees it */

	const std::vector<float> got = read_file<float>(sum_path, args.count);
	for (std::size_t i = 0; i < args.count; i++)
		if (got[i] != a[i] + b[i])
			throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
						 std::to_string(a[i] + b[i]));
}

int main(int argc, char **argv)
{
	return run("vecadd", example, parse(argc, argv, "Adds COUNT floats of two files into a third.", 1 << 22));
}
