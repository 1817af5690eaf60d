# Everything a contributor runs. Each target makes $(VENV) first, and nothing is installed twice.
PYTHON ?= python3
VENV ?= .venv
TESTS ?=
WORKERS ?= 2
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -qq

.PHONY: check-kernels compiler help demo test test-slow test-clients drill lint bench clean
help:
	@echo "make demo       generate text with a small real model (downloads 93 MB once)"
	@echo "make test       the test suite, in WORKERS=2 processes of 2.5 GB each"
	@echo "make test-slow  the tests marked slow: real weights, long property runs"
	@echo "make test-clients  clients of others (openai, langchain, litellm, llm, SMG, ...), installed under build/"
	@echo "make drill      a server among hostile clients, in a crowd, and through a long day"
	@echo "make lint       ruff and pyright"
	@echo "make check-kernels  compile all kernels and the engine for TPUs and GPUs that are not here (installs 2.5 GB)"
	@echo "make bench      the benchmarks that docs/performance.md quotes"
	@echo "PYTHON=python3.12 VENV=.venv312 selects another interpreter and environment"

# Debian ships venv without ensurepip; there pip is put in from outside.
$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || \
	  { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python --quiet install pip; }

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing jaxserve into $(VENV)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test dependencies into $(VENV)"
	@$(PIP) install -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development dependencies into $(VENV)"
	@$(PIP) install -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	@$(VENV)/bin/jaxserve generate demo --temperature 0 --max-tokens 48 \
	  --prompt "Once upon a time, in a small village at the edge of a great forest," \
	  --prompt "The history of the steam engine begins in the seventeenth century, when" \
	  --prompt "In order to bake a good loaf of bread, you first need to" \
	  --system "You are a helpful and friendly assistant. You answer questions about science, history, \
geography and everyday life. Answer in one or two short sentences, in plain words, without lists and without \
headings. If you do not know the answer, say so. Do not repeat the question, and do not add anything that was \
not asked for." \
	  --message "What is the capital of France, and what is it known for?" \
	  --message "Why is the sky blue?"

test: $(VENV)/.installed-test
	@$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(TESTS)

test-slow: $(VENV)/.installed-test
	@$(VENV)/bin/python -m pytest -q -m slow

test-clients: $(VENV)/.installed-test
	@$(VENV)/bin/python -m pytest -q -m clients tests/clients

drill: $(VENV)/.installed-test
	@$(VENV)/bin/python -m pytest -q -m "slow or not slow" tests/drills tests/serving/http/test_drills.py

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: $(VENV)/.installed
	@for name in host startup latency prefix throughput; do $(VENV)/bin/jaxserve bench $$name || exit 1; done

# The compilers of TPUs and of NVIDIA GPUs, each in an environment of its own. CHECK=... are options for both runs.
check-kernels:
	@$(MAKE) --no-print-directory compiler VENV=$(VENV)-tpu EXTRA=tpu
	@$(MAKE) --no-print-directory compiler VENV=$(VENV)-cuda EXTRA=cuda-compiler
	@failed=0; for kind in tpu:tpu gpu:cuda; do \
	  $(VENV)-$${kind#*:}/bin/python -m scripts.compile_check --target $${kind%:*} --require $(CHECK) || failed=1; \
	done; exit $$failed

compiler: $(VENV)/.installed-$(EXTRA)

$(VENV)/.installed-$(EXTRA): pyproject.toml | $(VENV)/bin/python
	@echo "installing the compiler $(EXTRA) into $(VENV)"
	@$(PIP) install -e '.[$(EXTRA)]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
