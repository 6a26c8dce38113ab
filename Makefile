# make demo | make test | make test-all | make test-gpu | make lint
#
# Each does its own set-up on a fresh machine that has Python, make and a package index: a virtual
# environment in .venv and the versions in constraints/. INSTALL=0 uses the environment that is
# active instead (PYTHON=... names another interpreter).

INSTALL ?= 1
BASE_PYTHON ?= $(firstword $(shell command -v python3.11 || command -v python3.12 || command -v python3))
FLAVOUR := $(if $(shell command -v nvidia-smi),cuda,cpu)

comma := ,

ifeq ($(INSTALL),1)
PYTHON := .venv/bin/python
READY := .venv/.installed
VERSION := $(shell $(BASE_PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
PINS := $(wildcard constraints/$(FLAVOUR)-py$(VERSION).txt)
CONSTRAIN := $(if $(PINS),-c $(PINS))
EXTRAS := $(if $(filter cuda,$(FLAVOUR)),dev$(comma)fla,dev)
else
PYTHON ?= python3
READY :=
endif

.PHONY: demo test test-all test-gpu lint clean

demo: $(READY)
	$(PYTHON) -m cli demo --out demo-run --overwrite

test: lint
	$(PYTHON) -m pytest -q -m "not gpu" --slow-sample 6

test-all: lint
	$(PYTHON) -m pytest -q -m "not gpu" --slow-sample all

test-gpu: $(READY)
	$(PYTHON) -m pytest -q -m gpu --slow-sample all

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# torch first and alone: what is installed later then keeps it, whichever build it is.
.venv/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(BASE_PYTHON) -m venv .venv
	$(PYTHON) -m pip install -q torch $(CONSTRAIN)
	$(PYTHON) -m pip install -q -e ".[$(EXTRAS)]" $(CONSTRAIN)
	touch $@

clean:
	rm -rf .venv demo-run build *.egg-info
