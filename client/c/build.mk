# Rules for the C library. The top Makefile includes this file, and client/c/Makefile includes it to build only the
# library. It leaves libgaiafs.so and libgaiafs.a in $(GAIAFS_BUILD). CUDA is not needed.
GAIAFS_C ?= client/c
GAIAFS_BUILD ?= build
# The version of everything is in the file VERSION at the top of the repository.
GAIAFS_VERSION ?= $(shell cat $(GAIAFS_C)/../../VERSION)
PREFIX ?= /usr/local
# Where libraries go, below PREFIX.
LIBDIR ?= lib
CC ?= cc

GAIAFS_C_SOURCES := $(addprefix $(GAIAFS_C)/,gaiafs.c map.c view.c group.c start.c copy.c status.c stream.c work.c conn.c service.c move.c bracket.c keep.c faults.c call.c parcel.c table.c memory.c cuda.c cuda_copy.c cuda_stream.c grant.c wire.c error.c)
GAIAFS_C_HEADERS := $(addprefix $(GAIAFS_C)/,gaiafs.h internal.h conn.h cuda.h cuda_errors.h kinds.h wire.h)
LIBGAIAFS := $(addprefix $(GAIAFS_BUILD)/,libgaiafs.so libgaiafs.a)
GAIAFS_C_OBJECTS := $(patsubst $(GAIAFS_C)/%.c,$(GAIAFS_BUILD)/c/%.o,$(GAIAFS_C_SOURCES))
GAIAFS_C_WARNINGS := -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes
GAIAFS_C_FLAGS := -std=c11 -O2 -g -fPIC -pthread -fvisibility=hidden -D_FILE_OFFSET_BITS=64 $(GAIAFS_C_WARNINGS)

.PHONY: libgaiafs libgaiafs-install libgaiafs-clean
libgaiafs: $(LIBGAIAFS)

$(GAIAFS_BUILD)/c/%.o: $(GAIAFS_C)/%.c $(GAIAFS_C_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(GAIAFS_C_FLAGS) $(CPPFLAGS) $(CFLAGS) -c -o $@ $<

$(GAIAFS_BUILD)/libgaiafs.so.0: $(GAIAFS_C_OBJECTS) $(GAIAFS_C)/gaiafs.map
	$(CC) -shared -pthread -Wl,-soname,libgaiafs.so.0 -Wl,-z,defs -Wl,-z,nodelete -Wl,--version-script=$(GAIAFS_C)/gaiafs.map \
		$(LDFLAGS) -o $@ $(GAIAFS_C_OBJECTS) -ldl

$(GAIAFS_BUILD)/libgaiafs.so: $(GAIAFS_BUILD)/libgaiafs.so.0
	ln -sf $(<F) $@

$(GAIAFS_BUILD)/libgaiafs.a: $(GAIAFS_C_OBJECTS)
	rm -f $@
	$(AR) rcs $@ $^

# Files that contain PREFIX or the version are made here, because both may differ from the last build's. The linker
# finds
# the library after ldconfig has run.
libgaiafs-install: libgaiafs
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/$(LIBDIR)/pkgconfig \
		$(DESTDIR)$(PREFIX)/$(LIBDIR)/cmake/gaiafs $(DESTDIR)$(PREFIX)/share/man/man3
	install -m 644 $(GAIAFS_C)/gaiafs.h $(GAIAFS_C)/gaiafs.hpp $(DESTDIR)$(PREFIX)/include
	install -m 755 $(GAIAFS_BUILD)/libgaiafs.so.0 $(DESTDIR)$(PREFIX)/$(LIBDIR)
	ln -sf libgaiafs.so.0 $(DESTDIR)$(PREFIX)/$(LIBDIR)/libgaiafs.so
	install -m 644 $(GAIAFS_BUILD)/libgaiafs.a $(DESTDIR)$(PREFIX)/$(LIBDIR)
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(GAIAFS_VERSION)|' \
		$(GAIAFS_C)/gaiafs.pc.in > $(DESTDIR)$(PREFIX)/$(LIBDIR)/pkgconfig/gaiafs.pc
	chmod 644 $(DESTDIR)$(PREFIX)/$(LIBDIR)/pkgconfig/gaiafs.pc
	install -m 644 $(GAIAFS_C)/cmake/gaiafsConfig.cmake $(DESTDIR)$(PREFIX)/$(LIBDIR)/cmake/gaiafs
	sed -e 's|@VERSION@|$(GAIAFS_VERSION)|' $(GAIAFS_C)/cmake/gaiafsConfigVersion.cmake.in \
		> $(DESTDIR)$(PREFIX)/$(LIBDIR)/cmake/gaiafs/gaiafsConfigVersion.cmake
	chmod 644 $(DESTDIR)$(PREFIX)/$(LIBDIR)/cmake/gaiafs/gaiafsConfigVersion.cmake
	install -m 644 $(GAIAFS_C)/gaia_mmap.3 $(GAIAFS_C)/gaia_mview.3 $(GAIAFS_C)/gaia_group_begin.3 $(GAIAFS_C)/gaia_use.3 $(DESTDIR)$(PREFIX)/share/man/man3
	for page in gaia_map gaia_info gaia_version gaia_macquire gaia_mrelease gaia_macquire_async gaia_mrelease_async gaia_async_error gaia_msync \
			gaia_madvise gaia_munmap gaia_drop gaia_start gaia_wait gaia_cancel gaia_read gaia_write gaia_copies \
			gaia_status gaia_context gaia_lend_context gaia_error gaia_note; do \
		ln -sf gaia_mmap.3 $(DESTDIR)$(PREFIX)/share/man/man3/$$page.3; \
	done
	for page in gaia_map_view gaia_view_layout; do \
		ln -sf gaia_mview.3 $(DESTDIR)$(PREFIX)/share/man/man3/$$page.3; \
	done
	for page in gaia_group_release gaia_group_abort gaia_acquire_all; do \
		ln -sf gaia_group_begin.3 $(DESTDIR)$(PREFIX)/share/man/man3/$$page.3; \
	done
	[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || ! command -v ldconfig > /dev/null || ldconfig

.PHONY: libgaiafs-uninstall
libgaiafs-uninstall:
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/include/,gaiafs.h gaiafs.hpp) \
		$(addprefix $(DESTDIR)$(PREFIX)/$(LIBDIR)/,libgaiafs.so.0 libgaiafs.so libgaiafs.a pkgconfig/gaiafs.pc)
	rm -rf $(DESTDIR)$(PREFIX)/$(LIBDIR)/cmake/gaiafs
	rm -f $(DESTDIR)$(PREFIX)/share/man/man3/gaia_*.3
	[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || ! command -v ldconfig > /dev/null || ldconfig

libgaiafs-clean:
	rm -rf $(GAIAFS_BUILD)/c $(GAIAFS_BUILD)/libgaiafs.*
