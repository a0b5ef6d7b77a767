# Real engines, each in an environment of its own: vLLM for CPUs, and SGLang with stand-ins for what needs a GPU,
# with pinned dependencies, beside which the client is installed without moving one of them. Included by the Makefile.

ENGINES := .venvs/engines
ENGINES_PY := $(ENGINES)/bin/python
ENGINES_MADE_FROM := $(shell cat constraints-engines.txt pyproject.toml | cksum | tr -d ' ')
ENGINES_STAMP := $(ENGINES)/made-from-$(ENGINES_MADE_FROM)

SGLANG := .venvs/sglang
SGLANG_PY := $(SGLANG)/bin/python
SGLANG_MADE_FROM := $(shell cat constraints-engines-sglang.txt pyproject.toml | cksum | tr -d ' ')
SGLANG_STAMP := $(SGLANG)/made-from-$(SGLANG_MADE_FROM)

# Where pip's own index has no CPU wheel of torch: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

.PHONY: demo-vllm engine-test engine-bench sglang-test

demo-vllm: $(READY) $(ENGINES_STAMP) ## two vLLM processes share one cache; exits 1 if a token differs (5 min, 3 more with the install)
	@$(ENGINES_PY) -m bench.demo_vllm

engine-test: $(READY) $(ENGINES_STAMP) ## the vLLM connector under real engines (6 min of CPU time; 22 min on 2 cores at load 20)
	@$(ENGINES_PY) -m pytest -c tests/engines/vllm/pytest.ini --rootdir . tests/engines/vllm $(PYTEST_ARGS)

engine-bench: $(READY) $(ENGINES_STAMP) ## what the vLLM connector costs, against its limits (2 min)
	@$(ENGINES_PY) -m bench.vllm.hooks
	@$(ENGINES_PY) -m bench.vllm.load_rate
	@$(ENGINES_PY) -m bench.vllm.ttft

sglang-test: $(READY) $(SGLANG_STAMP) ## the SGLang connector against SGLang's own storage, and under engines with stand-ins for GPU copies (5 min at load 12)
	@$(SGLANG_PY) -m pytest -c tests/engines/sglang/pytest.ini --rootdir . tests/engines/sglang $(PYTEST_ARGS)

$(ENGINES_STAMP): constraints-engines.txt pyproject.toml
	@test -x $(ENGINES_PY) || $(PYTHON) -m venv $(ENGINES)
	@echo "installing vLLM into $(ENGINES) (2.5 GB; the first time takes 2 to 4 minutes)"
	@$(ENGINES_PY) -m pip install --quiet --disable-pip-version-check -c constraints-engines.txt \
	    $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(ENGINES_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-engines.txt
	@$(ENGINES_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@rm -f $(ENGINES)/made-from-*
	@touch $@

$(SGLANG_STAMP): constraints-engines-sglang.txt pyproject.toml
	@test -x $(SGLANG_PY) || $(PYTHON) -m venv $(SGLANG)
	@echo "installing SGLang into $(SGLANG) (3 GB; the first time takes 2 to 4 minutes)"
	@$(SGLANG_PY) -m pip install --quiet --disable-pip-version-check -c constraints-engines-sglang.txt \
	    $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(SGLANG_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-engines-sglang.txt
	@$(SGLANG_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@rm -f $(SGLANG)/made-from-*
	@touch $@
