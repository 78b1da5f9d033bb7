# Everything is set up on first use: `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV ?= .venv
# A CPU build on Linux by default where pip finds one. With a GPU: make demo TORCH="torch --index-url <your vendor's>".
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests and benchmarks start processes that compute on one thread each.
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test test-slow check format proto parity bench-quality bench-overhead bench-frames clean

$(STAMP): pyproject.toml deploy/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -c deploy/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c deploy/constraints.txt
	touch $(STAMP)

demo: $(STAMP)  ## a bootstrap and three peers train a small model on this machine
	@$(BIN)/swarm-peer demo $(ARGS)

test: $(STAMP)  ## the whole suite but what is marked slow or bench
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not bench" $(ARGS)

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

check: $(STAMP)  ## format, lint, types
	$(BIN)/ruff format --check swarm peers tests
	$(BIN)/ruff check swarm peers tests
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format swarm peers tests
	$(BIN)/ruff check --fix swarm peers tests

proto: $(STAMP)  ## compile proto/ to the descriptor set that swarm.net.messages loads
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
