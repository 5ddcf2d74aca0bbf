/*
 * gaiafs.hpp - gaiafs.h for C++17: mappings that end with their scope, and failures as std::system_error with the
 * library's message.
 *
 *	gaiafs::mapping<float> out("/mnt/data/out");           // the whole file, writable, on device 0
 *	gaiafs::mapping<const float> in("/mnt/data/in");       // const: read-only
 *	kernel<<<blocks, threads>>>(in.data(), out.data(), in.size());
 *	cudaDeviceSynchronize();
 *	out.release();                                         // now everyone sees it
 *
 * A gaiafs::view has chosen bytes of files, each piece at an aligned address. A gaiafs::bracket keeps movable memory in
 * place while kernels use it.
 *
 * Positions and counts are elements of T. A range begins at an element and has a number of elements. Without a count it
 * extends to the end.
 */
#ifndef GAIAFS_HPP
#define GAIAFS_HPP

#include <gaiafs.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gaiafs {

/* The count of a range that extends to the end of a file or of a mapping. */
inline constexpr std::size_t rest = static_cast<std::size_t>(-1);

/* failure returns the last failure of the library in this thread. */
inline std::system_error failure()
{
	return std::system_error(errno, std::generic_category(), gaia_error());
}

/* Whether a mapping's memory moves. Such memory is there only in brackets. */
enum class moves {
	if_larger, /* than the memory that the device may have: the mapping would fail otherwise */
	always,
	never, /* fails with ENOMEM if the file is larger */
};

/* Which part of a file is mapped, and how. */
struct window {
	off_t offset = 0;         /* in bytes, a multiple of 4096 */
	std::size_t count = rest; /* elements; an incomplete element at the end of a file is not mapped */
	bool lazy = false;        /* fetch nothing yet; acquire fetches */
	void *hint = nullptr;     /* a preferred address */
	bool peers = false;       /* let the other GPUs of this process use the pointer too */
	int kind = GAIA_KIND_ANY; /* of the device: one of the GAIA_KIND_ numbers */
	moves moving = moves::if_larger;
};

template <typename T> class guard;
class bracket;

namespace detail {

/* Accepts a stream or nullptr, but no number: 0 is a position. */
template <typename S> using if_stream = std::enable_if_t<std::is_convertible_v<S, gaia_stream_t>>;

} // namespace detail

/*
 * A mapping of elements of type T, writable unless T is const. It can be moved but not copied. It is empty if it was
 * made without a file, moved from or closed. Calls on an empty mapping that concern its memory throw EINVAL.
 */
template <typename T> class mapping {
	static_assert(std::is_trivially_copyable_v<T>, "a file has bytes, so an element is what can be copied as bytes");

public:
	using value_type = std::remove_cv_t<T>;

	mapping() noexcept = default;

	/*
	 * Maps a file. A path is opened only for the duration of the constructor; a descriptor may be closed
	 * afterwards. device is an ordinal, as in gaia_mmap.
	 */
	explicit mapping(const std::string &path, int device = 0, const window &w = {})
	{
		int fd = ::open(path.c_str(), (std::is_const_v<T> ? O_RDONLY : O_RDWR) | O_CLOEXEC);

		if (fd < 0)
			throw std::system_error(errno, std::generic_category(), path);
		try {
			map(fd, device, w);
		} catch (...) {
			::close(fd);
			throw;
		}
		::close(fd);
	}

	explicit mapping(const char *path, int device = 0, const window &w = {}) : mapping(std::string(path), device, w) {}

	explicit mapping(int fd, int device = 0, const window &w = {}) { map(fd, device, w); }

	mapping(const mapping &) = delete;
	mapping &operator=(const mapping &) = delete;

	mapping(mapping &&other) noexcept
	    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), device_(other.device_)
	{
	}

	mapping &operator=(mapping &&other) noexcept
	{
		if (this == &other)
			return *this;

		mapping old(std::move(*this));

		data_ = std::exchange(other.data_, nullptr);
		size_ = std::exchange(other.size_, 0);
		device_ = other.device_;
		return *this;
	}

	/* Ends the mapping. A destructor cannot report that the last release failed: call close to know. */
	~mapping()
	{
		while (data_ != nullptr && gaia_munmap(bytes(0), size_bytes()) != 0 && errno == EINTR)
			continue;
	}

	/*
	 * close releases and ends the mapping, which is empty afterwards even if close throws. Only after EINTR does it
	 * stay.
	 */
	void close()
	{
		if (data_ == nullptr)
			return;
		int result = gaia_munmap(bytes(0), size_bytes());

		if (result == 0 || errno != EINTR) {
			data_ = nullptr;
			size_ = 0;
		}
		check(result);
	}

	/* The pointer is for kernels if the device is a GPU, and for the CPU if it is emulated. */
	T *data() const noexcept { return data_; }
	std::size_t size() const noexcept { return size_; }
	std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
	int device() const noexcept { return device_; }
	explicit operator bool() const noexcept { return data_ != nullptr; }

	/* acquire shows what others wrote and released. release shows others what this device stored. */
	void acquire(std::size_t from = 0, std::size_t count = rest) const
	{
		check(gaia_macquire(mapped(from), length(from, count), device_));
	}

	void release(std::size_t from = 0, std::size_t count = rest) const
	{
		check(gaia_mrelease(mapped(from), length(from, count), device_));
	}

	/* The same in stream order. stream is a cudaStream_t or CUstream. */
	void acquire_async(gaia_stream_t stream, std::size_t from = 0, std::size_t count = rest) const
	{
		check(gaia_macquire_async(mapped(from), length(from, count), device_, stream));
	}

	void release_async(gaia_stream_t stream, std::size_t from = 0, std::size_t count = rest) const
	{
		check(gaia_mrelease_async(mapped(from), length(from, count), device_, stream));
	}

	/* check_async throws the first failure of a stream-ordered call, once. Synchronize the stream first. */
	void check_async() const { check(gaia_async_error(mapped(0))); }

	/* sync waits until what the device stored is in the backing file or, with durable, on stable storage. */
	void sync(bool durable = true) const
	{
		check(gaia_msync(mapped(0), size_bytes(), durable ? MS_SYNC : MS_ASYNC));
	}

	/* advise gives one of the GAIA_MADV_ hints for the whole mapping. */
	void advise(int advice) const { check(gaia_madvise(mapped(0), size_bytes(), advice)); }

	/* movable reports whether the memory moves, and so is there only in brackets. */
	bool movable() const
	{
		struct ::gaia_info found = {};

		check(::gaia_info(mapped(0), &found, sizeof found));
		return (found.flags & GAIA_MAP_MOVABLE) != 0;
	}

	/* use keeps a range's memory in place until the bracket ends. A mapping that does not move needs no bracket. */
	[[nodiscard]] bracket use(std::size_t from = 0, std::size_t count = rest) const;

	/* The same in stream order: the bracket can end as soon as the kernels that use the range are launched. */
	template <typename S, typename = detail::if_stream<S>>
	[[nodiscard]] bracket use(S stream, std::size_t from = 0, std::size_t count = rest) const;

	/* range returns a range of the mapping, for brackets and groups. */
	gaia_range range(std::size_t from = 0, std::size_t count = rest) const
	{ return { mapped(from), length(from, count) }; }

	/* hold acquires a range, and releases it when the guard ends. */
	[[nodiscard]] guard<T> hold(std::size_t from = 0, std::size_t count = rest) const
	{
		return guard<T>(*this, from, count);
	}

	/* The same in stream order: the guard can end as soon as the kernels that use the range are launched. */
	template <typename S, typename = detail::if_stream<S>>
	[[nodiscard]] guard<T> hold(S stream, std::size_t from = 0, std::size_t count = rest) const
	{
		return guard<T>(*this, stream, from, count);
	}

protected:
	/* adopt takes over mapped memory. The mapping is empty before. */
	void adopt(void *p, std::size_t count, int device) noexcept
	{
		data_ = static_cast<T *>(p);
		size_ = count;
		device_ = device;
	}

	static void check(int result)
	{
		if (result != 0)
			throw failure();
	}

