# Everything runs in an environment of its own, made once per Python: make test PYTHON=python3.12
SHELL  := /bin/bash
PYTHON ?= python3
ARGS   ?=
# A process for every core, four at most: each may take 4 GB. A file's tests share what they compile, so one runs them.
JOBS   ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV    ?= .venv-$(VERSION)
RUN     := $(VENV)/bin/python
# A line for each package is for a terminal; a log gets warnings and errors.
QUIET   := $(shell test -t 2 || echo --quiet)
INSTALL := $(RUN) -m pip install --disable-pip-version-check $(QUIET) --editable

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test slow tpu gpu in-gpu-environment mutants sanitize test-all notebooks figures docs site lint format wheels clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/core.stamp ## write text with a small language model, speculatively, and compare
	$(RUN) -m jaxspec demo $(ARGS)

# What XLA compiled is kept: the next run takes less than half the time.
quick test: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV))/xla
quick test: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0.2
quick test: export JAX_COMPILATION_CACHE_MAX_SIZE = 4000000000
quick: $(VENV)/dev.stamp ## run what takes little: the exact laws, the formats, the house; no real weights, no mesh
	$(RUN) -m pytest -m "quick and not (slow or tpu or gpu or smollm2)" $(JOBS) $(ARGS)

test: $(VENV)/dev.stamp ## run the tests, but for the slow ones (ARGS= goes to pytest, JOBS= for one process)
	$(RUN) -m pytest --durations=15 $(JOBS) $(ARGS)

slow: $(VENV)/dev.stamp ## run the tests that take minutes
	$(RUN) -m pytest --durations=15 -m slow $(ARGS)

tpu: $(VENV)/dev.stamp ## compile for TPUs without one, and check what the loop does (ARGS=--all for every combination)
	$(INSTALL) '.[tpu]'
	$(RUN) -m pytest -m tpu tests/decode/test_tpu.py tests/train/test_dry_run.py
	$(RUN) -m scripts.prove.tpu_layers
	$(RUN) -m scripts.prove.mesh_layers --chips v5e
	$(RUN) -m scripts.prove.tpu $(ARGS)

# In an environment of its own: its compiler and JAX are of one release.
gpu: ## compile for GPUs without one, and check what the loop does (ARGS=--all for every combination)
	$(MAKE) VENV=.venv-gpu-$(VERSION) in-gpu-environment

# Otherwise the plugin asks for a driver.
in-gpu-environment: export JAX_PLATFORMS = cpu
in-gpu-environment: $(VENV)/core.stamp
	$(INSTALL) '.[test,gpu]'
	$(RUN) -m pytest -m gpu tests/decode/test_gpu.py tests/models/test_products_gpu.py
	$(RUN) -m scripts.prove.gpu_layers
	$(RUN) -m scripts.prove.mesh_layers --chips h100
	$(RUN) -m scripts.prove.gpu $(ARGS)

mutants: $(VENV)/dev.stamp ## bring back bugs that others shipped, one at a time: the tests must find each
	$(RUN) scripts/prove/mutants.py $(ARGS)

sanitize: $(VENV)/dev.stamp ## run the tests of the C++ kernels under AddressSanitizer and UBSan
	$(RUN) -m scripts.prove.sanitize $(ARGS)

test-all: test slow tpu gpu mutants sanitize ## run all of these

notebooks: $(VENV)/dev.stamp ## run the notebooks and save what they print and draw (ARGS= names some)
	$(RUN) scripts/run_notebooks.py $(ARGS)

figures: $(VENV)/core.stamp ## write what README and docs take from records and code: figures, tables of members, pictures
	$(RUN) -m scripts.figures $(ARGS)
	$(RUN) -m scripts.docs

docs: $(VENV)/dev.stamp $(VENV)/browser.stamp site ## run the examples of the documentation, build the site, and look at its pages in Chromium
	$(RUN) -m scripts.docs.look build/site --pictures build/pages
	$(RUN) -m pytest -m "slow or not slow" tests/house/test_docs.py tests/house/test_readme.py tests/house/test_site.py tests/house/test_look.py $(JOBS) $(ARGS)

site: $(VENV)/docs.stamp ## build the site into build/site; a broken link or a page that no other lists fails
	$(RUN) -m sphinx --fail-on-warning --keep-going --nitpicky --fresh-env --quiet \
	  --conf-dir docs --doctree-dir build/doctrees --builder html . build/site
	@echo "build/site/index.html"

lint: $(VENV)/dev.stamp ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

format: $(VENV)/dev.stamp ## mend style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

wheels: $(VENV)/release.stamp ## build what a release uploads into dist, and install each part where there is no compiler
	$(RUN) scripts/prove/wheels.py $(ARGS)

clean: ## remove environments, caches and builds
	rm -rf .venv-* build dist .pytest_cache .ruff_cache .hypothesis .durations
	find jaxspec tests scripts -name __pycache__ -prune -exec rm -rf {} +

# An environment follows pyproject.toml and the kernels: when one is newer than the stamp, pip looks and builds again.
$(VENV)/dev.stamp: $(VENV)/core.stamp
	$(INSTALL) '.[test,lint,notebooks]'
	@touch $@

# What builds and checks a release.
$(VENV)/release.stamp: $(VENV)/core.stamp
	$(INSTALL) '.[release]'
	@touch $@

# What builds the site, apart from what runs the tests.
$(VENV)/docs.stamp: $(VENV)/core.stamp
	$(INSTALL) '.[docs]'
	@touch $@

# What drives the browser; the browser itself is the system's.
$(VENV)/browser.stamp: $(VENV)/core.stamp
	$(INSTALL) '.[browser]'
	@touch $@

$(VENV)/core.stamp: $(VENV)/made.stamp pyproject.toml setup.py $(wildcard jaxspec/kernels/src/*)
	@echo "Installing into $(VENV); the first time this downloads some 200 MB."
	$(INSTALL) .
	@touch $@

$(VENV)/made.stamp:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) on PATH. Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed: $(PYTHON) is '$(VERSION)'. Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments. On Debian: sudo apt install python$(VERSION)-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
