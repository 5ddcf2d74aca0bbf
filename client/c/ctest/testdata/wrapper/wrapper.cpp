// Tests everything in gaiafs.hpp, on a mount with an emulated device. The argument is the path of a new file there.
#include <gaiafs.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#define CHECK(condition)                                                                                                     \
	do {                                                                                                                 \
		if (!(condition)) {                                                                                          \
			std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                         \
			std::exit(1);                                                                                        \
		}                                                                                                            \
	} while (0)

// THROWS checks for a std::system_error with that errno, whose message contains the words.
#define THROWS(call, want, words)                                                                                            \
	do {                                                                                                                 \
		bool thrown = false;                                                                                         \
		try {                                                                                                        \
			call;                                                                                                \
		} catch (const std::system_error &e) {                                                                       \
			thrown = true;                                                                                       \
			CHECK(e.code() == std::error_code(want, std::generic_category()));                                   \
			CHECK(std::strstr(e.what(), words) != nullptr);                                                      \
		}                                                                                                            \
		CHECK(thrown);                                                                                               \
	} while (0)

using gaiafs::mapping;
using gaiafs::window;

static_assert(std::is_nothrow_move_constructible_v<mapping<float>> && std::is_nothrow_move_assignable_v<mapping<float>>);
using guard_of_float = gaiafs::guard<float>;
static_assert(!std::is_copy_constructible_v<mapping<float>> && !std::is_copy_constructible_v<guard_of_float>);
static_assert(std::is_nothrow_move_constructible_v<guard_of_float> && std::is_nothrow_move_assignable_v<guard_of_float>);
static_assert(std::is_nothrow_destructible_v<guard_of_float>);
static_assert(std::is_same_v<decltype(mapping<const int>().data()), const int *>);
static_assert(std::is_nothrow_move_constructible_v<gaiafs::view> && std::is_nothrow_move_assignable_v<gaiafs::view>);
static_assert(!std::is_copy_constructible_v<gaiafs::view> && std::is_same_v<decltype(gaiafs::view().at<int>(0)), const int *>);

static std::uint32_t home(int fd, std::size_t i)
{
	std::uint32_t v = 0;

	CHECK(pread(fd, &v, sizeof v, static_cast<off_t>(i * sizeof v)) == sizeof v);
	return v;
}

static void set_home(int fd, std::size_t i, std::uint32_t v)
{
	CHECK(pwrite(fd, &v, sizeof v, static_cast<off_t>(i * sizeof v)) == sizeof v);
}

// brackets uses a file that is larger than the device, 16 MiB, and a small one that is movable, too.
static void brackets(const std::string &path)
{
	const std::size_t part = (std::size_t(2) << 20) / sizeof(std::uint32_t), parts = 20;
	int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(part * parts * sizeof(std::uint32_t))) == 0);
	for (std::size_t i = 0; i < parts; i++)
		set_home(fd, i * part + 1, static_cast<std::uint32_t>(100 + i));

	window never;
	never.moving = gaiafs::moves::never;
	THROWS(mapping<std::uint32_t> m(fd, 0, never), ENOMEM, "budget");
	window always;
	always.count = 1024;
	always.moving = gaiafs::moves::always;
	mapping<std::uint32_t> small(fd, 0, always), large(fd);
	mapping<const std::uint32_t> stays(fd, 0, window{ 4096, 10 });
	CHECK(small.movable() && large.movable() && !stays.movable());

	for (std::size_t i = 0; i < parts; i++) {
		gaiafs::bracket kept;
		{
			auto b = i % 2 ? large.use(i * part, part) : large.use(nullptr, i * part, part);
			CHECK(b && large.data()[i * part + 1] == 100 + i);
			kept = std::move(b);
			CHECK(kept && !b);
		}
		large.data()[i * part + 1] += 5;
		gaiafs::bracket other(std::move(kept));
		large.data()[i * part + 2] = 7; // the bracket was moved and is open
		other.close();
		other.close();
		CHECK(!other && !kept);
	}
	{
		gaiafs::bracket several({ small.range(0, 10), large.range(3 * part, 10), stays.range() });
		auto inner = large.use(part, 1);
		CHECK(small.data()[1] == 105 && large.data()[3 * part + 1] == 108 && large.data()[part + 1] == 106 && stays.data()[0] == 0);
		THROWS(gaiafs::bracket none(std::vector<gaia_range>{}), EINVAL, "a bracket of 0 ranges; it has 1 to");
		THROWS(static_cast<void>(large.use()), ENOMEM, "budget");
		THROWS(static_cast<void>(large.use(large.size(), 1)), EINVAL, "past the end");
	}
	large.release();
	for (std::size_t i = 0; i < parts; i++)
		CHECK(home(fd, i * part + 1) == 105 + i && home(fd, i * part + 2) == 7);
	large.close();
	THROWS(static_cast<void>(large.use()), EINVAL, "nothing is mapped");
	THROWS(static_cast<void>(large.movable()), EINVAL, "nothing is mapped");
	close(fd);
}

