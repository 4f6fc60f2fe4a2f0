# Every target makes its own .venv from the pinned requirements; a fresh machine needs Python 3.11 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-all check docs bench bench-check bench-smoke gpu-check clean

$(READY): requirements/dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

demo: $(READY)         ## train a classic model on real data, on two processes
	$(BIN)/evener run --nproc 2 --cpu examples/digits.py

test: $(READY)         ## the sampled tests; their seed is printed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=40 -m "not gpu and not full" tests

test-all: $(READY)     ## everything
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=40 -m "not gpu" tests

check: $(READY)        ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)         ## the documentation site, in build/site; a broken link is an error
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	$(BIN)/mkdocs build --quiet --strict

bench: $(READY)        ## paired comparisons with the raw loop, accelerate and lightning.fabric
	$(BIN)/python -m bench

bench-check: $(READY)  ## a few paired ratios against bench/baseline.json; slower than the noise allows is an error
	$(BIN)/python -m bench.check

bench-smoke: $(READY)  ## every benchmark that one process makes, a few rounds each: what CI runs
	$(BIN)/python -m bench.check --quick
	$(BIN)/python -m bench --quick phases launch

gpu-check: $(READY)    ## what needs a GPU; without one every test is skipped, with its reason, and counted
	$(BIN)/python -m pytest -q -rs -m gpu tests

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
