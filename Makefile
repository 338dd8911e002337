# Everything here runs in .venv, which the first command that needs it sets up with
# `python -m venv`, pip and distlab/install.py. Written for GNU make 3.81 (macOS) too.

PYTHON ?= python3
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -p no:nbval --numprocesses auto --maxprocesses 4 --dist worksteal
REPORT = $(if $(DISTLAB_REPORT),--junitxml=$(DISTLAB_REPORT))
FIGURES := $(patsubst figures/%.py,figures.%,\
  $(filter-out figures/draw.py,$(wildcard figures/[a-z]*.py)))

# The stamp holds the folder it was made in. One from elsewhere (a copied or moved
# checkout), or an environment whose Python has gone, is as good as none.
ifneq ($(shell test -x $(PY) && cat .venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: .venv/.ready
endif

.PHONY: help demo test test-slow test-touched test-failed test-all test-tracking test-manifests test-slurm test-docker test-trainer test-torch test-ray test-horovod test-deepspeed test-tensorflow check docs test-docs templates figures mutants notebooks bench chaos nodes soak

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/.ready  ## four processes train together and arrive at the same weights
	@$(PY) -m distlab demo

# UNIT is a path or a name: `make test UNIT=trainer` runs the tests that name it.
UNIT ?=
test: .venv/.ready  ## the tests of the workbench and the solutions; UNIT=trainer for a part
	@if [ -z "$(UNIT)" ]; then $(PYTEST) -m "not slow" --durations 5 $(REPORT); \
	elif [ -e "$(UNIT)" ]; then $(PY) -m pytest -p no:nbval "$(UNIT)"; \
	else $(PYTEST) -m "not slow" -k "$(UNIT)"; fi

test-slow: .venv/.ready  ## what `make test` leaves out: end to end, real torchrun
	@$(PYTEST) -m "slow and not own" --durations 20 $(REPORT)

test-touched: .venv/.ready  ## the catalogue of what changed, five minutes of it
	@$(PY) -m distlab mutants --touched --minutes 5

test-failed: .venv/.ready  ## those that failed the last time once more, one by one
	@$(PY) -m pytest --last-failed --last-failed-no-failures none

test-all: test test-slow test-touched  ## all three

test-tracking: .venv/.ready-tracking  ## real MLflow, TensorBoard and Prometheus client
	@DISTLAB_TEST_TRACKING=1 $(PY) -m pytest tests/workbench/test_ddp_tracking.py \
	  tests/workbench/test_monitor.py tests/workbench/test_ddp_monitor.py

test-manifests: .venv/.ready-manifests  ## Kubernetes and compose files, against their schemas
	@$(PY) -m pytest tests/deployment/test_manifests.py

test-slurm: .venv/.ready  ## the batch scripts on two virtual nodes (root; slurm-wlm, munge)
	@$(PY) -m pytest tests/deployment/test_slurm.py

test-docker: .venv/.ready  ## the compose file's two containers (root; docker.io, docker-compose)
	@$(PY) -m pytest -rs tests/deployment/test_docker.py

test-trainer: .venv/.ready  ## the capstone: engines, each switch alone, kill and resume
	@$(PY) -m pytest tests/workbench/test_imagenet_trainer_runs.py

# The range is in pyproject.toml; .venv has the release that install.py finds first.
TORCH ?= 2.14
test-torch: .venv-torch-$(TORCH)/.ready  ## what rests on torch, on another release: TORCH=2.11
	@.venv-torch-$(TORCH)/bin/python -m pytest -p no:nbval tests/workbench/test_sim_torch*.py \
	  tests/workbench/test_comm*.py tests/workbench/test_torch*.py \
	  tests/workbench/test_distributed*.py

test-ray: .venv-ray/.ready  ## Ray Train and Ray Tune with two real workers
	@.venv-ray/bin/python -m pytest tests/engines/test_ray.py tests/engines/test_ray_tune.py

test-horovod: .venv-horovod/.ready  ## Horovod, which is built first, beside torch's DDP
	@.venv-horovod/bin/python -m pytest tests/engines/test_horovod.py

test-deepspeed: .venv-deepspeed/.ready  ## DeepSpeed's ZeRO stages 0 to 3, beside torch's DDP
	@.venv-deepspeed/bin/python -m pytest tests/engines/test_deepspeed.py

test-tensorflow: .venv-tensorflow/.ready  ## TensorFlow with two ranks, beside torch's DDP
	@.venv-tensorflow/bin/python -m pytest tests/engines/test_tensorflow.py

check: .venv/.ready-dev  ## style, types, and whether generated files are up to date
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m distlab templates --check
	@for module in $(FIGURES); do \
	  $(PY) -c "$$FIGURES_CHECK" $$module || exit 1; \
	done

# The site has an environment to itself too, without torch: it is built in a minute.
docs: .venv-docs/.ready  ## the documentation as a site in site/, every link checked
	@.venv-docs/bin/python docs/site/build.py

test-docs: .venv-docs/.ready  ## that site in a browser, on a phone and on a desktop
	@[ -e site/index.html ] || .venv-docs/bin/python docs/site/build.py
	@.venv-docs/bin/python -m pytest -rs tests/site

templates: .venv/.ready  ## write the templates anew from the solutions
	@$(PY) -m distlab templates

figures: .venv/.ready  ## draw the pictures of the guidelines
	@for module in $(FIGURES); do $(PY) -m $$module || exit 1; done

mutants: .venv/.ready  ## every wrong solution must be rejected, every right one accepted
	@$(PY) -m distlab mutants --generated --stamp

ablation: .venv/.ready  ## take out each assertion of the checks; a verdict must change
	@$(PY) benchmarks/ablation.py

notebooks: .venv/.ready  ## run the walkthroughs; what they print must be as it was
	@DISTLAB_IMPL=reference $(PY) -m pytest --nbval --nbval-cell-timeout 300 \
	  phase*/walkthrough.ipynb

bench: .venv/.ready  ## every figure with a bar, measured; best on a quiet machine
	@$(PY) -m distlab bench verdict
	@$(PY) -m distlab bench hang
	@$(PY) -m distlab bench sim
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

chaos: .venv/.ready  ## every fault at every moment of a real training; many minutes
	@$(PY) -m distlab chaos --html chaos.html

nodes: .venv/.ready  ## two nodes in network namespaces: a step at 100 Mbit, six ways
	@$(PY) benchmarks/nodes.py

soak: .venv/.ready  ## the reference passes 20 times in a row under CPU load
	@$(PY) benchmarks/soak.py --times 20

# install.py exits with 1 when pip gave up before it wrote anything: the environment is
# as good as before. Anything else, Ctrl-C above all, leaves .unfinished behind, and the
# next make starts from an empty environment (pip's cache spares the downloads).
.venv/.ready: pyproject.toml distlab/install.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); distlab needs Python 3.11 or newer."; \
	  echo "Name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments."; \
	  echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@if [ ! -x $(PY) ] || [ -e .venv/.unfinished ] || \
	    [ "$$(cat .venv/.ready 2>/dev/null)" != "$(CURDIR)" ]; then \
	  echo "environment: an empty one in .venv (a few seconds)"; \
	  said=$$($(PYTHON) -m venv --clear .venv 2>&1) || { echo "$$said"; exit 1; }; \
	fi
	@touch .venv/.unfinished; \
	$(PY) distlab/install.py; code=$$?; \
	if [ $$code -le 1 ]; then rm .venv/.unfinished; fi; \
	if [ $$code -eq 0 ]; then echo "$(CURDIR)" > .venv/.ready; fi; \
	exit $$code

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
module = importlib.import_module(sys.argv[1])
def same(name, picture):
    path = module.FOLDER / name
    return path.is_file() and path.read_text(encoding="utf-8") == picture
old = [name for name, picture in module.figures().items() if not same(name, picture)]
sys.exit(f"out of date, run make figures: {', '.join(old)}" if old else 0)
endef
export FIGURES_CHECK
