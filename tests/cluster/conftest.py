"""One cluster for all tests of a run: `SFTRIAGE_TEST_CLUSTER_STATE` names one that runs already."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import node
from tests.cluster.node import Node


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Node]:
    """A cluster that has the images of this checkout; nothing of sftriage is in it yet."""
    if why := node.missing():
        pytest.skip(why)
    archives = node.images()
    if running := os.environ.get(node.RUNNING):
        one = Node(Path(running))
        one.load(*archives)
        with one.as_newer():
            yield one
        return
    with Node.start(tmp_path_factory.mktemp("cluster") / "state") as one:
        one.load(*archives)
        with one.as_newer():
            yield one
