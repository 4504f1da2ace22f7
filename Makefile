# A thin index over the `builder` command; `make help` lists it. Everything sets itself up: only Python 3.11, make, root
# (or a running Docker Engine) and package registries are needed.
PYTHON3 ?= python3
VENV := .venv
BUILDER := $(VENV)/bin/builder

# Which image: each a prefix, for example TRITON=3.7. An impossible or ambiguous request names the candidates.
TRITON ?=
TORCH ?=
CUDA ?=
FLA ?=
CONV1D ?=
PYTHON ?=
BASE ?=
CAPABILITIES ?=
ID ?=
SELECT = $(if $(TRITON),--triton "$(TRITON)") $(if $(TORCH),--torch "$(TORCH)") $(if $(CUDA),--cuda "$(CUDA)") $(if $(FLA),--fla "$(FLA)") \
    $(if $(CONV1D),--conv1d "$(CONV1D)") $(if $(PYTHON),--python "$(PYTHON)") $(if $(BASE),--base "$(BASE)") \
    $(if $(CAPABILITIES),--capability "$(CAPABILITIES)") $(if $(ID),--id "$(ID)")

.DEFAULT_GOAL := help
.PHONY: help image images plan list lock verify test lint unit golden rows publish clean

help: ## List what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables of an image: TRITON TORCH CUDA FLA CONV1D PYTHON BASE CAPABILITIES, or ID. Example: make image TRITON=3.7"

image: $(VENV)/.ready ## Build the image that the variables mean
	@$(BUILDER) build $(SELECT)

images: $(VENV)/.ready ## Build the default images of Triton 3.6 and 3.7
	@$(BUILDER) build --triton 3.6
	@$(BUILDER) build --triton 3.7

plan: $(VENV)/.ready ## Say which image the variables mean, and why
	@$(BUILDER) plan $(SELECT)

list: $(VENV)/.ready ## List all images of the matrix
	@$(BUILDER) list $(SELECT)

lock: $(VENV)/.ready ## Resolve the image's pins anew
	@$(BUILDER) lock $(SELECT)

verify: $(VENV)/.ready ## Run the image's tests
	@$(BUILDER) verify $(SELECT)

publish: $(VENV)/.ready ## Push a verified image: make publish ID=... TO=host/repo
	@$(BUILDER) publish $(SELECT) --to "$(TO)"

lint: $(VENV)/.ready ## ruff and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@cd builder/inside && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p blackwell

unit: $(VENV)/.ready ## Unit and golden tests: no processes, no network
	@$(VENV)/bin/pytest -q tests/unit tests/golden

golden: $(VENV)/.ready ## Write the golden Dockerfiles anew
	@rm -rf tests/golden/data && GOLDEN=refresh $(VENV)/bin/pytest -q tests/golden

rows: $(VENV)/.ready ## Write the README's table of images anew
	@$(VENV)/bin/python -m builder.readme

# CI builds for capability 12.0 alone; it leaves out 10.0, 10.3 and 12.1 (compile time on 2 cores).
TEST_CAPABILITIES ?= 12.0
IN_TEST = --capability "$(TEST_CAPABILITIES)"
test: lint unit ## Lint, unit and golden tests; the Triton 3.6 and 3.7 images built; faults on the real engine; tests in both; one published
	@$(BUILDER) build --triton 3.7 $(IN_TEST)
	@$(BUILDER) build --triton 3.6 $(IN_TEST)
	@$(VENV)/bin/pytest tests/engine --deselect tests/engine/test_publish_full.py
	@$(BUILDER) verify --triton 3.7 $(IN_TEST)
	@$(BUILDER) verify --triton 3.6 $(IN_TEST)
	@$(VENV)/bin/pytest tests/engine/test_publish_full.py

# Debian's python3 may lack ensurepip (package python3-venv); then it is installed, with root.
$(VENV)/.ready: pyproject.toml requirements.txt
	@$(PYTHON3) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); echo "installing python3-venv" >&2; apt-get update -q >/dev/null && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-venv >/dev/null && $(PYTHON3) -m venv $(VENV); }
	@$(VENV)/bin/python -m pip install -q --require-hashes --no-deps -r requirements.txt
	@$(VENV)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

clean: ## Remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
