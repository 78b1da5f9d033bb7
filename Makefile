# Everything is set up on first use: `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV ?= .venv
# PyPI's torch for Linux brings gigabytes of CUDA libraries, so the CPU build is taken unless another is asked for:
# make demo TORCH="torch --index-url <the one pytorch.org gives for your GPU>". PyPI's serves where that index is not
# reached, and a torch that is there stays.
TORCH_VERSION := 2.13.0
ifeq ($(origin TORCH)$(shell uname -s),undefinedLinux)
TORCH := torch==$(TORCH_VERSION)+cpu --extra-index-url https://download.pytorch.org/whl/cpu --timeout 30 --retries 1
TORCH_ELSE := torch==$(TORCH_VERSION)
endif
TORCH ?= torch==$(TORCH_VERSION)
BIN := $(VENV)/bin
# What runs a swarm, and what develops it.
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP_SHOW := $(BIN)/python -m pip --disable-pip-version-check show --quiet
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt
# Tests and benchmarks start processes that compute on one thread each.
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test test-slow check format proto parity bench-quality bench-overhead bench-frames clean

$(STAMP): pyproject.toml deploy/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_ELSE),$(PIP_SHOW) torch || $(PIP) $(TORCH) || $(PIP) $(TORCH_ELSE),$(PIP) $(TORCH))
	$(PIP) -e .
	touch $(STAMP)

$(DEV): $(STAMP)
	$(PIP) -e '.[dev]'
	touch $(DEV)

demo: $(STAMP)  ## a bootstrap and three peers train a small model on this machine
	@$(BIN)/swarm-peer demo $(ARGS)

test: $(DEV)  ## the whole suite but what is marked slow or bench
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not bench" $(ARGS)

test-slow: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

check: $(DEV)  ## format, lint, types
	$(BIN)/ruff format --check swarm peers tests
	$(BIN)/ruff check swarm peers tests
	$(BIN)/pyright

format: $(DEV)
	$(BIN)/ruff format swarm peers tests
	$(BIN)/ruff check --fix swarm peers tests

proto: $(DEV)  ## compile proto/ to the descriptor set that swarm.net.messages loads
	$(BIN)/python -m grpc_tools.protoc -I proto --include_imports --descriptor_set_out=swarm/net/swarm_v1.binpb proto/swarm/v1/*.proto

parity: $(STAMP)  ## losses of the swarm against the single-process reference
	@$(BIN)/python -m tests.bench.parity $(ARGS)

bench-quality: $(STAMP)  ## validation loss of every boundary kind, with both controls
	@$(BIN)/python -m tests.bench.quality $(ARGS)

bench-overhead: $(STAMP)  ## tokens/s of the swarm against the reference trainer
	@$(BIN)/python -m tests.bench.overhead $(ARGS)

bench-frames: $(STAMP)  ## MB/s of a link against a bare gRPC stream
	@$(BIN)/python -m tests.bench.frames $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
