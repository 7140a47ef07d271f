# make demo: set up and see it work.  make test: set up and run everything that CI runs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: setup check test demo bench-proxy bench-derive clean

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[policy,harness,sandbox]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	touch $@

setup: $(VENV)/.dev

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

bench-proxy: setup
	$(BIN)/python tests/bench/proxy_cost.py

bench-derive: setup
	$(BIN)/python tests/bench/derive_speed.py

clean:
	rm -rf build $(VENV)
