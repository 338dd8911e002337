# Everything here runs in .venv, which the first command that needs it sets up with
# `python -m distlab setup`. Written for GNU make 3.81 (macOS) too.

PYTHON ?= python3
PY := .venv/bin/python
PARALLEL := -p no:nbval --numprocesses auto --maxprocesses 4 --dist worksteal
PYTEST := $(PY) -m pytest $(PARALLEL)
REPORT = $(if $(DISTLAB_REPORT),--junitxml=$(DISTLAB_REPORT))
FIGURES := $(patsubst figures/%.py,figures.%,\
  $(filter-out figures/draw.py,$(wildcard figures/[a-z]*.py)))

# The stamp holds the folder it was made in. One from elsewhere (a copied or moved
# checkout), or an environment whose Python has gone, is as good as none.
ifneq ($(shell test -x $(PY) && cat .venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: .venv/.ready
endif

.PHONY: help demo test test-slow test-touched test-failed test-all test-tracking test-portable test-manifests test-slurm test-docker test-wheel wheel test-trainer test-dcp test-torch test-ray test-horovod test-deepspeed test-tensorflow test-torchft check check-types check-style docs test-docs templates figures mutants blind notebooks bench chaos nodes soak

help:  ## list all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/.ready  ## train with four processes and get the same weights as with one
	@$(PY) -m distlab demo

# UNIT is a path or a name: `make test UNIT=trainer` runs the tests that name it.
UNIT ?=
test: .venv/.ready  ## run the usual tests, or only those for one unit with UNIT=trainer
	@if [ -z "$(UNIT)" ]; then $(PYTEST) -m "not slow" --durations 5 $(REPORT); \
	elif [ -e "$(UNIT)" ]; then $(PY) -m pytest -p no:nbval "$(UNIT)"; \
	else $(PYTEST) -m "not slow" -k "$(UNIT)"; fi

test-slow: .venv/.ready  ## run the slow tests: whole runs, and a real torchrun
	@$(PYTEST) -m "slow and not own" --durations 20 $(REPORT)

MINUTES ?= 5
test-touched: .venv/.ready  ## grade wrong solutions for changed units, for MINUTES=5
	@$(PY) -m distlab mutants --touched --minutes $(MINUTES) --second-try

test-failed: .venv/.ready  ## run the tests that failed last time again, one by one
	@$(PY) -m pytest --last-failed --last-failed-no-failures none

test-all: test test-slow test-touched  ## run test, test-slow and test-touched

test-tracking: .venv/.ready-tracking  ## test with real MLflow, TensorBoard, Prometheus and OpenTelemetry
	@DISTLAB_TEST_TRACKING=1 $(PYTEST) tests/workbench/test_ddp_tracking.py \
	  tests/workbench/test_monitor.py tests/workbench/test_ddp_monitor.py

test-portable: .venv/.ready  ## test learners' commands on a Linux that pretends to be no Unix
	@$(PY) -m pytest -p no:nbval tests/portable

test-manifests: .venv/.ready-manifests  ## validate the Kubernetes and compose files
	@$(PY) -m pytest tests/deployment/test_manifests.py

test-slurm: .venv/.ready  ## test batch scripts on two nodes (needs root, slurm-wlm, munge)
	@$(PY) -m pytest tests/deployment/test_slurm.py

test-docker: .venv/.ready  ## test the compose file (needs root, docker.io, docker-compose)
	@$(PY) -m pytest -rs tests/deployment/test_docker.py

test-wheel: .venv/.ready-dev  ## build the wheel, install it elsewhere, and use it
	@$(PY) -m pytest -rs tests/deployment/test_wheel.py

wheel: .venv/.ready-dev  ## build a wheel in dist/, which pip can install without a clone
	@$(PY) -m build --outdir dist .

test-trainer: .venv/.ready  ## test the capstone's engines and options, and resuming it
	@$(PY) -m pytest tests/workbench/test_imagenet_trainer_runs.py

test-dcp: .venv/.ready  ## test checkpoints in torch's format with every engine
	@$(PY) -m pytest tests/workbench/test_dcp.py tests/workbench/test_dcp_ranks.py

# The range is in pyproject.toml; .venv has the release that install.py finds first.
TORCH ?= 2.14
test-torch: .venv-torch-$(TORCH)/.ready  ## test with another release of torch: TORCH=2.11
	@.venv-torch-$(TORCH)/bin/python -m pytest $(PARALLEL) -m "not own" $(REPORT) \
	  tests/workbench/test_sim_torch*.py tests/workbench/test_comm*.py \
	  tests/workbench/test_torch*.py tests/workbench/test_distributed*.py \
	  tests/workbench/test_dcp.py

test-ray: .venv-ray/.ready  ## test Ray Train and Ray Tune with two real workers
	@.venv-ray/bin/python -m pytest tests/engines/test_ray.py tests/engines/test_ray_tune.py

test-horovod: .venv-horovod/.ready  ## build Horovod and compare it with torch's DDP
	@.venv-horovod/bin/python -m pytest tests/engines/test_horovod.py

test-deepspeed: .venv-deepspeed/.ready  ## compare DeepSpeed's ZeRO with torch's DDP
	@.venv-deepspeed/bin/python -m pytest tests/engines/test_deepspeed.py

test-tensorflow: .venv-tensorflow/.ready  ## compare TensorFlow with torch's DDP
	@.venv-tensorflow/bin/python -m pytest tests/engines/test_tensorflow.py

test-torchft: .venv-torchft/.ready  ## kill replicas of torchft while the others train
	@.venv-torchft/bin/python -m pytest -rs tests/engines/test_torchft.py

# Types take about as long as all the rest, so `make -j2 check` is done in half the time.
check: check-types check-style  ## check style, types, and that generated files are up to date

check-types: .venv/.ready-dev
	$(PY) -m mypy

check-style: .venv/.ready-dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m distlab templates --check
	@$(PY) -c "$$FIGURES_CHECK" $(FIGURES)

# The site has an environment to itself too, without torch: it is built in a minute.
docs: .venv-docs/.ready  ## build the documentation site in site/ and check its links
	@.venv-docs/bin/python docs/site/build.py

test-docs: .venv-docs/.ready  ## test the documentation site in phone and desktop browsers
	@[ -e site/index.html ] || .venv-docs/bin/python docs/site/build.py
	@.venv-docs/bin/python -m pytest -rs tests/site

templates: .venv/.ready  ## generate the templates from the solutions
	@$(PY) -m distlab templates

figures: .venv/.ready  ## draw the figures for the guidelines
	@for module in $(FIGURES); do $(PY) -m $$module || exit 1; done

mutants: .venv/.ready  ## check that wrong solutions are rejected and right ones accepted
	@$(PY) -m distlab mutants --generated --stamp

blind: .venv/.ready  ## judge solutions by strangers to the checks: make blind SET=folder
	@$(PY) -m distlab blind $(SET)

ablation: .venv/.ready  ## remove each assertion in turn and require a verdict to change
	@$(PY) -m tests.ablation

notebooks: .venv/.ready  ## run the walkthroughs and compare their output with before
	@DISTLAB_IMPL=reference $(PY) -m pytest --nbval --nbval-cell-timeout 300 \
	  phase*/walkthrough.ipynb

bench: .venv/.ready  ## run all benchmarks, ideally on a quiet machine
	@$(PY) -m distlab bench verdict
	@$(PY) -m distlab bench hang
	@$(PY) -m distlab bench autopsy
	@$(PY) -m distlab bench sim
	@$(PY) -m distlab bench simscript
	@$(PY) -m distlab bench audit
	@$(PY) -m distlab bench pipeline
	@$(PY) -m distlab bench allreduce
	@$(PY) -m distlab bench ddp
	@$(PY) -m distlab bench zero
	@$(PY) -m distlab bench ps
	@$(PY) -m distlab bench monitor
	@$(PY) -m distlab bench compression
	@$(PY) -m distlab bench checkpoint
	@$(PY) -m distlab bench recovery
	@$(PY) -m distlab bench loader
	@$(PY) -m distlab bench engines
	@$(PY) -m distlab bench scaling

chaos: .venv/.ready  ## inject every fault at every moment of a real run (takes long)
	@$(PY) -m distlab chaos --html chaos.html

nodes: .venv/.ready  ## time a step between two nodes at 100 Mbit, in six ways
	@$(PY) -m distlab bench nodes

soak: .venv/.ready  ## check that the reference passes 20 times under CPU load
	@$(PY) -m tests.soak --times 20

# After anything that may leave an environment half done, Ctrl-C above all, this starts
# from an empty one (pip's cache spares the downloads).
.venv/.ready: pyproject.toml distlab/install.py distlab/set_up.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); distlab needs Python 3.11 or newer."; \
	  echo "Name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m distlab setup

.venv/.ready-dev: .venv/.ready
	@$(PY) distlab/install.py --extras dev
	@touch $@

.venv/.ready-tracking: .venv/.ready
	@$(PY) distlab/install.py --extras tracking
	@touch $@

.venv/.ready-manifests: .venv/.ready
	@$(PY) distlab/install.py --extras manifests
	@touch $@

# An engine has an environment to itself: what it needs would change the course's.
.venv-ray/.ready: pyproject.toml distlab/install.py
	@$(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/python distlab/install.py --extras ray
	@touch $@

.venv-docs/.ready: pyproject.toml
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -c "$$DOCS_NEED" | xargs .venv-docs/bin/python -m pip install --quiet
	@touch $@

.venv-torch-%/.ready: pyproject.toml distlab/install.py
	@$(PYTHON) -m venv .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip install --quiet "torch==$*.*"
	@.venv-torch-$*/bin/python distlab/install.py
	@touch $@

.venv-deepspeed/.ready: pyproject.toml distlab/install.py
	@$(PYTHON) -m venv .venv-deepspeed
	@.venv-deepspeed/bin/python distlab/install.py --extras deepspeed
	@touch $@

.venv-tensorflow/.ready: pyproject.toml distlab/install.py
	@$(PYTHON) -m venv .venv-tensorflow
	@.venv-tensorflow/bin/python distlab/install.py --extras tensorflow
	@touch $@

.venv-torchft/.ready: pyproject.toml distlab/install.py
	@$(PYTHON) -m venv .venv-torchft
	@.venv-torchft/bin/python distlab/install.py --extras torchft
	@touch $@

.venv-horovod/.ready: pyproject.toml tests/engines/build_horovod.sh
	@PYTHON=$(PYTHON) bash tests/engines/build_horovod.sh .venv-horovod
	@touch $@

define DOCS_NEED
import tomllib
with open('pyproject.toml', 'rb') as file:
    extras = tomllib.load(file)['project']['optional-dependencies']
print(*extras['docs'], sep='\n')
endef
export DOCS_NEED

define FIGURES_CHECK
import importlib, sys
def is_old(path, picture):
    return not path.is_file() or path.read_text(encoding="utf-8") != picture
modules = map(importlib.import_module, sys.argv[1:])
pictures = [(m.FOLDER / name, text) for m in modules for name, text in m.figures().items()]
old = [path.name for path, text in pictures if is_old(path, text)]
sys.exit(f"out of date, run make figures: {', '.join(old)}" if old else 0)
endef
export FIGURES_CHECK
