# make demo and make test need nothing but python3 and PyPI: each sets up what is missing first.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export UV_SYSTEM_CERTS := 1

# The user's own uv where it answers (a shim may exist and be dead), else one in .uv/.
UV_VERSION := 0.13.8
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
PYTHON := .venv/bin/python
SYNCED := .venv/.synced
# Not `te`, which would compile Transformer Engine; EXTRAS="megatron hf demo te" adds it.
EXTRAS := megatron hf demo
PYTEST_ARGS ?=
# Tested beside the one of uv.lock.
MEGATRON_VERSIONS := 0.18.2 0.19.0
VERSION ?= 0.19.2
TREE ?=
VERSION_ARGS ?=
DEMO_ARGS ?=

.PHONY: help setup demo slurm-demo test test-megatron test-frameworks test-newest lint docs format clean

help:
	@echo "make demo    pretrain a small GPT twice, stock and with --attention-backend magi, and compare"
	@echo "make slurm-demo  train on a Slurm cluster of two nodes on this machine, interrupt it, compare (needs slurm-wlm)"
	@echo "make test    run the CPU test suite (PYTEST_ARGS=... for more arguments)"
	@echo "make test-megatron VERSION=0.18.2  test what depends on Megatron under another megatron-core (or TREE=folder)"
	@echo "make test-frameworks FRAMEWORKS=trl  test with frameworks themselves, which it puts into build/frameworks"
	@echo "make test-newest  test with the newest torch and transformers (tests/newest.txt), in build/newest"
	@echo "make lint    check style, the direction of imports, and the documents' links"
	@echo "make docs    build the documents as a site, in build/site"
	@echo "make format  apply the style"
	@echo "make setup   only set up .venv"
	@echo "make clean   remove what make and the tools made, .venv included"

setup: $(SYNCED)

$(SYNCED): pyproject.toml setup.py uv.lock .python-version $(wildcard csrc/solver/* csrc/calls/*) $(filter .uv/bin/uv,$(UV))
	$(UV) sync --locked --compile-bytecode $(EXTRAS:%=--extra %)
	@touch $@

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

demo: setup
	$(PYTHON) -m megatron_magi.demo $(DEMO_ARGS)

# Not part of make test: it needs the package slurm-wlm and some minutes. Root or not, it ends all that it starts.
slurm-demo: setup
	$(PYTHON) pretrain_scripts/slurm/lab/demo.py

# Several processes share the tests (tests/conftest.py says how many), and the versions run beside each other: much of
# either waits for one core.
test: setup
	$(PYTHON) -m pytest $(or $(PYTEST_ARGS),-n auto --dist worksteal)
	$(if $(PYTEST_ARGS),,$(MAKE) --no-print-directory -j$(words $(MEGATRON_VERSIONS)) --output-sync=line \
		$(MEGATRON_VERSIONS:%=test-megatron-%))

test-megatron-%: setup
	$(PYTHON) tests/megatron_versions.py --version $*

# What depends on Megatron, under another megatron-core: VERSION of PyPI, or TREE, a folder that has megatron/.
test-megatron: setup
	$(PYTHON) tests/megatron_versions.py $(if $(TREE),--tree $(TREE),--version $(VERSION)) $(VERSION_ARGS)

# The newest torch and transformers, in an environment of their own, with all else as uv.lock has it.
NEWEST_TESTS := tests/plan/test_plan.py tests/ops/test_slice_attention.py tests/ops/test_torch_compile.py \
	tests/attention/test_distributed.py tests/mcore tests/e2e/test_loss_parity.py tests/hf

test-newest: build/newest/installed
	build/newest/bin/python -m pytest $(or $(PYTEST_ARGS),-n auto --dist worksteal $(NEWEST_TESTS))

build/newest/installed: tests/newest.txt uv.lock $(SYNCED)
	rm -rf $(@D)
	$(UV) venv -q --python $(PYTHON) $(@D)
	$(UV) export -q --locked --no-emit-project --no-hashes $(EXTRAS:%=--extra %) \
		| grep -vE '^(torch|triton|transformers|nvidia-.*|cuda-.*)==' > $(@D)/locked.txt
	$(UV) --no-config pip install -q --python $(@D)/bin/python -r $(@D)/locked.txt -r $<
	@touch $@

CXX_SOURCES = $(shell git ls-files '*.cu' '*.cuh' '*.cpp' '*.hpp' '*.h')
SHELL_SOURCES = $(shell git ls-files '*.sh' '*.sbatch')

# Each framework lies in a folder of its own, beside what uv.lock has: tests/frameworks/NAME.txt, without dependencies.
# torchtitan needs a newer torch than uv.lock has, hence no constraints.
# The folder is a site-packages, because `dill`, by which `datasets` hashes, takes other modules for a user's.
FRAMEWORKS ?= $(basename $(notdir $(wildcard tests/frameworks/*.txt)))

test-frameworks: setup $(FRAMEWORKS:%=build/frameworks/%/installed)
	$(foreach n,$(FRAMEWORKS),PYTHONPATH=build/frameworks/$(n)/site-packages $(PYTHON) -m pytest tests/frameworks/test_$(n)*.py && ) true

build/frameworks/%/installed: tests/frameworks/%.txt
	rm -rf $(@D)
	$(UV) --no-config pip install -q --python $(PYTHON) --no-deps --target $(@D)/site-packages -r $<
	@touch $@

lint: setup docs
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	$(if $(CXX_SOURCES),.venv/bin/clang-format --dry-run --Werror $(CXX_SOURCES))
	$(if $(SHELL_SOURCES),.venv/bin/shellcheck --external-sources $(SHELL_SOURCES))
	.venv/bin/hadolint Dockerfile
	.venv/bin/zizmor --quiet --offline .github/workflows

# Strict: a link, an anchor or a picture that is not there is an error. Needs no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

format: setup
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	$(if $(CXX_SOURCES),.venv/bin/clang-format -i $(CXX_SOURCES))

clean:
	rm -rf .venv .uv build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f megatron_magi/plan/_solver*.so megatron_magi/backends/tiles/_tiles*.so megatron_magi/cuda/_calls*.so
	find megatron_magi tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
