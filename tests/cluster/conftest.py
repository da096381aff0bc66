"""One cluster for all tests of a run: `SFTRIAGE_TEST_CLUSTER_STATE` names one that runs already."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import node
from tests.cluster.node import Node
from tests.cluster.samples import Store, install
from tests.integration.s3 import served


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Node]:
    """A cluster that has the images of this checkout; a new one has nothing of sftriage yet."""
    if why := node.missing():
        pytest.skip(why)
    archives = node.images()
    with contextlib.ExitStack() as held:
        running = os.environ.get(node.RUNNING)
        one = Node(Path(running)) if running else held.enter_context(Node.start(tmp_path_factory.mktemp("c") / "state"))
        one.load(*archives)
        held.enter_context(one.as_newer())
        yield one


@pytest.fixture(scope="session")
def empty(cluster) -> frozenset[str]:
    """The objects of the cluster when it was new."""
    kept = cluster.state / "empty"
    if not kept.exists():
        kept.write_text("\n".join(cluster.snapshot()))
    return frozenset(kept.read_text().splitlines())


@pytest.fixture(scope="session")
def store(cluster, empty) -> Iterator[Store]:
    """A store that pods reach, and that the installed operator may delete from."""
    # (the same port each time: pods of a cluster that stays have it in their environment)
    with served(cluster.machine, 9000) as server:
        yield Store(server)


@pytest.fixture
def installed(cluster, store) -> Node:
    """The cluster with `k8s/` of this checkout, and with settings that name the store."""
    install(cluster, store)
    return cluster
