/*
 * Sums rows of a part of a matrix. The matrix is in a file, after a header of an odd length, and this program wants the
 * second half of its columns. A view has them packed, at an aligned address, as kernels need them.
 */
#include "example.h"

constexpr std::size_t columns = 1024, half = columns / 2;
constexpr std::size_t header = 141; /* bytes */

__global__ void sum_rows(const float4 *part, float *sums, std::size_t rows)
{
	for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < rows;
		i += std::size_t(gridDim.x) * blockDim.x) {
		float sum = 0;

		for (std::size_t j = 0; j < half / 4; j++) {
			float4 four = part[i * (half / 4) + j]; /* 16 bytes at once, which needs an aligned address */

			sum += four.x + four.y + four.z + four.w;
		}
		sums[i] = sum;
	}
}

static float element(std::size_t row, std::size_t column)
{
	return static_cast<float>((row + column) % 8); /* sums of these are exact */
}

static void example(const arguments &args)
{
	const std::string matrix = args.folder + "/shard.matrix", sums = args.folder + "/shard.sums";
	const std::size_t rows = args.count / columns + 1;
	std::vector<char> file(header + rows * columns * sizeof(float));

	for (std::size_t i = 0; i < rows; i++)
		for (std::size_t j = 0; j < columns; j++) {
			float e = element(i, j);

			std::memcpy(file.data() + header + (i * columns + j) * sizeof e, &e, sizeof e);
		}
	write_file(matrix, file);
	write_file(sums, std::vector<float>(rows));

	gaiafs::segment part;
	part.offset = header + half * sizeof(float);
	part.length = half * sizeof(float);
	part.stride = columns * sizeof(float);
	part.count = rows;

	gaiafs::view view(matrix, { part });
	gaiafs::mapping<float> out(sums);
	sum_rows<<<256, 256>>>(view.at<float4>(0), out.data(), rows);
	CUDA(cudaGetLastError());
	CUDA(cudaDeviceSynchronize());
	out.close();

	const std::vector<float> got = read_file<float>(sums, rows);
	for (std::size_t i = 0; i < rows; i++) {
		float want = 0;

		for (std::size_t j = half; j < columns; j++)
			want += element(i, j);
		if (got[i] != want)
			throw std::runtime_error("row " + std::to_string(i) + " has the sum " + std::to_string(got[i]) + ", not " +
						 std::to_string(want));
	}
}

int main(int argc, char **argv)
{
	return run("shard", example, parse(argc, argv, "Sums rows of half the columns of a matrix of COUNT floats.", 1 << 22));
}
