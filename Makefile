# Targets for people; chores with logic are in xtask/.

CARGO ?= cargo
DIST ?= dist
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
MAJOR := $(firstword $(subst ., ,$(VERSION)))
ROOT = $(DESTDIR)$(PREFIX)
CMAKE_DIR = $(ROOT)/lib/cmake/ferrogin
FILL_IN := sed 's/@VERSION@/$(VERSION)/;s/@MAJOR@/$(MAJOR)/'
OTHER_LIBRARIES := libnccl-gin-ferrogin.so libsoftefa-fi.so libferrogin_device.so

.PHONY: help build install uninstall ptx wheel book demo test clean

help:
	@echo 'make build   $(DIST)/: the plugin, the software card, the host and device libraries and headers, the ferrogin tool'
	@echo 'make ptx     build, then $(DIST)/cuda/: the device code as PTX and as objects that nvcc links (fetches nvcc from PyPI)'
	@echo 'make wheel   build, then $(DIST)/ferrogin-$(VERSION)-*.whl: the Python package with all of these (after make ptx with the objects too)'
	@echo 'make install PREFIX=$(PREFIX) DESTDIR=   copies what make build made; make uninstall removes it'
	@echo 'make book    target/book/index.html: the documentation as a book (installs mdBook into .cache/)'
	@echo 'make demo    build, then two ranks exchange values through the plugin on the software card'
	@echo 'make test    build, then all tests; ends with how many passed, failed and were skipped'
	@echo 'make clean   remove what was built and fetched'
	@echo 'demo and test first install what is missing with apt-get: scripts/install-deps.sh says what.'

build:
	$(CARGO) build --release --locked -p nccl-gin-ferrogin -p softefa -p ferrogin-device -p ferrogin-host -p ferrogin
	install -d $(DIST)/include
	install -m 755 $(RELEASE)/libnccl_gin_ferrogin.so $(DIST)/libnccl-gin-ferrogin.so
	install -m 755 $(RELEASE)/libsoftefa_fi.so $(DIST)/libsoftefa-fi.so
	install -m 755 $(RELEASE)/libferrogin_device.so $(DIST)/libferrogin_device.so
	install -m 755 $(RELEASE)/libferrogin.so $(DIST)/libferrogin.so
	ln -sf libferrogin.so $(DIST)/libferrogin.so.$(MAJOR)
	install -m 755 $(RELEASE)/ferrogin $(DIST)/ferrogin
	cp -R ffi-headers/include/. $(DIST)/include/

# It builds nothing, so that root runs no compiler. Only libferrogin.so has a version in its name: NCCL and libfabric find the plugin and the
# software card by the names of their files.
install:
	@test -f $(DIST)/libferrogin.so || { echo '$(DIST)/libferrogin.so is missing: run make build first' >&2; exit 1; }
	install -d $(ROOT)/bin $(ROOT)/include/ferrogin $(ROOT)/lib/pkgconfig $(CMAKE_DIR)
	install -m 755 $(DIST)/ferrogin $(ROOT)/bin/ferrogin
	install -m 755 $(DIST)/libferrogin.so $(ROOT)/lib/libferrogin.so.$(VERSION)
	ln -sf libferrogin.so.$(VERSION) $(ROOT)/lib/libferrogin.so.$(MAJOR)
	ln -sf libferrogin.so.$(MAJOR) $(ROOT)/lib/libferrogin.so
	install -m 755 $(OTHER_LIBRARIES:%=$(DIST)/%) $(ROOT)/lib
	install -m 644 $(wildcard $(DIST)/include/ferrogin/*) $(ROOT)/include/ferrogin
	$(FILL_IN) scripts/install/ferrogin.pc.in | install -m 644 /dev/stdin $(ROOT)/lib/pkgconfig/ferrogin.pc
	$(FILL_IN) scripts/install/ferrogin-config.cmake.in | install -m 644 /dev/stdin $(CMAKE_DIR)/ferrogin-config.cmake
	$(FILL_IN) scripts/install/ferrogin-config-version.cmake.in | install -m 644 /dev/stdin $(CMAKE_DIR)/ferrogin-config-version.cmake

uninstall:
	rm -f $(ROOT)/bin/ferrogin $(OTHER_LIBRARIES:%=$(ROOT)/lib/%) $(ROOT)/lib/pkgconfig/ferrogin.pc
	rm -f $(ROOT)/lib/libferrogin.so $(ROOT)/lib/libferrogin.so.$(MAJOR) $(ROOT)/lib/libferrogin.so.$(VERSION)
	rm -rf $(ROOT)/include/ferrogin $(CMAKE_DIR)

ptx: build
	mkdir -p $(DIST)/cuda
	$(DIST)/ferrogin ptx > $(DIST)/cuda/ferrogin_device.ptx
	cp ptx/ferrogin_device.bc $(DIST)/cuda/
	tests/cuda/objects.sh "$$(tests/cuda/fetch-tools.sh)" $(DIST)/cuda/ferrogin_device.ptx $(DIST)/cuda

wheel: build
	@python/wheel.sh $(DIST)

book:
	@scripts/book.sh

demo:
	@scripts/install-deps.sh demo
	@$(MAKE) --no-print-directory build
	$(DIST)/ferrogin demo

test:
	@scripts/install-deps.sh test
	@$(MAKE) --no-print-directory build
	FERROGIN_DIST=$(abspath $(DIST)) $(CARGO) xtask test

clean:
	$(CARGO) clean
	rm -rf $(DIST) .cache
