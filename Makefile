# `make serve` and `make test` do all their own set-up.
PYTHON ?= python3
TORCH ?= 2.13.0
PORT ?= 8000
export PYTHON TORCH

RUN := .venv/bin/python -m
# One compute thread a process: ranks share the cores, and more threads only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadgroup

.PHONY: help serve test test-all bench sanitize lint venv

help:
	@echo "make serve [PORT=8000]  serve crossdock-mini on 2 ranks"
	@echo "make test               the tests"
	@echo "make test-all           the tests and the full product of plugin combinations"
	@echo "make bench              the benchmarks"
	@echo "make sanitize           compute-sanitizer over the tests of the GPU kernels (needs CUDA)"
	@echo "make lint               format, lint, types, import contracts"
	@echo "make venv               the virtual environment only"

venv:
	@.ci/set-up-venv

serve: venv
	@.venv/bin/crossdock serve --ranks 2 --attn-dp 2 --moe-ep 2 --dispatcher alltoallv --port $(PORT)

test: venv
	@$(PYTEST) -m "not slow and not gpu" tests

test-all: venv
	@$(PYTEST) -m "not gpu" tests

bench: venv
	@failed=""; for file in tests/benchmarks/bench_*.py; do \
		echo "== $$file"; OMP_NUM_THREADS=1 .venv/bin/python $$file || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "goals missed or failed:$$failed"; exit 1; }

sanitize: venv
	@.venv/bin/python tests/benchmarks/gpu/sanitize.py --out build/sanitize --tool memcheck
	@.venv/bin/python tests/benchmarks/gpu/sanitize.py --out build/sanitize --tool racecheck

lint: venv
	@.ci/lint
