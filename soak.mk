# The soak: engines that come and go, and are killed, over a daemon and a disk in trouble. Included by the Makefile.

SOAK_MINUTES ?= 20
SOAK_SEED ?=

.PHONY: soak

soak: $(READY) ## SOAK_MINUTES=20 of engines that come, go and are killed; nothing grows, no error, no wrong byte
	@$(PY) -m tests.soak --minutes $(SOAK_MINUTES) $(if $(SOAK_SEED),--seed $(SOAK_SEED))