private:
	friend class guard<T>;

	void map(int fd, int device, const window &w)
	{
		std::size_t count = w.count;
		void *p;

		if (count == rest) {
			struct stat st;

			if (::fstat(fd, &st) != 0)
				throw std::system_error(errno, std::generic_category(), "fstat");
			count = st.st_size > w.offset ? static_cast<std::size_t>(st.st_size - w.offset) / sizeof(T) : 0;
			if (count == 0)
				throw std::system_error(EINVAL, std::generic_category(),
							"the file has no whole element from the offset on");
		}
		if (count > rest / sizeof(T))
			throw std::system_error(EOVERFLOW, std::generic_category(), "more elements than memory can have");
		if (w.offset < 0)
			throw std::system_error(EINVAL, std::generic_category(), "the offset is negative");

		gaia_map_args a{};
		a.length = count * sizeof(T);
		a.offset = static_cast<std::uint64_t>(w.offset);
		a.address = w.hint;
		a.flags = MAP_SHARED | (w.lazy ? GAIA_MAP_LAZY : 0) | (w.peers ? GAIA_MAP_PEERS : 0) |
			(w.moving == moves::always ? GAIA_MAP_MOVABLE : 0) | (w.moving == moves::never ? GAIA_MAP_STAYS : 0);
		a.fd = fd;
		a.prot = std::is_const_v<T> ? PROT_READ : PROT_READ | PROT_WRITE;
		a.device = device;
		a.kind = w.kind;
		p = gaia_map(&a, sizeof a);
		if (p == MAP_FAILED)
			throw failure();
		adopt(p, count, device);
	}

	void *bytes(std::size_t from) const noexcept { return const_cast<value_type *>(data_ + from); }

	void *mapped(std::size_t from) const
	{
		if (data_ == nullptr)
			throw std::system_error(EINVAL, std::generic_category(), "nothing is mapped");
		return bytes(from);
	}

	std::size_t length(std::size_t from, std::size_t count) const
	{
		if (from > size_ || (count != rest && count > size_ - from))
			throw std::system_error(EINVAL, std::generic_category(), "the range goes past the end of the mapping");
		return (count == rest ? size_ - from : count) * sizeof(T);
	}

	T *data_ = nullptr;
	std::size_t size_ = 0;
	int device_ = 0;
};

/*
 * An acquired range. close, or the end of the scope, releases it. The release waits for the work that was begun in the
 * context. The guard of a stream releases after the stream's earlier work instead. A guard can be moved, and so can its
 * mapping; the memory must stay mapped until the guard ends.
 *
 * A destructor cannot report a failure: call close to know. After a failed release nothing is lost, because the
 * mapping's own close releases again. check_async of the mapping reports failures in a stream.
 */
template <typename T> class guard {
public:
	guard(const mapping<T> &m, std::size_t from = 0, std::size_t count = rest)
	    : guard(m, std::nullopt, from, count)
	{
	}

	template <typename S, typename = detail::if_stream<S>>
	guard(const mapping<T> &m, S stream, std::size_t from = 0, std::size_t count = rest)
	    : guard(m, std::optional<gaia_stream_t>(stream), from, count)
	{
	}

	guard(const guard &) = delete;
	guard &operator=(const guard &) = delete;

	guard(guard &&other) noexcept
	    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), device_(other.device_),
	      stream_(other.stream_)
	{
	}

	guard &operator=(guard &&other) noexcept
	{
		if (this != &other) {
			end();
			data_ = std::exchange(other.data_, nullptr);
			size_ = std::exchange(other.size_, 0);
			device_ = other.device_;
			stream_ = other.stream_;
		}
		return *this;
	}

	~guard() { end(); }

	/*
	 * close releases now; the end of the scope then does not release again, even if close throws. Only after EINTR
	 * does the guard stay. A second close does nothing.
	 */
	void close()
	{
		int result = let_go();

		if (result == 0 || errno != EINTR)
			forget();
		mapping<T>::check(result);
	}

	/* release is the older name of close. */
	void release() { close(); }

	/* The range. After close they return null and 0. */
	T *data() const noexcept { return data_; }
	std::size_t size() const noexcept { return size_; }

private:
	guard(const mapping<T> &m, std::optional<gaia_stream_t> stream, std::size_t from, std::size_t count)
	    : device_(m.device()), stream_(stream)
	{
		void *p = m.mapped(from);
		std::size_t n = m.length(from, count);

		mapping<T>::check(stream ? gaia_macquire_async(p, n, device_, *stream) : gaia_macquire(p, n, device_));
		data_ = static_cast<T *>(p);
		size_ = n / sizeof(T);
	}

	int let_go() const noexcept
	{
		void *p = const_cast<std::remove_cv_t<T> *>(data_);
		std::size_t n = size_ * sizeof(T);

		if (p == nullptr)
			return 0;
		return stream_ ? gaia_mrelease_async(p, n, device_, *stream_) : gaia_mrelease(p, n, device_);
	}

	void forget() noexcept
	{
		data_ = nullptr;
		size_ = 0;
	}

	void end() noexcept
	{
		while (let_go() != 0 && errno == EINTR)
			continue;
		forget();
	}

	T *data_ = nullptr;
	std::size_t size_ = 0;
	int device_;
	std::optional<gaia_stream_t> stream_; /* none: at once */
};

