# Targets for people; chores with logic are in xtask/.

CARGO ?= cargo
DIST ?= dist
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release

.PHONY: help build ptx demo test clean

help:
	@echo 'make build   $(DIST)/: the plugin, the software card, the host and device libraries and headers, the ferrogin tool'
	@echo 'make ptx     build, then $(DIST)/cuda/: the device code as PTX and as objects that nvcc links (fetches nvcc from PyPI)'
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
	install -m 755 $(RELEASE)/ferrogin $(DIST)/ferrogin
	cp -R ffi-headers/include/. $(DIST)/include/

ptx: build
	mkdir -p $(DIST)/cuda
	$(DIST)/ferrogin ptx > $(DIST)/cuda/ferrogin_device.ptx
	tests/cuda/objects.sh "$$(tests/cuda/fetch-tools.sh)" $(DIST)/cuda/ferrogin_device.ptx $(DIST)/cuda

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
