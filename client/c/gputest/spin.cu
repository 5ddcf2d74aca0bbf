/*
 * Maps a file for writing, stores the words of its second argument from a kernel, prints "spinning", and runs a kernel
 * that never ends. Its parent kills it, and finds the words in the file.
 */
#include "../examples/example.h"

__global__ void store(char *to, const char *words, std::size_t n)
{
	for (std::size_t i = 0; i < n; i++)
		to[i] = words[i];
}

__global__ void spin(volatile char *p)
{
	while (p[4000] == 0)
		;
}

int main(int argc, char **argv)
{
	if (argc != 3 || std::strcmp(argv[1], "--help") == 0) {
		std::fprintf(argc == 2 ? stdout : stderr, "usage: %s FILE WORDS\n\nStores WORDS at the beginning of FILE from a kernel and "
			     "then spins until it is killed.\n", argv[0]);
		return argc == 2 ? 0 : 2;
	}
	try {
		const std::size_t n = std::strlen(argv[2]);
		gaiafs::mapping<char> m(argv[1]);
		char *words;

		if (m.size() <= 4000 || n > 4000)
			throw std::runtime_error("the file has more than 4000 bytes, and WORDS not");
		CUDA(cudaMalloc(&words, n));
		CUDA(cudaMemcpy(words, argv[2], n, cudaMemcpyHostToDevice));
		store<<<1, 1>>>(m.data(), words, n);
		CUDA(cudaGetLastError());
		CUDA(cudaDeviceSynchronize());
		spin<<<1, 1>>>(m.data());
		CUDA(cudaGetLastError());
		std::puts("spinning");
		std::fflush(stdout);
		CUDA(cudaDeviceSynchronize());
	} catch (const std::exception &e) {
		std::fprintf(stderr, "spin: %s\n", e.what());
	}
	return 1; /* it was not killed */
}
