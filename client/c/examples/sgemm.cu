/* Multiplies matrices in files with cuBLAS, which works on mapped files without a change. */
#include "example.h"

#include <cublas_v2.h>

#include <cmath>

static void blas(cublasStatus_t status, const char *call)
{
	if (status != CUBLAS_STATUS_SUCCESS)
		throw std::runtime_error(std::string(call) + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
}

static void example(const arguments &args)
{
	const std::string a_path = args.folder + "/sgemm.a", b_path = args.folder + "/sgemm.b", c_path = args.folder + "/sgemm.c";
	const std::size_t n = args.count;
	const int size = static_cast<int>(n);
	const float one = 1, zero = 0;

	if (n > 30000)
		throw std::runtime_error("matrices of that size take too long to check: COUNT is at most 30000");
	std::vector<float> a(n * n), b(n * n); /* by columns, as cuBLAS expects */

	for (std::size_t i = 0; i < n * n; i++) {
		a[i] = static_cast<float>(i % 13) - 6;
		b[i] = static_cast<float>(i % 7) - 3;
	}
	write_file(a_path, a);
	write_file(b_path, b);
	write_file(c_path, std::vector<float>(n * n));

	gaiafs::mapping<const float> device_a(a_path), device_b(b_path);
	gaiafs::mapping<float> device_c(c_path);
	cublasHandle_t handle;
	blas(cublasCreate(&handle), "cublasCreate");
	blas(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &one, device_a.data(), size, device_b.data(),
			 size, &zero, device_c.data(), size),
		"cublasSgemm");
	CUDA(cudaDeviceSynchronize());
	blas(cublasDestroy(handle), "cublasDestroy");
	device_c.release();

	/* Check some whole columns on the CPU. The numbers are small integers, so floats have exact sums. */
	const std::vector<float> c = read_file<float>(c_path, n * n);
	for (std::size_t column = 0; column < n; column += n / 16 + 1)
		for (std::size_t row = 0; row < n; row++) {
			double want = 0;
			for (std::size_t k = 0; k < n; k++)
				want += double(a[k * n + row]) * double(b[column * n + k]);
			if (std::fabs(c[column * n + row] - want) > 1e-3)
				throw std::runtime_error("row " + std::to_string(row) + " of column " + std::to_string(column) + " is " +
							 std::to_string(c[column * n + row]) + ", not " + std::to_string(want));
		}
}

int main(int argc, char **argv)
{
	return run("sgemm", example, parse(argc, argv, "Multiplies two matrices of COUNT x COUNT floats by cuBLAS.", 1024));
}
