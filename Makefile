# The commands of the project. Each does its own set-up; CMake does the building (see CMakePresets.json).

PREFIX ?= /usr/local
DESTDIR ?=
VECTORS ?= tests/vectors
ARGS ?=

.DEFAULT_GOAL := build
.PHONY: help setup build debug demo demo-vllm check check-hostile check-network check-property check-ucx check-vectors check-long check-container check-deb check-page check-python check-sglang check-trace check-vllm wheel fuzz \
	bench bench-cuda bench-hosts bench-vllm carry-cuda check-cuda lint format abi-record mutate install uninstall deb clean

help:
	@echo 'make                  build the library and the command into build/release'
	@echo 'make demo             move a cache between two engines and verify it; ARGS="--help" lists its options'
	@echo 'make demo-vllm        two vLLM servers, a proxy, a question, its answer and what moved (6 GB); ARGS=--push'
	@echo 'make check            build and run all tests, plain, under ASan+UBSan, and those with threads under TSan'
	@echo 'make check-property   the property tests; KVF_SEED and KVF_CASES choose seed and number of cases'
	@echo 'make check-hostile    attack honest pairs; ARGS="protocol --seconds 5 --settle", "shm --seconds 5" or "stage --seconds 5"'
	@echo 'make check-network    engines on hosts of their own over links that are slow, cut and gone; as root; ARGS=--short'
	@echo 'make check-ucx        the UCX transport over several versions of UCX, which are downloaded into build/ucx (100 MB)'
	@echo 'make check-vectors    the recorded cases of one folder; VECTORS=folder'
	@echo 'make check-long       100000 property cases and 10000 requests with faults, invariants asserted; ASan+UBSan; UCX versions; all fuzz targets; kernels for ARM, emulated; an hour of faults with vLLM (6 GB)'
	@echo 'make check-page       the pages of kvferry plan and sweep in a real browser, which is installed for it (100 MB)'
	@echo 'make check-deb        install the packages of make deb into a fresh Debian, use and remove them there; as root (100 MB)'
	@echo 'make check-container  build the image of packaging/Containerfile by a container engine, and run it; as root (400 MB)'
	@echo 'make check-trace      have Perfetto open a trace of two agents, in a real browser, both installed for it (150 MB)'
	@echo 'make check-python     install the Python package into build/python, test it, and try its wheel'
	@echo 'make check-vllm       two vLLM servers, a prefill and a decode one, in an environment of their own (6 GB); ARGS=--short'
	@echo 'make check-sglang     two SGLang servers likewise, in an environment of their own (7 GB); ARGS="tp1-tp2 faults"'
	@echo 'make check-cuda       the tests of devices on a GPU; without one it prints "skipped: no GPU" and succeeds'
	@echo 'make bench-cuda       the benchmark of devices on a GPU; the same without one'
	@echo 'make carry-cuda       pack both, with Python, for a machine without a network: build/carry/*.tar.gz; KVF_CARRY_UCX=1'
	@echo 'make wheel            build the Python package into build/wheel, self-contained'
	@echo 'make fuzz             every decoder under libFuzzer, KVF_FUZZ_SECONDS (60) each'
	@echo 'make bench            build and run the benchmarks; results in build/release/bench/*.json'
	@echo 'make bench-hosts      the benchmarks "network" and "packed" between two hosts over links of 1, 2.5 and 10 Gbit/s; as root; ARGS="10000"'
	@echo 'make bench-vllm       hand-over between two vLLM servers, by kvferry and by the NixlConnector (6 GB); ARGS=--layers, ARGS=--load'
	@echo 'make lint             clang-format, clang-tidy and cppcheck; make format rewrites the files'
	@echo 'make mutate           list the changes of single operators that no test notices; ARGS="--count 50 src/agent"'
	@echo 'make abi-record       after an intended change of the public interface: renew the record that make check compares with'
	@echo 'make debug            build into build/debug'
	@echo 'make install          install into $(DESTDIR)$(PREFIX); PREFIX and DESTDIR may be set'
	@echo 'make uninstall        remove what the last make install installed; give the same DESTDIR'
	@echo 'make deb              build Debian packages in a clean tree, examined by lintian: build/deb/*.deb'
	@echo 'make setup            install the packages that the targets above need, and nothing else'
	@echo 'make clean            remove build/'

setup:
	@scripts/setup build check

build:
	@scripts/setup build
	@scripts/build release

debug:
	@scripts/setup build
	@scripts/build debug

demo:
	@scripts/setup build
	@scripts/build release --target kvferry_command
	build/release/kvferry demo $(ARGS)

demo-vllm:
	@scripts/setup build python
	@scripts/demo-vllm $(ARGS)

check:
	@scripts/check

check-property:
	@scripts/setup build check
	@scripts/build release -DKVF_BUILD_TESTS=ON
	@scripts/check-property release

check-hostile:
	@scripts/setup build check
	@scripts/build release -DKVF_BUILD_TESTS=ON --target hostile
	@scripts/check-hostile $(ARGS)

check-network:
	@scripts/setup build check network
	@scripts/build release -DKVF_BUILD_TESTS=ON --target network kvferry_command
	@scripts/check-network $(ARGS)
check-ucx:
	@scripts/setup build check python
	@scripts/build release -DKVF_BUILD_TESTS=ON
	@scripts/check-ucx release

check-vectors:
	@scripts/setup build check
	@scripts/build release -DKVF_BUILD_TESTS=ON --target vectors
	build/release/tests/vectors/vectors $(VECTORS)

check-long:
	@scripts/setup build check cross fuzz python
	@scripts/build faults -DKVF_BUILD_TESTS=ON
	@KVF_CASES=$${KVF_CASES:-100000} scripts/check-property faults
	build/faults/tests/faults/faults --requests $${KVF_REQUESTS:-10000} --round 400
	@scripts/build asan -DKVF_BUILD_TESTS=ON
	ctest --preset asan
	scripts/check-hostile asan protocol --seconds 30 --together $${KVF_HOSTILE_SECONDS:-3600} --settle
	scripts/check-hostile asan shm --seconds 30 --together 60 --any-speed
	scripts/check-hostile asan stage --seconds 30 --together 60 --any-speed
	scripts/check-ucx faults
	@scripts/check-neon
	@scripts/fuzz
	scripts/check-vllm --minutes=$${KVF_VLLM_MINUTES:-30} faults faults-push-layers
	scripts/check-sglang

fuzz:
	@scripts/setup build fuzz
	@scripts/fuzz

check-deb: deb
	@scripts/setup chroot
	@scripts/check-deb

check-container:
	@scripts/setup container
	@scripts/check-container

check-trace:
	@scripts/setup build python page
	@scripts/check-trace

check-page:
	@scripts/setup build page
	@scripts/build release --target kvferry_command
	@scripts/check-page

check-python:
	@scripts/setup build python device
	@scripts/check-python $(ARGS)

check-vllm:
	@scripts/setup build python
	@scripts/check-vllm $(ARGS)

check-sglang:
	@scripts/setup build python
	@scripts/check-sglang $(ARGS)

check-cuda:
	@scripts/setup build check device
	@scripts/device-compiler
	@scripts/build release -DKVF_BUILD_TESTS=ON
	@scripts/check-cuda

bench-cuda:
	@scripts/setup build device
	@scripts/device-compiler
	@scripts/build release -DKVF_BUILD_BENCH=ON --target bench_cuda
	@scripts/bench-cuda

carry-cuda:
	@scripts/setup build check device python
	@scripts/carry-cuda

wheel:
	@scripts/setup build python device
	@scripts/wheel

bench:
	@scripts/setup build
	@scripts/build release -DKVF_BUILD_BENCH=ON
	@scripts/bench

bench-hosts:
	@scripts/setup build
	@scripts/build release -DKVF_BUILD_BENCH=ON --target bench_network bench_packed
	@scripts/bench-hosts $(ARGS)

bench-vllm:
	@scripts/setup build python
	@scripts/bench-vllm $(ARGS)

lint:
	@scripts/setup build check lint
	@scripts/lint

format:
	@scripts/setup lint
	@scripts/lint --fix-format

mutate:
	@scripts/setup build check device
	@scripts/device-compiler
	@scripts/mutate $(or $(ARGS),src/agent)

abi-record:
	@scripts/setup build check
	@tests/install/abi.sh record include tests/install/abi/kvferry.abi cc

install:
	@scripts/setup build
	@scripts/build release -DCMAKE_INSTALL_PREFIX='$(PREFIX)' --target kvferry kvferry_static kvferry_command
	DESTDIR='$(DESTDIR)' cmake --install build/release

uninstall:
	@DESTDIR='$(DESTDIR)' scripts/uninstall build/release

deb:
	@scripts/setup build deb
	@scripts/deb

clean:
	rm -rf build