/*
 * A bracket keeps the memory of ranges in place, with its bytes, until close or the end of the scope. The ranges are of
 * mappings on one device. It gets memory for all ranges or for none, so put everything that a launch uses into one
 * bracket.
 *
 *	gaiafs::mapping<float> data("/mnt/data/large");        // larger than the device, so its memory moves
 *	{
 *		auto b = data.use(stream, from, count);
 *		kernel<<<blocks, threads, 0, stream>>>(data.data() + from, count);
 *	}                                                      // ends after the kernel, without waiting for it
 *
 * A bracket of a stream ends after the stream's earlier work, without waiting for it. A bracket without a stream waits
 * for the work that was begun in the context. A bracket can be moved, and so can its mappings. It belongs to the thread
 * that opened it and must end there. Of several brackets with the same stream, the one opened last ends first. The
 * mappings must stay until then.
 *
 * Opening one waits for other programs for at most a minute, or patience milliseconds. It fails as gaia_use(3) does. A
 * destructor cannot report a failure: call close to know.
 */
class bracket {
public:
	bracket() noexcept = default; /* none is open */

	explicit bracket(
		const std::vector<gaia_range> &ranges, gaia_stream_t stream = GAIA_ALL_STREAMS, unsigned patience = 0)
		: stream_(stream)
	{
		if (gaia_use_for(ranges.data(), ranges.size(), stream, patience) != 0)
			throw failure();
		open_ = true;
	}

	bracket(const bracket &) = delete;
	bracket &operator=(const bracket &) = delete;

	bracket(bracket &&other) noexcept : stream_(other.stream_), open_(std::exchange(other.open_, false)) {}

	bracket &operator=(bracket &&other) noexcept
	{
		if (this != &other) {
			end();
			stream_ = other.stream_;
			open_ = std::exchange(other.open_, false);
		}
		return *this;
	}

	~bracket() { end(); }

	/* close ends the bracket. If it throws, the bracket stays open. A second close does nothing. */
	void close()
	{
		if (open_ && gaia_done(stream_) != 0)
			throw failure();
		open_ = false;
	}

	explicit operator bool() const noexcept { return open_; }

private:
	/*
	 * end ignores a failure: the stream is lost or being captured, and the bracket then stays until the process
	 * ends.
	 */
	void end() noexcept
	{
		if (open_)
			(void)gaia_done(stream_);
		open_ = false;
	}

	gaia_stream_t stream_ = nullptr;
	bool open_ = false;
};

template <typename T> bracket mapping<T>::use(std::size_t from, std::size_t count) const
{
	return bracket(std::vector<gaia_range>{ range(from, count) });
}

template <typename T>
template <typename S, typename>
bracket mapping<T>::use(S stream, std::size_t from, std::size_t count) const
{
	return bracket(std::vector<gaia_range>{ range(from, count) }, stream);
}

/* Rows of a file's bytes. The first begins at offset, each further row stride bytes after the one before. */
struct segment {
	std::uint64_t offset = 0, length = 0; /* length is that of a row */
	std::uint64_t stride = 0, count = 1;  /* a single row needs no stride */
	std::uint32_t file = 0;               /* an index into the view's files */
};

/* How a view is laid out and mapped. */
struct layout {
	std::size_t align = 256; /* a power of two up to 2 MiB */
	bool lazy = false;       /* as in window, like the next three */
	void *hint = nullptr;
	bool peers = false;
	int kind = GAIA_KIND_ANY;
};

/*
 * Chosen bytes of one or more files, in read-only memory. Each segment begins at an aligned address, and its rows are
 * packed. A view is a mapping of bytes: data, size, acquire, hold, close and the rest work for the view as a whole,
 * with positions in the view. A view has nothing to release.
 *
 *	gaiafs::view weights("/mnt/data/model", {{ 140, 4096 }, { 8192 + 7, 512, 1024, 16 }});
 *	kernel<<<blocks, threads>>>(weights.at<float>(0), weights.at<float>(1));
 */
class view : public mapping<const std::byte> {
public:
	view() noexcept = default;

	/*
	 * A view of a file by path, or of open descriptors. A path is opened only for the duration of the constructor;
	 * descriptors may be closed afterwards.
	 */
	view(const std::string &path, const std::vector<segment> &segments, int device = 0, const layout &l = {})
	{
		int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);

