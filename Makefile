# Targets for people to call; chores with logic are in xtask/.

CARGO ?= cargo
DIST ?= dist
TARGET := $(or $(CARGO_TARGET_DIR),target)
PROFILE ?= release
# Building for another target needs its own flags and directory: scripts/release.sh builds for aarch64.
BUILD_FLAGS ?=
RELEASE ?= $(TARGET)/$(PROFILE)
PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
MAJOR := $(firstword $(subst ., ,$(VERSION)))
# An installation may be moved, so its files refer to each other by relative paths: LIBDIR must be below PREFIX.
LIBDIR ?= $(PREFIX)/lib
LIB := $(patsubst $(PREFIX)/%,%,$(LIBDIR))
UP := $(shell echo '$(LIB)' | sed 's|[^/][^/]*|..|g')
ROOT = $(DESTDIR)$(PREFIX)
DOC = $(ROOT)/share/doc/ferrogin
MAN = $(ROOT)/share/man/man1
COMPLETIONS = $(addprefix $(ROOT)/share/,bash-completion/completions zsh/site-functions fish/vendor_completions.d)
CMAKE_DIR = $(ROOT)/$(LIB)/cmake/ferrogin
FILL_IN := sed 's|@VERSION@|$(VERSION)|;s|@MAJOR@|$(MAJOR)|;s|@LIB@|$(LIB)|;s|@UP@|$(UP)|'
# Programs link to these by their sonames.
LINKED := libferrogin.so libferrogin_device.so
# NCCL and libfabric find these by file name.
LOADED := libnccl-gin-ferrogin.so libsoftefa-fi.so
# NCCL's other name for the plugin, with NCCL_RMA_PLUGIN=ferrogin.
RMA := libnccl-rma-ferrogin.so

.PHONY: help build dev install uninstall ptx wheel book release demo test check test-gpu clean

help:
	@echo 'make build   $(DIST)/: the plugin, the software card, the host and device libraries and headers, the ferrogin tool'
	@echo '             with NVCC=FILE or CUDA_HOME=DIRECTORY also $(DIST)/cuda/, as make ptx'
	@echo 'make dev     build with the profile quick: fast to build again after a change, slower to run'
	@echo 'make ptx     build, then $(DIST)/cuda/: the device code also as objects that nvcc links (fetches nvcc from PyPI)'
	@echo 'make wheel   build, then $(DIST)/ferrogin-$(VERSION)-*.whl: the Python package with all of these (after make ptx with the objects too)'
	@echo 'make install PREFIX=$(PREFIX) LIBDIR=$(LIBDIR) DESTDIR=   copies what make build and make ptx made; make uninstall removes it'
	@echo 'make book    target/book/index.html: the documentation as a book (installs mdBook into .cache/)'
	@echo 'make release target/release-tarballs/: a tarball for x86-64 and one for aarch64, after checks (SNAPSHOT=1: of any tree)'
	@echo 'make demo    build, then two ranks exchange values through the plugin on the software card: by CPU threads, then as PTX'
	@echo 'make test    build, then the tests of every part; ends with how many passed, failed and were skipped'
	@echo 'make check   build, then everything else that a change must pass: lints, models, nvcc, more configurations, other projects'
	@echo 'make test-gpu build, then the tests that need a GPU (fetches nvcc, NCCL and compute-sanitizer from PyPI), and a report to send'
	@echo 'make clean   remove what was built and fetched'
	@echo 'demo, test and check first install what is missing with apt-get: scripts/install-deps.sh says what.'

