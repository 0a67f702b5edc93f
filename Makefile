# Every target makes its own virtual environment, so that a fresh machine needs Python 3.11+, make and a C++ compiler only.
PYTHON ?= python3
VENV := .venv
VENV_TF := .venv-tf
IMAGE_MODELS := .image-models
BIN := $(VENV)/bin

# tests/support/distribution.py says which tests one worker runs, and in which order they start.
DISTRIBUTED := -n auto --maxprocesses=4 --dist loadscope --no-loadscope-reorder
# A number of devices is one of logical CPUs in tests; those that want a GPU are in `make test-gpu`.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(DISTRIBUTED)

# Python keeps what it has compiled: every worker and every process that tests start would compile all files anew, for 10 to 15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test house test-slow test-all test-torch test-gpu lint docs bench bench-tf clean

# constraints.txt holds torch at the version that the golden programs and the tests of its private APIs were made with.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "setuptools>=77"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[examples,test,lint]"
	touch $@

train: $(VENV)/.installed
	$(BIN)/python examples/train_text.py

# Every property, on a selection of models, devices and optimizers: at most five minutes on two cores.
test: $(VENV)/.installed
	$(PYTEST) -m "not slow and not exhaustive"

# The same properties on wider selections, what needs real processes, and trainers of others: at most forty minutes.
test-slow: $(VENV)/.trainers
	$(PYTEST) -m "slow and not exhaustive"

# Everything there is: both of the above, whole tables, long fuzzing, and the table of what the verifier makes of mutants.
test-all: $(VENV)/.trainers $(IMAGE_MODELS)/.installed
	MIRRORC_FUZZING=10 $(PYTEST)
	PYTHONPATH=$(CURDIR)/$(IMAGE_MODELS) $(PYTEST) tests/zoo -k "timm or torchvision"
	$(BIN)/python tests/support/mutants.py

# Trainers of others: 50 MB. Their tests start processes, or import for seconds, and all are slow.
$(VENV)/.trainers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[trainers]"
	touch $@

# Libraries of models, in a folder of their own. Hugging Face imports torchvision wherever it is installed, and PyPI's torchvision fails
# beside a torch for CPUs alone. The zoo declares the operators that it lacks, then imports it.
$(IMAGE_MODELS)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps -c constraints.txt --target $(IMAGE_MODELS) timm torchvision
	touch $@

# Tests that want a GPU, those of torch's private APIs, and probes: less than ten minutes. Says so at once if torch sees no GPU.
test-gpu: $(VENV)/.installed
	$(BIN)/python -P benchmarks/gpu_acceptance.py --only correctness --out out/gpu

# The tests of `make test` with another version of torch, in an environment of its own (some 6 GB): make test-torch TORCH=2.15.0
test-torch: $(if $(TORCH),.venv-torch-$(TORCH)/.installed,name-a-version)
	CUDA_VISIBLE_DEVICES= .venv-torch-$(TORCH)/bin/python -m pytest $(DISTRIBUTED) -m "not slow and not exhaustive"

.venv-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install --quiet --upgrade "setuptools>=77"
	.venv-torch-$*/bin/python -m pip install --quiet "torch==$*" -e ".[examples,test]"
	touch $@

.PHONY: name-a-version
name-a-version:
	@echo "Name a version of torch: make test-torch TORCH=2.15.0" >&2; exit 2

# Counts lines, words and names, by which one can see that the tree stays light.
house: $(VENV)/.installed
	$(BIN)/python tests/support/house.py

# The package directories are mapped, which type checkers do not follow in an editable install: check the built wheel.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m zipfile -e build/wheel/mirrorc-*.whl build/wheel
	cd build/wheel && ../../$(BIN)/mypy --config-file ../../pyproject.toml mirrorc mirrorc_pytest

# The site in build/docs: warnings, such as a link to a page or heading that is not there, are errors. It asks no other site.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs

bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/local.py

# TensorFlow in an environment of its own: it and torch need not agree on what they depend on.
$(VENV_TF)/.installed:
	$(PYTHON) -m venv $(VENV_TF)
	$(VENV_TF)/bin/python -m pip install --quiet "tensorflow-cpu>=2.16" || $(VENV_TF)/bin/python -m pip install --quiet "tensorflow>=2.16"
	touch $@

bench-tf: $(VENV)/.installed $(VENV_TF)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/local.py --contenders mirrorc TensorFlow --tensorflow-python $(VENV_TF)/bin/python

clean:
	rm -rf $(VENV) $(VENV_TF) $(IMAGE_MODELS) .venv-torch-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache
