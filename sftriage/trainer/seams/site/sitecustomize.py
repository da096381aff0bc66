"""Waits for torch in every Python of a job, and then has `sftriage.trainer.seams.patches` install the seams.

Python imports it where this folder is first on PYTHONPATH. A process that never imports torch pays for this file and
for a check of the name of each module that it imports.
"""

# (no annotations: this file runs in Pythons from 2.7 on)
# mypy: allow-untyped-defs, allow-untyped-calls

import os
import sys

_HERE = os.path.dirname(__file__)  # noqa: PTH120 (pathlib is not imported yet)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120


_MODULES = (
    "torch",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint.state_dict_saver",
)


class _Torch:
    """A finder that leaves finding to the others, and installs the seams once a module is imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is cls else finder.find_spec(name, path, target)
            if spec is not None:
                _install_after(spec)
                return spec
        return None


def _install_after(spec):
    loader = spec.loader

    def exec_module(module):
        del loader.exec_module
        loader.exec_module(module)
        _install(spec.name)

    # A loader that takes no attribute is left alone: the script trains unrecorded.
    if hasattr(loader, "__dict__"):
        loader.exec_module = exec_module


def _install(name):
    try:
        if sys.version_info < (3, 10):  # noqa: UP036 (any Python of the job gets here)
            raise ImportError("Python 3.10 or later is needed")
        if "sftriage" not in sys.modules:
            _find_package()
        from sftriage.trainer.seams.patches import imported

        imported(name)
    except Exception as error:
        import logging

        logging.getLogger("sftriage").warning("sftriage: cannot record the stages of an unedited script: %r", error)


def _find_package():
    """Make sftriage importable: the installed one if it has seams, or else the one that this folder belongs to."""
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    found = find_spec("sftriage")
    places = list(found.submodule_search_locations or ()) if found and found.origin else []
    if any(os.path.isdir(os.path.join(place, "trainer")) for place in places):  # noqa: PTH112, PTH118
        return
    init = os.path.join(_PACKAGE, "__init__.py")  # noqa: PTH118
    # (the other modules of an installed one are still found)
    places.insert(0, _PACKAGE)
    spec = spec_from_file_location("sftriage", init, submodule_search_locations=places)
    if spec and spec.loader:
        sys.modules["sftriage"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _import_displaced():
    """Import the job's own sitecustomize, which this file hides, under its name."""
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":  # (Python 2 names no module)
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if sys.version_info >= (3,) and os.environ.get("SFTRIAGE_RINGS") and os.environ.get("SFTRIAGE_SEAMS") != "off":
    if "torch" in sys.modules:
        _install("torch")
    else:
        sys.meta_path.insert(0, _Torch)
_import_displaced()
