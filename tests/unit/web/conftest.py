from collections.abc import Iterator
from functools import partial

import pytest
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket

from sftriage.web import page
from tests.scenario import captured, run, store  # noqa: F401 (fixtures)
from tests.unit.web.stored import Shelf, shelf_at


class Compiled(BytecodeCache):
    """Templates as they were compiled for the first application that showed them."""

    def __init__(self) -> None:
        self._by_key: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self._by_key:
            bucket.bytecode_from_string(self._by_key[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._by_key[bucket.key] = bucket.bytecode_to_string()


@pytest.fixture(scope="session", autouse=True)
def templates_are_compiled_once() -> Iterator[None]:
    """A page compiles its templates once; here every test makes a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "Environment", partial(Environment, bytecode_cache=Compiled()))
        yield


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return shelf_at(tmp_path / "share", tmp_path / "catalogue.db")