# The tool's PTX; a tool for another processor may not run here. Objects of other PTX are removed.
define MODULE
install -d $(DIST)/cuda
$(DIST)/ferrogin ptx >$(DIST)/module.ptx 2>/dev/null || cp device-kernels/ptx/ferrogin_device.ptx $(DIST)/module.ptx
cmp -s $(DIST)/module.ptx $(DIST)/cuda/ferrogin_device.ptx || rm -f $(DIST)/cuda/*.o
install -m 644 $(DIST)/module.ptx $(DIST)/cuda/ferrogin_device.ptx && rm $(DIST)/module.ptx
install -m 644 device-kernels/ptx/ferrogin_device.bc $(DIST)/cuda
endef

build:
	$(CARGO) build --profile $(PROFILE) --locked $(BUILD_FLAGS) -p ferrogin-host-plugin -p softefa -p soft-verbs -p soft-gpu -p ferrogin-device-kernels -p ferrogin-host-api -p ferrogin
	rm -rf $(DIST)/include
	install -d $(DIST)/include
	install -m 755 $(RELEASE)/libnccl_gin_ferrogin.so $(DIST)/libnccl-gin-ferrogin.so
	ln -sf libnccl-gin-ferrogin.so $(DIST)/$(RMA)
	install -m 755 $(RELEASE)/libsoftefa_fi.so $(DIST)/libsoftefa-fi.so
	install -m 755 $(RELEASE)/libferrogin_device.so $(DIST)/libferrogin_device.so
	install -m 755 $(RELEASE)/libferrogin.so $(DIST)/libferrogin.so
	for library in $(LINKED); do ln -sf $$library $(DIST)/$$library.$(MAJOR); done
	install -m 755 $(RELEASE)/ferrogin $(DIST)/ferrogin
	cp -R ffi-headers/include/. $(DIST)/include/
	emulators/soft-verbs/link.sh $(RELEASE)/libsoft_verbs.a $(DIST)/verbs
	install -d $(DIST)/gpu
	install -m 755 $(RELEASE)/libsoft_gpu.so $(DIST)/gpu/libcuda.so.1
	ln -sf libcuda.so.1 $(DIST)/gpu/libcuda.so
	install -m 644 emulators/soft-gpu/tests/cuda.h $(DIST)/gpu/cuda.h
	$(MODULE)
	if test -n "$(NVCC)$(CUDA_HOME)" && test -d $(RELEASE)/cuda; then install -m 644 $(RELEASE)/cuda/* $(DIST)/cuda; fi

# The same files in $(DIST)/, for the edit loop.
dev:
	@$(MAKE) --no-print-directory build PROFILE=quick

# These recipes use absolute paths, which a space would split.
define CHECK_PLACES
@for place in '$(PREFIX)' '$(LIBDIR)' '$(DESTDIR)'; do case "$$place" in *[[:space:]]*) \
  echo "PREFIX, LIBDIR and DESTDIR must have no spaces: $$place" >&2; exit 1;; esac; done
@case '$(PREFIX)' in /*) ;; *) echo 'PREFIX=$(PREFIX) is relative: pass an absolute path, such as PREFIX=$(CURDIR)/$(PREFIX)' >&2; exit 1;; esac
endef

# Builds nothing, so that root runs no compiler. Every user can read what it installs, whatever the umask is now and was during the build.
install:
	$(CHECK_PLACES)
	@test -f $(DIST)/libferrogin.so || { echo '$(DIST)/libferrogin.so is missing: run make build first' >&2; exit 1; }
	@case '$(LIB)' in /*) echo 'LIBDIR=$(LIBDIR) is not below PREFIX=$(PREFIX): choose a directory in it' >&2; exit 1;; esac
	install -d $(ROOT)/bin $(ROOT)/include/ferrogin $(ROOT)/$(LIB)/pkgconfig $(CMAKE_DIR)
	install -m 755 $(DIST)/ferrogin $(ROOT)/bin/ferrogin
	set -e; for library in $(LINKED); do \
	  install -m 755 $(DIST)/$$library $(ROOT)/$(LIB)/$$library.$(VERSION); \
	  ln -sf $$library.$(VERSION) $(ROOT)/$(LIB)/$$library.$(MAJOR); \
	  ln -sf $$library.$(MAJOR) $(ROOT)/$(LIB)/$$library; \
	done
	install -m 755 $(LOADED:%=$(DIST)/%) $(ROOT)/$(LIB)
	ln -sf libnccl-gin-ferrogin.so $(ROOT)/$(LIB)/$(RMA)
	cp -RP $(DIST)/include/ferrogin/. $(ROOT)/include/ferrogin && chmod -R u=rwX,go=rX $(ROOT)/include/ferrogin
	install -d $(ROOT)/$(LIB)/ferrogin/cuda && install -m 644 $(DIST)/cuda/* $(ROOT)/$(LIB)/ferrogin/cuda
	install -d $(DOC) && install -m 644 LICENSE THIRD-PARTY-NOTICES.txt sbom.cdx.json $(DOC)
	install -d $(DOC)/docs $(DOC)/examples && install -m 644 docs/*.md docs/perf.schema.json $(DOC)/docs
	install -m 644 examples/README.md examples/example.h examples/*.cu $(DOC)/examples
	install -d $(DOC)/examples/ep && install -m 644 examples/ep/* $(DOC)/examples/ep
	install -d $(MAN) $(COMPLETIONS) && install -m 644 scripts/install/man/*.1 $(MAN)
	install -m 644 scripts/install/completions/bash/ferrogin $(ROOT)/share/bash-completion/completions
	install -m 644 scripts/install/completions/zsh/_ferrogin $(ROOT)/share/zsh/site-functions
	install -m 644 scripts/install/completions/fish/ferrogin.fish $(ROOT)/share/fish/vendor_completions.d
	set -e; install -d $(ROOT)/$(LIB)/ferrogin; for part in verbs gpu; do \
	  rm -rf $(ROOT)/$(LIB)/ferrogin/$$part; \
	  cp -RP $(DIST)/$$part $(ROOT)/$(LIB)/ferrogin/$$part; \
	  chmod -R u=rwX,go=rX $(ROOT)/$(LIB)/ferrogin/$$part; \
	done
	$(FILL_IN) scripts/install/ferrogin.pc.in | install -m 644 /dev/stdin $(ROOT)/$(LIB)/pkgconfig/ferrogin.pc
	$(FILL_IN) scripts/install/ferrogin-config.cmake.in | install -m 644 /dev/stdin $(CMAKE_DIR)/ferrogin-config.cmake
	$(FILL_IN) scripts/install/ferrogin-config-version.cmake.in | install -m 644 /dev/stdin $(CMAKE_DIR)/ferrogin-config-version.cmake

# Also removes libraries and man pages that an earlier installation of another release left.
uninstall:
	$(CHECK_PLACES)
	rm -f $(ROOT)/bin/ferrogin $(LOADED:%=$(ROOT)/$(LIB)/%) $(ROOT)/$(LIB)/$(RMA) $(ROOT)/$(LIB)/pkgconfig/ferrogin.pc
	for library in $(LINKED); do rm -f $(ROOT)/$(LIB)/$$library $(ROOT)/$(LIB)/$$library.[0-9]*; done
	rm -rf $(ROOT)/include/ferrogin $(CMAKE_DIR) $(ROOT)/$(LIB)/ferrogin $(DOC)
	rm -f $(MAN)/ferrogin.1 $(MAN)/ferrogin-*.1 $(foreach dir,$(COMPLETIONS),$(dir)/ferrogin $(dir)/_ferrogin $(dir)/ferrogin.fish)

ptx: build
	tests/cuda/objects.sh "$$(tests/cuda/fetch-tools.sh)" $(DIST)/cuda/ferrogin_device.ptx $(DIST)/cuda

wheel: build
	@python/wheel.sh $(DIST)

book:
	@scripts/book.sh

# SNAPSHOT=1 makes tarballs of a tree that is not a release.
release:
	@scripts/release.sh $(if $(SNAPSHOT),--snapshot)

demo:
	@scripts/install-deps.sh demo
	@$(MAKE) --no-print-directory build
	$(DIST)/ferrogin demo
	@echo
	FERROGIN_DEVICE=cuda $(DIST)/ferrogin gpu -- $(DIST)/ferrogin demo --reps 200

test:
	@scripts/install-deps.sh test
	@$(MAKE) --no-print-directory build
	FERROGIN_DIST=$(abspath $(DIST)) $(CARGO) xtask test

check:
	@scripts/install-deps.sh check
	@$(MAKE) --no-print-directory build
	FERROGIN_DIST=$(abspath $(DIST)) $(CARGO) xtask check

# Builds what the first values need first, to show early whether a put arrives. On a machine without cargo, run tests/gpu/run.sh with what
# was built elsewhere.
test-gpu:
	$(CARGO) build --release --locked -p ferrogin-host-plugin -p softefa -p soft-gpu -p scenario-runner
	install -D -m 755 $(RELEASE)/libnccl_gin_ferrogin.so $(DIST)/libnccl-gin-ferrogin.so
	install -D -m 755 $(RELEASE)/libsoftefa_fi.so $(DIST)/libsoftefa-fi.so
	install -D -m 755 $(RELEASE)/libsoft_gpu.so $(DIST)/gpu/libcuda.so.1
	GPU_SCENARIOS=$(RELEASE)/scenario-runner tests/gpu/run.sh $(DIST) "first values"
	@$(MAKE) --no-print-directory build
	GPU_SCENARIOS=$(RELEASE)/scenario-runner tests/gpu/run.sh $(DIST)

clean:
	$(CARGO) clean
	rm -rf $(DIST) .cache