		if (fd < 0)
			throw std::system_error(errno, std::generic_category(), path);
		try {
			map(&fd, 1, segments, device, l);
		} catch (...) {
			::close(fd);
			throw;
		}
		::close(fd);
	}

	view(const char *path, const std::vector<segment> &segments, int device = 0, const layout &l = {})
	    : view(std::string(path), segments, device, l)
	{
	}

	view(int fd, const std::vector<segment> &segments, int device = 0, const layout &l = {})
	{
		map(&fd, 1, segments, device, l);
	}

	view(const std::vector<int> &fds, const std::vector<segment> &segments, int device = 0, const layout &l = {})
	{
		map(fds.data(), fds.size(), segments, device, l);
	}

	/* The position of segment i in the view, and its length there, both in bytes. */
	std::uint64_t offset(std::size_t i) const { return places_.at(i).offset; }
	std::uint64_t length(std::size_t i) const { return places_.at(i).length; }

	/* at returns segment i as elements of T, or null once the view is closed. */
	template <typename T> const T *at(std::size_t i) const
	{
		static_assert(std::is_trivially_copyable_v<T>, "a file has bytes, so an element is what can be copied as bytes");
		std::uint64_t from = offset(i);

		return data() == nullptr ? nullptr : reinterpret_cast<const T *>(data() + from);
	}

	/* acquire_segment acquires segment i alone. */
	void acquire_segment(std::size_t i) const { acquire(offset(i), length(i)); }

private:
	struct place {
		std::uint64_t offset, length;
	};

	void map(const int *fds, std::size_t n, const std::vector<segment> &segments, int device, const layout &l)
	{
		std::vector<gaia_segment> plain;
		std::vector<std::uint32_t> files;
		std::vector<std::uint64_t> offsets(segments.size());
		std::uint64_t size = 0;

		plain.reserve(segments.size());
		files.reserve(segments.size());
		places_.reserve(segments.size());
		for (const segment &s : segments) {
			plain.push_back({ s.offset, s.length, s.stride, s.count });
			files.push_back(s.file);
		}
		check(gaia_view_layout(plain.data(), plain.size(), l.align, offsets.data(), &size));
		for (std::size_t i = 0; i < plain.size(); i++)
			places_.push_back({ offsets[i], plain[i].length * (plain[i].count == 0 ? 1 : plain[i].count) });

		gaia_view_args a{};
		a.segments = plain.data();
		a.count = plain.size();
		a.fds = fds;
		a.fd_count = n;
		a.files = files.data();
		a.align = l.align;
		a.address = l.hint;
		a.flags = MAP_SHARED | (l.lazy ? GAIA_MAP_LAZY : 0) | (l.peers ? GAIA_MAP_PEERS : 0);
		a.device = device;
		a.kind = l.kind;
		void *p = gaia_map_view(&a, sizeof a);
		if (p == MAP_FAILED)
			throw failure();
		adopt(p, static_cast<std::size_t>(size), device);
	}

	std::vector<place> places_;
};

/* range_of returns the whole of a mapping or view as a range. */
template <typename T> gaia_range range_of(const mapping<T> &m) { return m.range(); }

/*
 * A group of ranges whose stores are released at once. If it ends without release, its stores are taken back.
 *
 *	gaiafs::group update({ gaiafs::range_of(weights), gaiafs::range_of(biases) });
 *	... // stores
 *	std::uint64_t version = update.release();
 */
class group {
public:
	explicit group(const std::vector<gaia_range> &ranges) : group_(gaia_group_begin(ranges.data(), ranges.size()))
	{
		if (group_ == nullptr)
			throw failure();
	}

	group(const group &) = delete;
	group &operator=(const group &) = delete;
	~group() { gaia_group_abort(group_); }

	/* release publishes the group and returns its version. */
	std::uint64_t release()
	{
		std::uint64_t version = 0;

		if (gaia_group_release(group_, &version) != 0)
			throw failure();
		group_ = nullptr;
		return version;
	}

private:
	gaia_group *group_;
};

/*
 * acquire_all acquires ranges at one version, and returns that version. If least is not 0, it first waits until a file
 * has at least that version: at most timeout milliseconds, or without limit if timeout is negative.
 */
inline std::uint64_t acquire_all(const std::vector<gaia_range> &ranges, std::uint64_t least = 0, int timeout = -1)
{
	std::uint64_t version = 0;

	if (gaia_acquire_all(ranges.data(), ranges.size(), least, timeout, &version) != 0)
		throw failure();
	return version;
}

} // namespace gaiafs

#endif
