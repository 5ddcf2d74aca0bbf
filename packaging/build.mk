# Installing the commands, and packages. The top Makefile includes this file.

# mount(8) and umount(8) look for their helpers only in /sbin. With a system-wide PREFIX, the helpers go there.
SBINDIR ?= $(if $(filter /usr /usr/local,$(PREFIX)),/usr/sbin,$(PREFIX)/sbin)
UNITDIR ?= $(PREFIX)/lib/systemd/system
COMPLETIONS := share/bash-completion/completions/gaiafs share/zsh/site-functions/_gaiafs \
	share/fish/vendor_completions.d/gaiafs.fish
STAGE := $(BUILD)/stage
PACKAGE_DIR := $(BUILD)/packages

.PHONY: gaiafs-install
gaiafs-install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(SBINDIR) $(DESTDIR)$(UNITDIR) $(DESTDIR)$(PREFIX)/share/man/man1 \
		$(DESTDIR)$(PREFIX)/share/man/man8 $(DESTDIR)$(PREFIX)/share/gaiafs $(dir $(addprefix $(DESTDIR)$(PREFIX)/,$(COMPLETIONS)))
	install -m 755 $(BUILD)/gaiafs $(DESTDIR)$(PREFIX)/bin
	ln -sf $(PREFIX)/bin/gaiafs $(DESTDIR)$(SBINDIR)/mount.fuse.gaiafs
	ln -sf $(PREFIX)/bin/gaiafs $(DESTDIR)$(SBINDIR)/umount.fuse.gaiafs
	$(BUILD)/gaiafs manual $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 packaging/mount.fuse.gaiafs.8 packaging/umount.fuse.gaiafs.8 $(DESTDIR)$(PREFIX)/share/man/man8
	install -m 644 packaging/grafana.json $(DESTDIR)$(PREFIX)/share/gaiafs
	$(BUILD)/gaiafs completion bash > $(DESTDIR)$(PREFIX)/$(word 1,$(COMPLETIONS))
	$(BUILD)/gaiafs completion zsh > $(DESTDIR)$(PREFIX)/$(word 2,$(COMPLETIONS))
	$(BUILD)/gaiafs completion fish > $(DESTDIR)$(PREFIX)/$(word 3,$(COMPLETIONS))
	sed 's|@PREFIX@|$(PREFIX)|' packaging/gaiafs@.service > $(DESTDIR)$(UNITDIR)/gaiafs@.service
	chmod 644 $(addprefix $(DESTDIR)$(PREFIX)/,$(COMPLETIONS)) $(DESTDIR)$(UNITDIR)/gaiafs@.service

.PHONY: gaiafs-uninstall
gaiafs-uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/gaiafs $(addprefix $(DESTDIR)$(SBINDIR)/,mount.fuse.gaiafs umount.fuse.gaiafs) \
		$(DESTDIR)$(UNITDIR)/gaiafs@.service \
		$(DESTDIR)$(PREFIX)/share/man/man1/gaiafs.1 $(DESTDIR)$(PREFIX)/share/man/man1/gaiafs-*.1 \
		$(addprefix $(DESTDIR)$(PREFIX)/share/man/man8/,mount.fuse.gaiafs.8 umount.fuse.gaiafs.8) \
		$(DESTDIR)$(PREFIX)/share/gaiafs/grafana.json $(addprefix $(DESTDIR)$(PREFIX)/,$(COMPLETIONS))
	[ ! -d $(DESTDIR)$(PREFIX)/share/gaiafs ] || rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/share/gaiafs

##@ Packages

.PHONY: stage
stage: # Stage the packages' contents: gaiafs and libgaiafs, with the libraries in LIBDIR
	rm -rf $(STAGE)
	$(MAKE) gaiafs-install PREFIX=/usr DESTDIR=$(CURDIR)/$(STAGE)/gaiafs
	$(MAKE) libgaiafs-install PREFIX=/usr DESTDIR=$(CURDIR)/$(STAGE)/libgaiafs
	install -d $(STAGE)/gaiafs/etc/gaiafs

# The linkers of Fedora and its relatives look for 64-bit libraries in lib64.
rpm: LIBDIR := lib64

# Packages of later commits have higher versions, so that they upgrade earlier ones. The packages of a release replace
# those that were built before its tag. It is found out once, by the first rule that needs it.
PACKAGE_VERSION = $(eval PACKAGE_VERSION := $(shell packaging/version))$(PACKAGE_VERSION)

.PHONY: deb rpm
deb rpm: ## Build packages for Debian and Fedora and their relatives, in build/packages
	@mkdir -p $(BUILD); $(MAKE) -s stage LIBDIR=$(LIBDIR) >$(BUILD)/$@.log 2>&1 || { cat $(BUILD)/$@.log; exit 1; }
	@packaging/finish $@ $(STAGE) $(PACKAGE_VERSION)
	@mkdir -p $(PACKAGE_DIR)
	@rm -f $(PACKAGE_DIR)/*.$@
	@for name in gaiafs libgaiafs; do \
		PACKAGE_VERSION=$(PACKAGE_VERSION) ARCH=$$($(GO) env GOARCH) $(GO) run $(NFPM) package \
			-f packaging/$$name.yaml -p $@ -t $(PACKAGE_DIR) >$(BUILD)/$@.log 2>&1 || { cat $(BUILD)/$@.log; exit 1; }; \
	done
	@ls $(PACKAGE_DIR)/*.$@

.PHONY: image
image: stage ## Build a container image in build/packages, without a container runtime, as root
	packaging/image $(STAGE) $(PACKAGE_DIR)/gaiafs-$(RELEASE).image.tar gaiafs:$(RELEASE)

.PHONY: release
release: ## Tag the version in VERSION, and put packages, wheel, image and notes into build/release, as root
	packaging/release $(BUILD)/release

.PHONY: test-image
test-image: image ## Unpack the image and mount with its contents, as root
	packaging/test-image $(PACKAGE_DIR)/gaiafs-$(RELEASE).image.tar

.PHONY: test-containers
test-containers: image ## Run the image as docs/howto/containers.md says, as root; needs podman or docker
	packaging/test-containers $(PACKAGE_DIR)/gaiafs-$(RELEASE).image.tar gaiafs:$(RELEASE) $(BUILD)/gaiafs \
		$(BUILD)/libgaiafs.a

.PHONY: first-minutes
first-minutes: deb wheel ## Time a newcomer's first minutes in an empty Debian, as root
	rm -rf $(BUILD)/debian
	mmdebstrap --quiet --variant=apt bookworm $(BUILD)/debian
	packaging/first-minutes $(PACKAGE_DIR) $(BUILD)/wheel $(BUILD)/debian

.PHONY: test-packages
test-packages: deb ## Install, upgrade and remove the packages in a clean Debian, as root: minutes
	packaging/test $(PACKAGE_DIR)

.PHONY: test-rpm
test-rpm: rpm ## Install, upgrade and remove the rpm packages in an empty root, as root; needs rpm
	packaging/test-rpm $(PACKAGE_DIR)
