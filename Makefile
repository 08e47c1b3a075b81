# make demo      a failing training, found and explained
# make test      lint, types, all tests, the documentation and the tests of the HTML report in a browser
# make quick     lint, types and the fast tests, in less than a minute
# make test-frameworks  the tests with Lightning, transformers and others, in an environment of their own
# make test-browser  the tests of the HTML report in a headless Chromium, in an environment of their own, without torch
# make docs      the documentation as a site, in build/docs; a broken link fails
# make versions  all tests under the oldest, the pinned and the newest torch; downloads several gigabytes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO ?= siamese
VERSIONS_DIR ?= .versions
FRAMEWORKS := .venv-frameworks
BROWSER := .venv-browser
DOCS := .venv-docs

.PHONY: demo test quick lint types unit versions test-frameworks test-browser docs install clean

demo: install
	@$(BIN)/firstnan demo $(DEMO); code=$$?; \
	if [ $$code -ne 3 ]; then echo "make demo: exit code $$code where 3 (found) was expected" >&2; exit 1; fi; \
	echo "make demo: exit code 3, a non-finite value was found as expected. More demos: $(BIN)/firstnan demo"

test: lint types unit docs test-browser

quick: lint types
	$(BIN)/python -m pytest -q -n 2 --timeout=60 -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --timeout=180

# ARGS are handed to pytest: make versions ARGS=tests/test_tracer.py
versions:
	$(PYTHON) tools/versions.py --folder $(VERSIONS_DIR) $(ARGS)

test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -q -n 2 --dist worksteal --timeout=300 tests/frameworks $(ARGS)

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt tests/frameworks/requirements.txt
	$(FRAMEWORKS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -r tests/frameworks/requirements.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps fastai==2.8.12
	@touch $@

# Without a browser, and without the rights to install one, there is nothing to test.
test-browser: $(BROWSER)/.installed
	@if tools/chromium.sh; then \
		$(BROWSER)/bin/python -m pytest --confcutdir=tests/browser --timeout=120 tests/browser $(ARGS); \
	else echo "make test-browser: skipped, Chromium is missing and cannot be installed here"; fi

$(BROWSER)/.installed: pyproject.toml constraints.txt
	$(BROWSER)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		rich jinja2 plotly selenium pytest pytest-timeout
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# torch is not needed: the reference is made from the source text. Not --quiet, which hides warnings from --strict too.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: docs/requirements.txt
	$(DOCS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

install: $(STAMP)

# The stamp is newer than what it was made from, so a second call installs nothing.
$(STAMP): pyproject.toml constraints.txt
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(BROWSER) $(DOCS) build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
