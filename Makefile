# Every target sets up what it needs first, in .venv/; when nothing changed that takes a fraction of a second.
#
#   PYTHON=python3.12       the interpreter that .venv/ is made with (python3, or the one that .venv/ has)
#   TORCH_INDEX_ARGS=...    passed to pip when it installs torch and torchvision: for PyTorch's public CPU wheels,
#                           `--index-url` and the index URL that pytorch.org shows for CPU wheels
#   ONLY=name               the one benchmark that `make bench` runs
#   ARGS=...                more arguments for `make demo`, for pytest in `make test`, or for the rounds of `make torture`
#   JOBS=n                  processes that run tests side by side (the cores but one, 3 at least); one starts ranks

PYTHON ?=
TORCH_INDEX_ARGS ?=
ONLY ?=
ARGS ?=
JOBS ?= $(shell cores=$$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2); echo $$((cores > 3 ? cores - 1 : 3)))

RUN := .venv/bin/python -m

.PHONY: help setup demo test test-all check bench figures docs torture
.NOTPARALLEL:

help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^#   /  /p' Makefile

setup: ## prepare .venv/, Horovod with MPI and missing system packages
	@PYTHON='$(PYTHON)' TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' launch/bootstrap

demo: setup ## fine-tune with 2 ranks: in full, frozen by vote, cached too, and hvfreeze auto; compare
	$(RUN) analysis.demo $(ARGS)

# Tests with ranks come first, so that no process is left alone with them; see tests/conftest.py. Where Python may not
# keep what it compiles, each process that tests start would compile the library again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(RUN) pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

test: check ## the checks, every test of one process, one test with ranks for each guarantee: 9 minutes on two cores
	$(PYTEST) tests/parallel tests/single $(ARGS)

test-all: check ## the same, and all other tests: 20 minutes on two cores
	$(PYTEST) -m "not torture" tests/parallel tests/single $(ARGS)

check: setup ## formatting, lint and types
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy hvfreeze analysis

bench: setup ## our time against reference loops, into build/bench.json
	$(RUN) analysis.bench $(if $(ONLY),--only $(ONLY))

figures: setup ## draw every figure from the recorded results
	$(RUN) analysis.figures

docs: setup .venv/docs.stamp ## the guides and the reference as a site with search, into build/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet --strict
	@echo "build/docs/index.html; to search, serve it: .venv/bin/python -m http.server -d build/docs"

.venv/docs.stamp: launch/requirements-docs.txt | setup
	$(RUN) pip install --quiet --disable-pip-version-check --no-input -r $<
	@touch $@

torture: setup ## random kills, flips and full disks, hours on a slow machine; what is found goes to build/torture/
	OMP_NUM_THREADS=1 $(RUN) pytest -q -n $(JOBS) -m torture tests/parallel tests/single
	OMP_NUM_THREADS=1 $(RUN) tests.torture --out build/torture $(ARGS)
