# GPUs: the HBM tier's tests and bench on real hardware, and the sabotage of its code. Included by the Makefile.
#
# Where there is no network, `make gpu-bundle` on a machine with one packs all that travels; there, GPU_PYTHON is
# a python3 that has torch and cuda-bindings, and what else is missing comes from the bundle.

GPU_PYTHON ?=
GPU_WHEELS := build/gpu-wheels
GPU_VENV := build/gpu-venv
GPU_PY := $(if $(GPU_PYTHON),$(GPU_VENV)/bin/python,$(PY))
GPU_NEEDS := $(if $(GPU_PYTHON),$(GPU_VENV)/ready,$(READY))
GPU_CYCLES ?= 1000
GPU_PACKAGES := grpcio protobuf numpy xxhash googleapis-common-protos grpcio-channelz grpcio-health-checking \
    grpcio-reflection grpcio-status uvloop structlog prometheus-client rocksdb-py click rich zstandard \
    psutil transformers pytest pytest-asyncio pytest-timeout

.PHONY: gpu-test gpu-bench gpu-bundle gpu-cycles mutants

gpu-test: $(GPU_NEEDS) ## the HBM tier's suite on this machine's own GPU (5 min)
	@PREFIXD_REAL_GPU=1 $(GPU_PY) -m pytest tests/gpu $(PYTEST_ARGS)

gpu-bench: $(GPU_NEEDS) ## copies by way of the HBM tier against the device's own rate (1 min)
	@$(GPU_PY) -m bench.gpu

gpu-cycles: $(READY) ## 1,000 engines attach, work and die over the stand-in driver (5 min)
	@PREFIXD_GPU_CYCLES=$(GPU_CYCLES) $(PY) -m pytest --timeout 3600 tests/gpu/test_cycles.py

gpu-bundle: $(READY) ## build/gpu-bundle.tar: this tree and its packages, for a GPU machine without a network
	@rm -rf $(GPU_WHEELS) && mkdir -p $(GPU_WHEELS)
	@$(PY) -m pip download --quiet --disable-pip-version-check --only-binary :all: -c constraints.txt -d $(GPU_WHEELS) \
	    $(GPU_PACKAGES)
	@git ls-files | tar -cf build/gpu-bundle.tar -T - $(GPU_WHEELS) $(wildcard proto/prefixd/v1/*_pb2*)
	@echo "unpack build/gpu-bundle.tar there, then: make gpu-test GPU_PYTHON=python3"

mutants: $(READY) ## remove each wait, check and close of the device code; exits 1 when no test notices (5 min)
	@$(PY) -m tests.mutants

# An environment beside the machine's own packages; the three source roots are on its path.
$(GPU_VENV)/ready: $(wildcard $(GPU_WHEELS)/*.whl)
	@rm -rf $(GPU_VENV) && $(GPU_PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-index \
	    --find-links $(GPU_WHEELS) \
	    $(GPU_PACKAGES)
	@printf '%s\n' $(CURDIR)/server $(CURDIR)/client $(CURDIR)/proto \
	    > $$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/prefixd.pth
	@printf '#!%s\nfrom prefixd_server.app.cli import main\nmain()\n' $(CURDIR)/$(GPU_VENV)/bin/python > $(GPU_VENV)/bin/prefixd
	@chmod +x $(GPU_VENV)/bin/prefixd
	@touch $@
