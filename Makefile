# make quickstart   train the embedded tiny model (minutes on a CPU)
# make test         every check and test
# make gpu-test     the tests that need an NVIDIA GPU
# make format       rewrite the sources in the house style
# make clean        remove .venv and the caches
#
# .venv belongs to this file: the first call installs into it, later calls only after a change of
# the requirements. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

# Stamps. RUNTIME is away while anything installs: pip takes a package that was cut off in the
# middle for an installed one, so without that stamp .venv is made anew.
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
CUDA := $(VENV)/.installed-cuda

# reasoning-gym needs pycosat, which PyPI has as C source only.
CAN_BUILD_C = command -v cc >/dev/null && $(BIN)/python -c \
	'import pathlib, sysconfig as s; (pathlib.Path(s.get_path("include")) / "Python.h").stat()' \
	2>/dev/null

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart test gpu-test format clean

help:
	@sed -n 's/^# make /make /p' Makefile

quickstart: $(RUNTIME)
	$(BIN)/qerl train configs/quickstart.yaml --run_dir runs/quickstart --overwrite

test: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --nbmake tests $(wildcard notebooks)

gpu-test: $(DEV) $(CUDA)
	$(BIN)/python -m pytest -m gpu tests

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(RUNTIME): requirements.txt pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "$(PYTHON): not found; name a Python 3.11 or newer: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON): $$("$(PYTHON)" --version 2>&1) is older than 3.11; name another:" \
			"make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@test -e $@ || rm -rf $(VENV)
	@rm -f $@
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --editable .
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.txt
	@mv $(RUNTIME) $(RUNTIME)-held
	$(PIP) install --requirement requirements-dev.txt
	@if $(CAN_BUILD_C); then \
		$(PIP) install --editable '.[gym]'; \
	else \
		echo "No C compiler or no Python.h: reasoning-gym is left out and its tests will skip."; \
	fi
	@mv $(RUNTIME)-held $(RUNTIME) && touch $@

$(CUDA): $(RUNTIME)
	@mv $(RUNTIME) $(RUNTIME)-held
	$(PIP) install --editable '.[cuda]'
	@mv $(RUNTIME)-held $(RUNTIME) && touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis
