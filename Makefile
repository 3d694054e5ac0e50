# Two commands matter on a fresh machine: `make demo` and `make test`. The rest is for contributors.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROWS ?= 4000
STAMP := $(VENV)/.installed

export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenmill needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test,check]'
	touch $(STAMP)

.PHONY: help setup demo test check services bench deploy clean

help: ## Show this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

setup: $(STAMP) ## Create .venv with every pinned version.

demo: setup ## Run the main job on the docstrings of installed packages. ROWS=4000, or ROWS=all.
	$(BIN)/tokenmill demo --rows $(ROWS)

test: setup ## Run the tests that need no server.
	$(BIN)/python -m pytest -m "not service" -q

services: setup ## Run the suite of real services: Prefect server and worker, S3, notebook.
	$(BIN)/python -m pytest -m service -q

check: setup ## Lint, types, layers: what CI checks.
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Measure against the peers; one table, one plot.
	$(BIN)/python -m benchmarks.run

deploy: setup ## Create the work pools and deployments on the server that PREFECT_API_URL names.
	$(BIN)/python -m deployments.deploy

clean: ## Remove what the commands above made.
	rm -rf $(VENV) demo-out bench-out build *.egg-info
