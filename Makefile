# Each target makes what it needs on first use, all of it in .venv.
#
# If $(PYTHON) imports a torch that sees a GPU, that torch and its triton are used and never
# replaced; .venv only adds what is missing beside them. Otherwise .venv gets the versions below.
# torch goes in first and exactly pinned, so that nothing after it pulls in another build.

PYTHON ?= python3
TORCH ?= 2.13.0
TRITON ?= 3.9.0
TRITON_OLDEST := 3.6.0
VENV := .venv

TEST_TOOLS := 'pytest>=9,<10' 'pytest-xdist>=3.8,<4' 'expecttest>=0.3,<0.4' 'hypothesis>=6,<7' \
  'numpy>=1.26,<3' 'setuptools>=77,<90' 'cmake>=3.27,<5'
# Processes of a test run. One thread each: more only get in each other's way.
JOBS ?= 2
PARALLEL := -n $(JOBS)
LINT_TOOLS := ruff==0.17.6

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check
ENGINE := $(VENV)/.torch-$(TORCH)-triton-$(TRITON)
OLDEST := $(VENV)/triton-$(TRITON_OLDEST)

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Triton's default changes in 3.10; 3.9 warns until one is chosen.
export TRITON_DEFAULT_FP_FUSION ?= 1

.PHONY: demo test test-oldest mutants soak bench lint format clean

demo: $(ENGINE)
	$(PY) -m mhc_ops

# Separate processes: TRITON_INTERPRET is read once, when triton is imported.
# The ahead-of-time tests share out their compilations themselves.
define kernel_tests
TRITON_INTERPRET=1 $(PY) -m pytest test -m interpreter $(PARALLEL)
$(PY) -m pytest test -m aot
endef

test test-oldest: export OMP_NUM_THREADS := 1

test: $(ENGINE) $(VENV)/.test
	$(PY) -m pytest test -m "not interpreter and not aot" $(PARALLEL)
	$(kernel_tests)

# The kernels once more, under the oldest triton that is supported.
test-oldest: export PYTHONPATH := $(CURDIR)/$(OLDEST):$(PYTHONPATH)
test-oldest: $(ENGINE) $(VENV)/.test $(OLDEST)/.done
	$(kernel_tests)

# Breaks the kernels in known ways: each time the tests must notice. On a GPU with GPU=--gpu.
mutants: $(ENGINE) $(VENV)/.test
	$(PY) test/mutate.py $(GPU)

# Long, so not part of the tests: thousands of calls on a GPU.
soak: $(ENGINE)
	PYTHONPATH=$(PYTHONPATH):$(CURDIR)/test $(PY) test/soak.py

bench: $(ENGINE)
	$(PY) benchmarks/bench_seam.py

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find mhc_ops csrc_meta test benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The paths of $(PYTHON)'s own packages go into a .pth file instead of --system-site-packages,
# which would miss a torch that lives in a virtual environment.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c 'import sys, torch, triton; sys.exit(not torch.cuda.is_available())' 2> $(VENV)/no-gpu.log; then \
	  $(PYTHON) -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
	    > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"; \
	  touch $(VENV)/.uses-outer-torch; \
	fi
	touch $@

$(ENGINE): $(VENV)/.made
	test -e $(VENV)/.uses-outer-torch || $(PIP) torch==$(TORCH)
	test -e $(VENV)/.uses-outer-torch || $(PIP) triton==$(TRITON) 'numpy<3'
	rm -f $(VENV)/.torch-*
	touch $@

$(VENV)/.test: $(VENV)/.made
	$(PIP) $(TEST_TOOLS)
	touch $@

$(VENV)/.lint: $(VENV)/.made
	$(PIP) $(LINT_TOOLS)
	touch $@

# A folder ahead of .venv's packages on the path; triton 3.6.0's interpreter needs numpy < 2.4.
$(OLDEST)/.done: $(VENV)/.made
	$(PIP) --target $(OLDEST) --no-deps triton==$(TRITON_OLDEST) 'numpy>=2,<2.4'
	touch $@
