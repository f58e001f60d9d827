# Two commands do all the set-up on a fresh machine with Python 3.11 or newer:
#
#   make demo    an order survives: its worker is killed, another worker finishes it
#   make test    formatter, linter, type checker and all tests
#
# Both create a virtual environment in .venv and install what they need. `make test PYTHON=python3.12` chooses another
# Python (after `make clean`).

.DEFAULT_GOAL := help
.PHONY: help demo test check chaos format coverage test-long test-pythons bench bench-compare simulate clean
.NOTPARALLEL:

PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
WORKERS := auto
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/core
	@$(BIN)/python examples/crash_demo.py

test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src tests $(wildcard examples benchmarks)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

#   make check   the same as `make test`; CI runs it (.ci/run)
check: test

#   make format  apply the formatter and the linter's fixes
format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

#   make coverage  run the tests in one process and list the lines that they miss
coverage: $(VENV)/dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

#   make test-long  what takes too long for `make test`: all repetitions of tests marked `long`, tests/chaos, 2,200 seeds
test-long: chaos
	PERDURE_TEST_LONG=1 $(BIN)/python -m pytest -m long -n $(WORKERS) --dist worksteal
	$(BIN)/python -m tests.simulation --seeds 1000 --store memory
	$(BIN)/python -m tests.simulation --seeds 1000 --store sqlite
	$(BIN)/python -m tests.simulation --seeds 200 --store postgres

#   make test-pythons  the tests of runner and engine on Python 3.12 and 3.13; other versions: VERSIONS="3.12"
VERSIONS := 3.12 3.13
test-pythons:
	@for version in $(VERSIONS); do \
	  python=$$(command -v python$$version || ls -d $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
	  if [ -z "$$python" ] || ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "make test-pythons needs Python $$version with its venv module; install it (looked for: python$$version, pyenv)" >&2; \
	    exit 1; \
	  fi; \
	done
	@for version in $(VERSIONS); do \
	  python=$$(command -v python$$version || ls -d $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
	  folder=$(VENV)-$$version; \
	  { test -x $$folder/bin/pytest || { "$$python" -m venv $$folder && \
	    $$folder/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev]'; }; } && \
	  $$folder/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/runner tests/engine || exit 1; \
	done

#   make chaos   real workers killed, paused and disconnected, real servers restarted (minutes)
chaos: $(VENV)/dev
	$(call debian_package,pgbouncer,/usr/sbin/pgbouncer)
	$(BIN)/python -m pytest tests/chaos

#   make bench   measure perdure and its peers for docs/performance.md; a part: ONLY=noop10 ENGINES=perdure,dbos ROUNDS=5
ONLY :=
ENGINES :=
ROUNDS :=
SCALE :=
comma := ,
bench: $(VENV)/dev
	$(BIN)/python -m benchmarks $(subst $(comma), ,$(ONLY)) --page $(if $(ENGINES),--engines $(ENGINES)) \
	  $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SCALE),--scale $(SCALE))

#   make bench-compare BASE=main  compare the speed of this tree with that of a commit; ONLY=noop10 STORES=sqlite ROUNDS=15 LIMIT=2%
BASE :=
STORES :=
LIMIT :=
bench-compare: $(VENV)/dev
	@$(if $(BASE),,$(error BASE is missing; name a commit: make bench-compare BASE=main))
	$(BIN)/python -m benchmarks.compare_commits $(BASE) $(if $(ONLY),--only $(ONLY)) $(if $(STORES),--stores $(STORES)) \
	  $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SCALE),--scale $(SCALE)) $(if $(LIMIT),--limit $(LIMIT))

#   make simulate  simulate workers, clients and faults: SEEDS=10000 STORE=sqlite|postgres START=500 (first seed)
SEEDS := 1000
START := 0
STORE := memory
simulate: $(VENV)/$(if $(filter postgres,$(STORE)),dev,core)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --start $(START) --store $(STORE)

#   make clean   remove .venv, caches and build products
clean:
	rm -rf $(VENV) $(VENV)-3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Install a Debian package if its program is missing and the user is root. Otherwise the tests fail and name the package.
debian_package = @test -x $(2) || command -v $(1) > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
  && echo "installing $(1)" \
  && { apt-get install -y -qq $(1) || { apt-get update -qq && apt-get install -y -qq $(1); }; } > /dev/null 2>&1; } || true

# The environment. `made` holds the folder in which it was created: scripts and the editable install contain that path.
# A copied or moved checkout, or one whose Python was removed, creates it again.

ifneq ($(shell $(BIN)/python -c "" 2>/dev/null && cat $(VENV)/made 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)/made
endif

$(VENV)/made:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$($$python --version)"; \
	    rm -rf $(VENV) && $$python -m venv $(VENV) && echo '$(CURDIR)' > $@; \
	    exit; \
	  fi; \
	done; \
	echo "perdure needs Python 3.11 or newer with its venv module (looked for: $(PYTHONS));" >&2; \
	echo "install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

$(VENV)/core: pyproject.toml $(VENV)/made
	@echo "installing perdure"
	@$(PIP) -e .
	@touch $@

$(VENV)/dev: pyproject.toml $(VENV)/made
	@echo "installing perdure and its development tools"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/core $@
