PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: setup test test-slow quality format data benchmark-cpu benchmark-data kernels clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml tests/fetch_transformers_tests.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	$(RUN) tests/fetch_transformers_tests.py
	touch $@

test: setup quality
	$(RUN) -m pytest -n 2

test-slow: setup
	$(RUN) -m pytest -n 2 -m slow

quality: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

data: setup
	$(RUN) -m mamba3_nplr.datasets_scripts.build data

benchmark-cpu: setup
	$(RUN) benchmarks/cpu.py --out results/cpu.json

benchmark-data: setup
	$(RUN) benchmarks/data.py

kernels: setup
	$(RUN) benchmarks/kernels.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
