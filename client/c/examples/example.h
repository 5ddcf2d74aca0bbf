/* The common part of the examples: arguments, ordinary file I/O, and an end at the first failure. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <gaiafs.hpp>

#include <cuda_runtime.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

/* CUDA throws if a call of the CUDA runtime fails. */
#define CUDA(call)                                                                             \
	do {                                                                                       \
		cudaError_t result_ = (call);                                                          \
		if (result_ != cudaSuccess)                                                            \
			throw std::runtime_error(std::string(#call) + ": " + cudaGetErrorString(result_)); \
	} while (0)

struct arguments {
	std::string folder;
	std::size_t count;
};

/* parse reads FOLDER [COUNT], or prints the help and exits. */
inline arguments parse(int argc, char **argv, const char *what, std::size_t usual)
{
	bool help = argc == 2 && (std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0);
	char *end = nullptr;
	long long count = static_cast<long long>(usual);

	if (argc == 3) {
		errno = 0;
		count = std::strtoll(argv[2], &end, 10);
		if (errno != 0 || *end != '\0' || end == argv[2])
			count = 0;
	}
	if (help || argc < 2 || argc > 3 || argv[1][0] == '-' || count <= 0 || count > 1LL << 40) {
		std::fprintf(help ? stdout : stderr, "usage: %s FOLDER [COUNT]\n\n%s\n\nFOLDER is on a gaiafs mount with a GPU; COUNT "
			     "is %zu unless given.\nIt works on CUDA device 0, prints \"ok\", and ends with status 0 if every result "
			     "is right.\n", argv[0], what, usual);
		std::exit(help ? 0 : 2);
	}
	return { argv[1], static_cast<std::size_t>(count) };
}

template <typename T> void write_file(const std::string &path, const std::vector<T> &data)
{
	std::ofstream f(path, std::ios::binary | std::ios::trunc);

	f.write(reinterpret_cast<const char *>(data.data()), static_cast<std::streamsize>(data.size() * sizeof(T)));
	f.close();
	if (!f)
		throw std::runtime_error("writing " + path + " failed");
}

template <typename T> std::vector<T> read_file(const std::string &path, std::size_t count)
{
	std::ifstream f(path, std::ios::binary);
	std::vector<T> data(count);

	f.read(reinterpret_cast<char *>(data.data()), static_cast<std::streamsize>(count * sizeof(T)));
	if (!f)
		throw std::runtime_error("reading " + path + " failed");
	return data;
}

/* run calls an example and reports the result. */
inline int run(const char *name, void (*example)(const arguments &), const arguments &args)
{
	try {
		example(args);
	} catch (const std::exception &e) {
		std::fprintf(stderr, "%s: %s\n", name, e.what());
		return 1;
	}
	std::puts("ok");
	return 0;
}

#endif
