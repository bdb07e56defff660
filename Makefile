PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# Drives the tests of the page.
CHROMIUM ?= chromium
export CHROMIUM
# Those of make test-versions; what is not there is skipped.
PYTHONS ?= python3.11 python3.13
BENCHMARKS := busy cpu data gpu import_time instructions models step trainer

.PHONY: setup test test-slow test-paths test-paths-quick test-versions test-demo fuzz campaign quality format data publish \
	demo demo-pictures train sanity reproduce exact results kernels clean $(BENCHMARKS:%=benchmark-%)
# Made again whenever they are asked for.
.PHONY: results/main.json results/sanity.json results/kernels.json results/costs.json $(BENCHMARKS:%=results/%.json)

setup: $(VENV)/.ready $(VENV)/.compiled

$(VENV)/.ready: pyproject.toml .ci/constraints.txt tests/programs/fetch_transformers_tests.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	$(RUN) tests/programs/fetch_transformers_tests.py
	touch $@

# Else the first run would wait for it.
$(VENV)/.compiled: $(VENV)/.ready $(wildcard modeling/scan/cpu/*.h modeling/scan/cpu/*.cpp)
	$(RUN) -m mamba3_nplr.modeling.scan.cpu.compiled
	touch $@

test: setup quality
	$(RUN) -m pytest -n 2

test-slow: setup
	$(RUN) -m pytest -n 2 -m slow

# The tests as on other processors and with other numbers of threads: about an hour. The quick half: those of numbers.
test-paths: setup
	PYTHONPATH=tests $(RUN) tests/programs/code_paths.py

test-paths-quick: setup
	PYTHONPATH=tests $(RUN) tests/programs/code_paths.py --quick

# The suite with the oldest and with the newest dependencies that pyproject.toml allows, under each of PYTHONS; or part of
# it, such as make test-versions OPTIONS='--ends oldest -- tests/modeling'
test-versions: setup
	PYTHONPATH=tests $(RUN) tests/programs/versions.py --pythons $(PYTHONS) $(OPTIONS)

# The page in a real browser; Chromium is installed where that is possible, and its absence is an error.
test-demo: setup $(VENV)/.browser
	$(RUN) -m pytest -m browser tests/demo

$(VENV)/.browser: $(VENV)/.ready
	$(RUN) -m pip install --quiet --constraint .ci/constraints.txt --editable '.[browser]'
	command -v $(CHROMIUM) || { apt-get update --quiet && apt-get install --quiet --yes chromium; } || \
		{ echo 'make: the page is tested in Chromium, which could not be installed: install it as root, or name it by CHROMIUM=...' >&2; exit 1; }
	touch $@

# Random wrong calls of the compiled operators under the sanitizers of the compiler.
fuzz: setup
	PYTHONPATH=tests $(RUN) tests/programs/fuzz_operators.py --calls 4200

# Training runs that are killed, and files of runs that are damaged, at random.
campaign: setup
	PYTHONPATH=tests $(RUN) tests/programs/kill_and_corrupt.py --kills 30 --damages 30

quality: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The page, with what is in checkpoints/.
demo: setup
	$(RUN) demo/app.py --open

# Its pictures in docs/, one of each tab.
demo-pictures: setup $(VENV)/.browser
	PYTHONPATH=tests $(RUN) tests/programs/demo_pictures.py docs

# Such as make publish FOLDERS='runs/main/nplr data' OPTIONS=--dry_run
publish: setup
	$(RUN) -m mamba3_nplr.publish $(FOLDERS) $(OPTIONS)

data: setup
	$(RUN) -m mamba3_nplr.datasets_scripts.build data

# The main job: three models on the word problem of S5, the same training for each, on 128 of the 512 test words.
COMPARE_main := --models mamba3 nplr nplr_exact --task s5_generators --preset exact --task.total_steps 1500 \
	--task.test_lengths '[64,128,512,2048,8192]' --task.test_size 128

train: setup
	$(RUN) train_hf.py compare $(COMPARE_main) --out runs/main

# Every model on short words with the same small budget.
COMPARE_sanity := --models mamba3 mamba3_2 mamba3_4 nplr nplr_norope nplr_exact_norope deltanet gdn deltaproduct_2 \
	deltaproduct_4 gdp_2 gdp_4 ids4 --task s5_generators --preset quick --task.length 16 --task.start_length 16 \
	--task.batch_size 32 --task.total_steps 500 --task.test_lengths '[16]'

sanity: results/sanity.json

results/sanity.json: export OMP_NUM_THREADS := 1

# From the first update, in a folder of their own: what an earlier version has trained would be taken for finished.
results/main.json results/sanity.json: results/%.json: setup
	rm -rf runs/results/$*
	$(RUN) train_hf.py compare $(COMPARE_$*) --out runs/results/$*
	cp runs/results/$*/comparison.json $@

# All runs of the paper, or some, such as make reproduce RUNS='z5-*-seed0'; OPTIONS=--dry_run says how long it would take.
# It can be stopped at any moment, and resumes.
reproduce: setup
	$(RUN) results/reproduce.py --runs '$(RUNS)' $(OPTIONS)

# The same for words of groups and episodes with the exact options, such as make exact RUNS='s4-*'
exact: setup
	$(RUN) results/reproduce.py --list results/exact.txt --results results/exact/ --folder runs/exact --runs '$(RUNS)' $(OPTIONS)

# One of them, such as results/runs/s5_generators-nplr-seed0.json, or one that is not in results/runs.txt, such as
# results/runs/z5-nplr-seed3-beta_bias_init-1.json OPTIONS='--model.beta_bias_init -1'. A file that exists is made again
# only after it was deleted, and its folder in runs/paper.
results/runs/%.json: | setup
	$(RUN) results/reproduce.py --runs $* --results $(@D) -- $(OPTIONS)
	test -e $@

# A policy of checkpoints/ that acts, such as results/rollouts/shell_hand-nplr-seed0.json
results/rollouts/%.json: | setup
	$(RUN) train_hf.py evaluate checkpoints/$* --rollouts 1024 --out $@

# How a model of make exact drifts, such as results/drift/s4-nplr_exact-seed18.json
results/drift/%.json: setup
	$(RUN) results/drift.py runs/exact/$* --out $@

# A policy of checkpoints/ in very long episodes, such as results/long_games/shell_jitter-nplr_exact-seed24.json
results/long_games/%.json: setup
	$(RUN) results/long_games.py checkpoints/$* --out $@

# What each of them would take on one core of this machine, from measured updates.
results/costs.json: setup
	$(RUN) results/reproduce.py --dry_run --out $@

# The pages and pictures of what is there, without training or measuring anything.
FIGURES := words swaps jitter z5 drift

results: setup
	$(RUN) results/kept.py
	$(RUN) results/page.py results/README.md
	$(RUN) results/figures.py $(FIGURES:%=results/%.png)
	$(RUN) -m mamba3_nplr.training.comparison results/main.json docs/comparison.png

# Each has two names, such as benchmark-cpu and results/cpu.json.
OPTIONS_cpu := --plot docs/cpu.png
OPTIONS_step := --count

$(BENCHMARKS:%=benchmark-%): benchmark-%: results/%.json

$(BENCHMARKS:%=results/%.json): results/%.json: setup
	$(RUN) benchmarks/$*.py --out $@ $(OPTIONS_$*)

# Compiles the kernels and compares with what is recorded; the second records.
kernels: setup
	$(RUN) benchmarks/compile_kernels.py

results/kernels.json: setup
	$(RUN) benchmarks/compile_kernels.py --record --out $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
