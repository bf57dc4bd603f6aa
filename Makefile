# The one door: every target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install postgres cluster tune test lint bench bench-faults bench-soak gpu-check wheel clean

install: $(STAMP) ## build the virtual environment in .venv

# Debian packages its Python without venv and headers; DeepSpeed's operations are compiled against the latter.
SYSTEM = import ensurepip, pathlib, sysconfig; assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(SYSTEM)' 2>/dev/null || { echo "installing python3-venv and python3-dev"; \
	  apt-get update -qq && apt-get install -qq -y python3-venv python3-dev; }
	$(PYTHON) -m venv $(VENV)
	@# torch first and pinned, so that nothing else decides which build of it is taken
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,gp]'
	touch $@

tune: install ## the main job: the tiny model on this machine's processor, to a finished deepspeed_config.json
	$(BIN)/python -m autotune model=gpt_tiny machine=cpu

# Debian keeps PostgreSQL's server out of the PATH.
postgres: ## the server that tests start for themselves; installed where it is missing
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { \
	  echo "installing postgresql"; apt-get update -qq && apt-get install -qq -y postgresql; }

cluster: ## the Slurm and the sshd that tests start for themselves; installed where they are missing
	@PATH=$$PATH:/usr/sbin; for each in slurmctld slurmd srun munged sshd ssh; do \
	  command -v $$each >/dev/null || { echo "installing Slurm, munge and OpenSSH"; apt-get update -qq && \
	    apt-get install -qq -y slurmctld slurmd slurm-client munge openssh-server openssh-client; break; }; done

test: install lint postgres cluster ## every test
	$(BIN)/python -m pytest -m 'not probes' --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m probes

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

bench: install ## the figures that the README and the notes quote, as ratios from one run
	$(BIN)/python -m tests.bench

bench-faults: install ## every fault in every phase on real ranks: outcome, time to recover, what is left
	$(BIN)/python -m tests.bench faults

bench-soak: install ## 200 warm probes in a row: memory, zombies, file descriptors
	$(BIN)/python -m tests.bench soak

gpu-check: install ## on a machine with CUDA: predicted memory against the GPU's own counters, in under eight minutes
	$(BIN)/pip install --quiet --constraint constraints.txt nvidia-ml-py
	$(BIN)/python -m tests.gpu

wheel: install ## build the wheel and try it outside of the checkout
	$(BIN)/python -m pytest tests/test_wheel.py

clean:
	rm -rf $(VENV) build dist
