# Each target makes its own .venv from a bare Python 3.11 or newer, with the tested versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint clean

demo: $(VENV)/.demo  ## train a language model with PPO on this machine; writes outputs/demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev lint  ## the fast tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.dev lint  ## the slow ones too
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not multi_gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.demo: $(VENV)/.made
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.made
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "lit-ppo needs Python 3.11 or newer, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	touch $@

clean:
	rm -rf $(VENV) outputs .cache build dist *.egg-info
