# Every target works as the single command on a fresh clone: it makes .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    ?=
INPUT  ?=
DEMO_ARGS ?=

# Numerical libraries must not each take every core: our workers are processes.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast lint types layers bench docs clean venv

venv: $(STAMP)

# torch first and pinned: a looser request may pull a CUDA build of several GB.
$(STAMP): pyproject.toml constraints.txt $(wildcard alchemi_xr/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "alchemi_xr needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,codecs,etl,hdf5,table,mdanalysis,atompack,cloud,icechunk,test,lint,docs]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python pipelines/relax_and_analyse.py $(if $(INPUT),"$(INPUT)") $(if $(OUT),--out "$(OUT)") $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto --dist loadscope --durations 15 tests

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n auto tests -m "not slow and not kill"

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: $(STAMP)
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) .venv312 docs/_build demo_out
