# The commands of the repository. Each sets up what it needs; a second run skips what is done.
#
#   make demo [FILE=PATH]    the whole thing at work, on a real RDMA stack in a User-Mode Linux
#   make unit [PYTEST="-k name"]    most unit tests: no device, no kernel
#   make test [STAGES="unit lint"] [PYTEST="-k name"]
#   make bench [RECORD=1] [ROUNDS=5]    aiordma beside programs in C, in counted time; docs/benchmarks.md
#   make bench-check [RECORD=1] [ROUNDS=3]    the ordinary programs and a few more against tests/bench/recorded.json
#   make bench-many [NUMBER=10000]    so many connections of one process within 1 GiB; docs/growth.md
#   make profile [RECORD=1]  where every instruction of a message and of a connection goes
#   make simulate [SEEDS=2000] [FIRST=1]    whole systems in a simulated world; docs/simulation.md
#   make fuzz [SECONDS=600]  the C that reads the wire, guided by coverage (needs clang)
#   make mutate [ONLY="name"] bugs that are put in one at a time, and the tests that must find them
#   make calibrate [RECORD=] [PROGRAMS="a_fence a_read"] the fabric's profiles beside the adapters; docs/calibration.md
#   make programs [PROGRAMS=websockets_both]    servers and clients off PyPI under the switch, Ray; docs/switch.md
#   make wheel               the sdist and the wheel for PyPI, in dist/
#   make test-kernels        each kernel of softroce by name: boots, pings, device tests (long)
#   make softroce-wheel      aiordma-softroce, with kernels and rdma-core for any system in its wheel, in dist/
#   make release-check       both, and whether they can be published: each CPython, clean systems
#   make lint [FIX=1]        make docs        make setup        make clean
#
# PYTHON=/path/to/python3 chooses the interpreter for .venv (3.11 or later).

SHELL := /bin/bash
PY := .venv/bin/python
SOFTROCE := $(PY) -m aiordma_softroce
export PYTHON
# As root the runner installs what tools/setup has not.
export AIORDMA_SOFTROCE_INSTALL := 1

SECONDS ?= 600
NUMBER ?= 10000

.PHONY: demo unit test mutate calibrate bench bench-check bench-many profile simulate fuzz programs wheel softroce-wheel test-kernels \
    release-check lint docs \
    setup clean help

demo:
	@tools/setup demo
	@$(SOFTROCE) --timeout 300 -- $(PY) examples/demo.py $(if $(FILE),--file "$(FILE)")

# On one loop, and without what takes half of the time: `make test` runs all.
unit:
	@tools/setup unit
	@$(PY) -m pytest -q -m "not slow" --unit-loop=asyncio $(PYTEST)

test:
	@tools/setup test --no-kernel
	@$(PY) tools/run_tests.py $(STAGES) $(if $(PYTEST),-- $(PYTEST))

mutate:
	@tools/setup test
	@$(PY) tools/mutate.py $(if $(ONLY),--only $(ONLY))

bench:
	@tools/setup bench
	@$(PY) -m tests.bench.run $(if $(RECORD),--record) $(if $(ROUNDS),--rounds $(ROUNDS))
	@$(PY) -m tests.bench.moved $(if $(RECORD),--record)
	$(if $(RECORD),@$(PY) -m tests.bench.profile --record)

bench-check:
	@tools/setup bench
	@$(PY) -m tests.bench.run --check $(if $(RECORD),--record) $(if $(ROUNDS),--rounds $(ROUNDS))
	@$(PY) -m tests.bench.moved

bench-many:
	@tools/setup test
	@$(SOFTROCE) --engine uml --memory 16G -- $(PY) tests/device/thousands.py crowd 10.80.0.1 $(NUMBER)

profile:
	@tools/setup bench
	@$(PY) -m tests.bench.profile $(if $(RECORD),--record)

simulate:
	@tools/setup test --no-kernel
	@$(PY) -m tests.simulation.run --first $(or $(FIRST),1) --count $(or $(SEEDS),2000)

fuzz:
	@tools/setup lint
	@$(PY) tools/fuzz.py --guided $(SECONDS)

# With RECORD= the traces of the adapters are those of the repository.
calibrate: RECORD ?= 1
calibrate:
	@tools/setup test
	@$(PY) -m tests.calibration.compare $(if $(RECORD),--record) --write $(PROGRAMS)

programs:
	@tools/setup test
	@$(PY) -m tests.programs.run $(PROGRAMS)

wheel:
	@tools/setup release
	@$(PY) tools/wheels.py

test-kernels:
	@tools/setup test
	@$(PY) -m pytest -q -W error -p no:cacheprovider softroce/tests/test_kernels.py tests/guests/test_kernels.py -s

softroce-wheel:
	@tools/setup release
	@$(PY) tools/softroce_wheel.py

release-check:
	@tools/setup release
	@$(PY) tools/release_check.py

lint:
	@tools/setup lint
	@$(PY) tools/lint.py $(if $(FIX),--fix)

docs:
	@tools/setup docs
	@$(PY) -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "docs: open build/docs/index.html"

setup:
	@tools/setup test

# The kernel stays: it is in the user's cache, and takes minutes to build.
clean:
	rm -rf build dist *.egg-info softroce/src/*.egg-info softroce/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .coverage .coverage.* htmlcov aiordma/_*/_*.so aiordma/testing/fa*/_*.so aiordma/_ffi/_rdma.c
	find aiordma softroce tests tools examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help:
	@sed -n '3,19s/^# \{0,1\}//p' Makefile
