"""Packages whose names are imported when they are first used."""

from importlib import import_module

import pytest

from sftriage.lazily import from_modules


@pytest.mark.parametrize("package", ["agent", "controller", "policy", "traces", "ui"])
def test_every_public_name_is_there(package):
    module = import_module(f"sftriage.{package}")
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_a_name_is_looked_for_once_and_another_is_refused():
    find = from_modules("sftriage.traces", {"manifest": ("Manifest",)})
    assert find("Manifest") is import_module("sftriage.traces.manifest").Manifest
    assert import_module("sftriage.traces").__dict__["Manifest"] is find("Manifest")
    for name in ("Nothing", "manifest", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            find(name)
