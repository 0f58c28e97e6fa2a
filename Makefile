# make demo: set up, convert a checkpoint, speak with ONNX Runtime and PyTorch, one page with the result.
# make test: every test. Both work in a fresh clone with Python >= 3.10, make and pip.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL ?=
CODEC ?=

.PHONY: demo test lint setup
setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/convert-moss demo $(if $(MODEL),--model "$(MODEL)") $(if $(CODEC),--codec "$(CODEC)")

test: $(STAMP) lint
	$(PY) -m pytest -n 2

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy
