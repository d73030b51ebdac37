# Everything runs in .venv, which is made when first needed and again when pyproject.toml or constraints.txt change.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests.
JOBS ?= 2

.PHONY: help demo test test-long test-all simulated gpu lint format package bench overhead lengths balance planning inspecting coverage stress mutants docs notebook clean

help:
	@echo 'make demo        train two small models as pipelines and print the plan of one'
	@echo 'make test        run the tests; make test ARGS="-k partition" runs some of them'
	@echo 'make test-long   run the tests that make test leaves out because they take long'
	@echo 'make test-all    the same, those that need further packages, and those on simulated accelerators'
	@echo 'make simulated   run the tests that run on simulated accelerators'
	@echo 'make gpu         all that needs a GPU: its tests, then time and memory of steps on one'
	@echo 'make lint        check style and types'
	@echo 'make format      rewrite the sources in the one style'
	@echo 'make package     build wheel and sdist in dist/, install the wheel into an empty environment with all it needs, and try it'
	@echo 'make bench       throughput and the published experiments into tools/bench/RESULTS.md; make bench ARGS="--only unet_ablation" shows some'
	@echo 'make overhead    measure what an action costs beside the operations of the model'
	@echo 'make lengths     measure what batches of changing lengths cost'
	@echo 'make balance     compare cuts with those of others, and predicted with measured steps'
	@echo 'make planning    measure how long planning takes'
	@echo 'make inspecting  measure how long fxpipe.inspect takes'
	@echo 'make coverage    run a zoo of public models and compare; make coverage ARGS="--models bert gpt2 --no-others"; ARGS=--kinds: models that are hard to cut; ARGS="--drawn 7": models of transformers drawn by a seed'
	@echo 'make stress      run random models and compare, as long as one likes; make stress ARGS="--minutes 60 --jobs 2"'
	@echo 'make mutants     put faults into a copy, one at a time, and see which the tests catch; make mutants ARGS="--only runtime"'
	@echo 'make docs        build the documentation in build/site; links are checked, warnings are errors'
	@echo 'make notebook    run examples/tour.ipynb, and store what it shows in it'
	@echo 'make clean       remove caches and build outputs; the environment in .venv stays'

demo: .venv/.installed
	$(BIN)/python examples/unet.py
	$(BIN)/python examples/gpt.py
	$(BIN)/python -m fxpipe.inspect examples/unet.py:make_model --input 8x3x64x64 --devices 2 --chunks 4

test: .venv/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not long' $(ARGS)

test-long: .venv/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long $(ARGS)

test-all: .venv/.zoo .venv/.docs .venv/.trainers
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'slow or long' $(ARGS)
	$(MAKE) simulated

# Simulated accelerators stay in a process that has them: a session of its own, where ARGS may leave no test.
simulated: .venv/.installed
	$(BIN)/python -m pytest --simulated -n $(JOBS) --dist worksteal $(ARGS) || test $$? = 5

# The benchmark runs also where a test has failed; the status is that of both.
gpu: .venv/.installed
	PYTHON=$(BIN)/python tools/gpu_day.sh $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# As whoever installs it has it: from the wheel, and with what the index has for it. Needs the network.
package: .venv/.installed
	rm -rf build/lib build/empty dist
	$(BIN)/python -c 'import setuptools.build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip install dist/*.whl
	cd build && empty/bin/python -m fxpipe && empty/bin/python ../examples/unet.py

bench: .venv/.installed
	$(BIN)/python tools/bench/results.py $(ARGS)

overhead: .venv/.installed
	$(BIN)/python tools/bench/overhead.py $(ARGS)

balance: .venv/.zoo
	$(BIN)/python tools/bench/balance.py $(ARGS)

lengths: .venv/.zoo
	$(BIN)/python tools/bench/lengths.py $(ARGS)

planning: .venv/.zoo
	$(BIN)/python tools/bench/planning.py $(ARGS)

inspecting: .venv/.zoo
	$(BIN)/python tools/bench/inspecting.py $(ARGS)

coverage: .venv/.zoo
	$(BIN)/python tools/coverage.py $(ARGS)

stress: .venv/.installed
	$(BIN)/python tools/stress.py $(ARGS)

mutants: .venv/.installed
	$(BIN)/python tools/mutants.py --jobs $(JOBS) $(ARGS)

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebook: .venv/.trainers
	$(BIN)/python tools/run_notebook.py examples/tour.ipynb

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is touched last, so that an installation that failed is tried again.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'fxpipe needs Python 3.11 or newer, and $(PYTHON) is older or missing; try: make PYTHON=python3.11' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

.venv/.zoo: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[zoo]'
	touch $@

.venv/.trainers: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[trainers]'
	touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	touch $@