// groups releases two ranges at once.
static void groups(const char *path)
{
	mapping<std::uint32_t> a(path);
	std::uint64_t first;

	{
		gaiafs::group g({ a.range(0, 10), a.range(100, 10) });
		a.data()[1] = a.data()[101] = 1;
		first = g.release();
	}
	{
		gaiafs::group g({ gaiafs::range_of(a) });
		a.data()[1] = a.data()[101] = 2; // these stores are taken back
	}
	CHECK(a.data()[1] == 1 && a.data()[101] == 1);
	CHECK(gaiafs::acquire_all({ gaiafs::range_of(a) }) == first && gaiafs::acquire_all({ a.range() }, first, 1000) == first);
	THROWS(gaiafs::acquire_all({ a.range() }, first + 1, 1), ETIMEDOUT, "version");
}

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	const char *path = argv[1];
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(fd >= 0);

	THROWS(mapping<std::uint32_t> m(path), EINVAL, "no whole element");
	CHECK(ftruncate(fd, 3 * 4096 + 2) == 0);
	THROWS(mapping<int> m("/nowhere/at/all"), ENOENT, "/nowhere/at/all");
	THROWS(mapping<int> m(path, 7), ENODEV, "7");
	THROWS(mapping<int> m(fd, 0, window{1, 1}), EINVAL, "not a multiple of 4096");
	THROWS(mapping<int> m(fd, 0, window{0, static_cast<std::size_t>(-2)}), EOVERFLOW, "more elements");
	THROWS(mapping<int> m(-1), EBADF, "fstat");

	// The whole file, except for two bytes at the end that make no element.
	mapping<std::uint32_t> m(path);
	CHECK(m && m.size() == 3 * 1024 && m.size_bytes() == 3 * 4096 && m.device() == 0);
	m.data()[5] = 50;
	m.release(5, 1);
	CHECK(home(fd, 5) == 50);
	set_home(fd, 6, 60);
	m.acquire();
	CHECK(m.data()[6] == 60);
	m.data()[7] = 70;
	m.release_async(nullptr);
	m.acquire_async(nullptr, 7);
	m.check_async();
	CHECK(home(fd, 7) == 70);
	m.data()[8] = 80;
	m.sync();
	m.sync(false);
	m.advise(GAIA_MADV_SEQUENTIAL);
	CHECK(home(fd, 8) == 80);
	THROWS(m.release(m.size() + 1), EINVAL, "past the end");
	THROWS(m.acquire(1, m.size()), EINVAL, "past the end");
	THROWS(m.acquire(0, 0), EINVAL, "0");

	// A guard acquires at its beginning and releases at its end.
	set_home(fd, 1030, 11);
	{
		auto g = m.hold(1024, 100);
		CHECK(g.size() == 100 && g.data() == m.data() + 1024 && g.data()[6] == 11);
		g.data()[7] = 12;
	}
	CHECK(home(fd, 1031) == 12);
	{
		auto g = m.hold();
		g.data()[9] = 90;
		g.release();
		CHECK(home(fd, 9) == 90);
	}
	try {
		auto g = m.hold();
		g.data()[10] = 100;
		throw std::runtime_error("on its way");
	} catch (const std::runtime_error &) {
	}
	CHECK(home(fd, 10) == 100);

	// A guard survives moves of its mapping and of itself.
	{
		mapping<std::uint32_t> here(path);
		auto g = here.hold(20, 4);
		mapping<std::uint32_t> there(std::move(here));
		g.data()[0] = 200;
		auto h = std::move(g);
		CHECK(g.data() == nullptr && g.size() == 0 && h.data() == there.data() + 20 && h.size() == 4);
		g.close();
		h = there.hold(24, 1); // ends the guard that it had
		CHECK(home(fd, 20) == 200);
		h.data()[0] = 240;
		h.close();
		h.close();
		CHECK(home(fd, 24) == 240);
	}
	// The end of a scope reports no failure, but close does.
	{
		mapping<std::uint32_t> gone(path);
		auto g = gone.hold(0, 1), quiet = gone.hold(1, 1);
		gone.close();
		THROWS(g.close(), ENOMEM, "not in a mapping");
		g.close();
	}
	// In stream order. An emulated device has only the default stream.
	{
		auto g = m.hold(nullptr, 30, 2);
		g.data()[0] = 300;
		g.close();
		CHECK(home(fd, 30) == 300);
		THROWS(static_cast<void>(m.hold(reinterpret_cast<gaia_stream_t>(&fd))), EINVAL, "no stream but NULL");
		CHECK(m.hold(0, 1).size() == 1); // a position
	}
	// The kind of the device, and access of others.
	{
		window w;
		w.kind = GAIA_KIND_EMULATED;
		w.peers = true;
		mapping<std::uint32_t> named(path, 0, w);
		struct gaia_info info = {};
		CHECK(::gaia_info(named.data() + 1, &info, sizeof info) == 0);
		CHECK(info.address == named.data() && info.kind == GAIA_KIND_EMULATED && info.flags == GAIA_MAP_PEERS);
		w.kind = GAIA_KIND_CUDA;
		THROWS(mapping<std::uint32_t> none(path, 0, w), ENODEV, "the mount has no GPUs");
		THROWS(mapping<std::uint32_t> none(path, 0, window{-4096}), EINVAL, "negative");
	}

	// Moving a mapping, and the moved-from one.
	mapping<std::uint32_t> n(std::move(m));
	CHECK(n && !m && m.size() == 0);
	n.data()[11] = 110;
	{
		mapping<std::uint32_t> window_of_one(fd, 0, window{4096, 1, true, nullptr});
		CHECK(window_of_one.size() == 1);
		window_of_one.acquire();
		m = std::move(window_of_one);
	}
	CHECK(m && m.data()[0] == home(fd, 1024));
	m = std::move(n); // ends the mapping that it had
	CHECK(!n && m.data()[11] == 110);
	mapping<std::uint32_t> &same = m;
	m = std::move(same);
	CHECK(m && m.data()[11] == 110);
	m.close();
	m.close();
	CHECK(!m && home(fd, 11) == 110);
	THROWS(m.acquire(), EINVAL, "nothing is mapped");
	THROWS(m.release(), EINVAL, "nothing is mapped");
	THROWS(m.check_async(), EINVAL, "nothing is mapped");
	THROWS(m.sync(), EINVAL, "nothing is mapped");
	THROWS(m.advise(GAIA_MADV_SEQUENTIAL), EINVAL, "nothing is mapped");
	THROWS(static_cast<void>(m.hold()), EINVAL, "nothing is mapped");
	{
		mapping<std::uint32_t> ends(path);
		ends.data()[12] = 120;
	}
	CHECK(home(fd, 12) == 120);

	// A view has chosen bytes, each piece aligned.
	{
		gaiafs::view v(path, { { 44, 8 }, { 45, 3 }, { 40, 4, 12, 3 }, { 1 << 20, 4 } });
		CHECK(v && v.size() == 768 + 4 && v.size_bytes() == v.size() && v.device() == 0);
		CHECK(v.offset(0) == 0 && v.offset(1) == 256 && v.offset(2) == 512 && v.offset(3) == 768);
		CHECK(v.length(0) == 8 && v.length(2) == 12 && v.at<std::byte>(3) == v.data() + 768);
		CHECK(v.at<std::uint32_t>(0)[0] == home(fd, 11) && v.at<std::uint32_t>(0)[1] == home(fd, 12));
		CHECK(v.at<std::uint32_t>(2)[0] == home(fd, 10) && v.at<std::uint32_t>(2)[1] == home(fd, 13));
		CHECK(*v.at<std::uint32_t>(3) == 0); // past the end of the file
		CHECK(std::memcmp(v.at<char>(1), v.at<char>(0) + 1, 3) == 0);
		set_home(fd, 12, 1212);
		v.acquire_segment(0);
		CHECK(v.at<std::uint32_t>(0)[1] == 1212);
		set_home(fd, 13, 1313);
		{
			auto g = v.hold(512, 12);
			CHECK(g.size() == 12 && v.at<std::uint32_t>(2)[1] == 1313);
			g.close();
		}
		v.acquire_async(nullptr);
		v.check_async();
		v.advise(GAIA_MADV_WILLNEED);
		v.release();
		v.sync();
		gaiafs::view w(std::move(v));
		CHECK(!v && v.size() == 0 && w.at<std::uint32_t>(2)[1] == 1313);
		gaiafs::layout l;
		l.align = 4096;
		l.lazy = true;
		l.peers = true;
		l.kind = GAIA_KIND_EMULATED;
		v = gaiafs::view(std::vector<int>{ fd, fd }, { { 0, 1, 0, 1, 1 }, { 48, 4, 0, 0, 0 } }, 0, l);
		CHECK(v.size() == 4100 && reinterpret_cast<std::uintptr_t>(v.data()) % 4096 == 0);
		v.acquire();
		CHECK(*v.at<std::uint32_t>(1) == 1212);
		w = std::move(v); // ends the view that it had
		w.close();
		CHECK(!w && w.at<char>(0) == nullptr);
		THROWS(w.acquire(), EINVAL, "nothing is mapped");
		THROWS(gaiafs::view(path, {}), EINVAL, "no segments");
		THROWS(gaiafs::view(path, { { 0, 1 }, { 0, 0 } }), EINVAL, "segment 1");
		THROWS(gaiafs::view(fd, { { 0, 1, 0, 1, 1 } }), EINVAL, "file 1");
		THROWS(gaiafs::view(path, { { 0, 1 } }, 7), ENODEV, "7");
		THROWS(gaiafs::view("/nowhere/at/all", { { 0, 1 } }), ENOENT, "/nowhere/at/all");
		l.align = 3;
		THROWS(gaiafs::view(path, { { 0, 1 } }, 0, l), EINVAL, "alignment 3");
		set_home(fd, 12, 120);
	}

	// const means read-only: a descriptor that is open for reading is enough.
	int read_only = open(path, O_RDONLY | O_CLOEXEC);
	THROWS(mapping<std::uint32_t> w(read_only), EACCES, "writing");
	mapping<const std::uint32_t> r(read_only);
	CHECK(r.data()[12] == 120);
	r.release();
	close(read_only);
	close(fd);
	r.close();
	brackets(path + std::string("-large"));
	groups(path);
	return 0;
}
