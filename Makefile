# Targets for people; chores with logic are in xtask/.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release

.PHONY: help build demo test clean

help:
	@echo 'make build   dist/: the plugin, the software card, the device library and headers, the ferrogin tool'
	@echo 'make demo    build, then two ranks exchange values through the plugin on the software card'
	@echo 'make test    build, then all tests; ends with how many passed, failed and were skipped'
	@echo 'make clean   remove what was built and fetched'
	@echo 'demo and test first install what is missing with apt-get: scripts/install-deps.sh says what.'

build:
	$(CARGO) build --release --locked -p nccl-gin-ferrogin -p softefa -p ferrogin-device -p ferrogin
	install -d dist/include
	install -m 755 $(RELEASE)/libnccl_gin_ferrogin.so dist/libnccl-gin-ferrogin.so
	install -m 755 $(RELEASE)/libsoftefa_fi.so dist/libsoftefa-fi.so
	install -m 755 $(RELEASE)/libferrogin_device.so dist/libferrogin_device.so
	install -m 755 $(RELEASE)/ferrogin dist/ferrogin
	cp -R ffi-headers/include/. dist/include/

demo:
	@scripts/install-deps.sh demo
	@$(MAKE) --no-print-directory build
	dist/ferrogin demo

test:
	@scripts/install-deps.sh test
	@$(MAKE) --no-print-directory build
	$(CARGO) xtask test

clean:
	$(CARGO) clean
	rm -rf dist .cache
