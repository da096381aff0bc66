"""Captures to store, as the unit tests have them."""

from tests.unit.conftest import make_manifest, put, store, trace

__all__ = ["make_manifest", "put", "store", "trace"]
