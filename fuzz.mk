# The fuzz suites for as long as you like; `make test` tries a little of each. Included by the Makefile.

FUZZ_FACTOR ?= 50

.PHONY: fuzz

fuzz: $(READY) ## every fuzz suite FUZZ_FACTOR=50 times as long as in `make test` (40 min)
	@PREFIXD_FUZZ_FACTOR=$(FUZZ_FACTOR) $(PY) -m pytest tests/fuzz -o timeout=0 $(PYTEST_ARGS)
