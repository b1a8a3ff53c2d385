# `make quickstart` trains a small model and shows what it learned; `make test` runs all tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test lint lock clean

help:
	@echo "make quickstart [FAMILY=gpt|t5|bert] [DATA=my.txt|my.jsonl]"
	@echo "                train a small model in minutes and show what it learned"
	@echo "make test       run all tests"
	@echo "make lint       ruff and mypy"
	@echo "make install    create $(VENV) only"
	@echo "make lock       write constraints.txt from $(VENV)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("ds-engine needs Python 3.11 or newer, and $(PYTHON) is %d.%d; use make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

quickstart: install
	$(BIN)/ds-engine quickstart $(if $(FAMILY),--family "$(FAMILY)") $(if $(DATA),--data "$(DATA)") $(ARGS)

test: install
	$(BIN)/python -m pytest tests $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ds_engine/config ds_engine/parallel ds_engine/data preprocessing launch

lock:
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
