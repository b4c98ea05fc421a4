# `make demo` and `make test` are enough to start; each builds what it needs. `make help` lists the rest.
# PYTHON=/path/to/python3.12 chooses the interpreter, PYTEST_ARGS="..." goes to pytest (-n 0: one test after another).

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Removes from the caller's environment only what would mix in other packages; indexes, proxies and caches stay.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE VIRTUAL_ENV CONDA_PREFIX MAXTEXT_PP_EXT

PYTHON ?=
PYTEST_ARGS ?=
# A file's tests stay in one process, since some share slow fixtures. Each process may take 2.5 GiB.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
AUDIT := --requirement .ci/constraints-cpu.txt --no-deps --disable-pip
SOURCES := $(wildcard maxtext_pp_ext tests benchmarks examples)
VENV_PYTHON := .venv/bin/python
DOCS := --constraint .ci/constraints-cpu.txt --constraint .ci/constraints-docs.txt --editable '.[cpu,tools,docs]'
SPHINX := DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu $(VENV_PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -c docs/site

# Rebuilds an environment whose interpreter is gone (moved folder, removed Python), or that lacks the package.
ifneq ($(wildcard .venv/installed),)
  ifneq ($(shell $(VENV_PYTHON) -I -c 'from importlib import metadata; metadata.version("maxtext_pp_ext"); print(1)' 2>/dev/null),1)
    $(shell rm -f .venv/installed)
  endif
endif

.PHONY: help demo test test-all mutants matrix pages docs links audit licences lint format constraints wheel clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

# host/build.py writes the start-up hook, so changing it needs a new installation; other sources are used in place.
.venv/installed: setup.cfg pyproject.toml .ci/constraints-cpu.txt .ci/environment maxtext_pp_ext/host/build.py
	@.ci/environment $(PYTHON)

demo: .venv/installed ## train a small model with a pipeline and without, compare the loss curves (4 minutes on 2 cores)
	@$(VENV_PYTHON) -m examples.demo

test: .venv/installed ## the tests (25 minutes on 2 cores at most)
	@$(VENV_PYTHON) -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

test-all: .venv/installed ## the tests and the slow tests
	@$(VENV_PYTHON) -m pytest $(PARALLEL) -o faulthandler_timeout=3600 $(PYTEST_ARGS)

mutants: .venv/installed ## show that the tests notice deliberate faults (15 minutes on 2 cores; MUTANTS="--only NAME")
	@$(VENV_PYTHON) -m tests.mutants $(MUTANTS)

matrix: .venv/installed ## the tests with the oldest and the newest versions of setup.cfg (an hour on 2 cores; MATRIX=newest, MATRIX=--slim)
	@$(VENV_PYTHON) -m tests.matrix $(MATRIX)

.venv/docs-installed: .venv/installed .ci/constraints-docs.txt
	@if uv --version >/dev/null 2>&1; then uv pip install --quiet --python $(VENV_PYTHON) $(DOCS); \
	  else $(VENV_PYTHON) -m pip --disable-pip-version-check install --quiet $(DOCS); fi
	@touch $@

# Pages that git ignores: their tables are in tests/, the text around them in docs/templates.
pages: .venv/installed
	@DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu $(VENV_PYTHON) -m tests.docs.pages

# Warnings are errors, so each link between pages is checked, and the examples in the pages about the API are run.
docs: .venv/docs-installed pages ## docs/keys.md and other pages of tables, and the site, in build/site (2 minutes; installs Sphinx into .venv)
	@$(SPHINX) -b doctest . build/site-doctest
	@$(SPHINX) -b html . build/site
	@echo build/site/index.html

links: .venv/docs-installed pages ## links of the pages that lead elsewhere (needs network)
	@$(SPHINX) -b linkcheck . build/site-links

# Runs in a temporary environment. Asks PyPI about each package.
audit: ## known vulnerabilities of the packages in .ci/constraints-cpu.txt, by pip-audit (needs uv or pipx, and network)
	@if uv --version >/dev/null 2>&1; then uvx pip-audit $(AUDIT); else pipx run pip-audit $(AUDIT); fi

licences: .venv/installed ## the licences of these packages, as they state them
	@$(VENV_PYTHON) .ci/licences

lint: .venv/installed ## list what ruff and mypy object to
	@$(VENV_PYTHON) -m ruff check $(SOURCES)
	@$(VENV_PYTHON) -m mypy

format: .venv/installed ## rewrite the sources in MaxText's formatting
	@$(VENV_PYTHON) -m pyink --quiet $(SOURCES)

constraints: .venv/installed ## write the versions that fit setup.cfg into .ci/constraints-*.txt (needs uv)
	@{ sed -n 1p .ci/constraints-cpu.txt && \
	  uv pip compile --quiet --python $(VENV_PYTHON) --no-header --no-annotate \
	    --extra cpu --extra tools --extra test --extra lint setup.cfg; } >.ci/constraints.new
	@mv .ci/constraints.new .ci/constraints-cpu.txt
	@{ sed -n 1p .ci/constraints-docs.txt && \
	  uv pip compile --quiet --python $(VENV_PYTHON) --no-header --no-annotate --constraint .ci/constraints-cpu.txt \
	    --extra docs setup.cfg | grep -vxFf .ci/constraints-cpu.txt; } >.ci/constraints.new
	@mv .ci/constraints.new .ci/constraints-docs.txt
	@for each in oldest:lowest-direct newest:highest; do name=.ci/constraints-$${each%:*}.txt; \
	  { sed -n 1p $$name && uv pip compile --quiet --python $(VENV_PYTHON) --no-header --no-annotate \
	    --resolution $${each#*:} --extra cpu --extra tools --extra test setup.cfg; } >.ci/constraints.new && \
	  mv .ci/constraints.new $$name; done

wheel: .venv/installed ## the wheel, in dist/
	@rm -rf build
	@if uv --version >/dev/null 2>&1; then uv build --quiet --python $(VENV_PYTHON) --wheel; \
	  else $(VENV_PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .; fi
	@ls dist/*.whl

clean: ## remove what builds, tests and the demo leave
	@rm -rf build dist *.egg-info demo-output .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments as well
	@rm -rf .venv .venv-oldest .venv-newest
