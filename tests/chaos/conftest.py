"""How long chaos lasts, and from which seed; and real jobs, as the integration tests have them."""

from tests.integration.conftest import environment

__all__ = ["environment"]


def pytest_addoption(parser):
    group = parser.getgroup("chaos")
    group.addoption("--seed", type=int, default=1, help="Of the first round; the others have those after it.")
    group.addoption("--rounds", type=int, default=5, help="How many jobs there are.")
    group.addoption("--seconds", type=float, default=120.0, help="For how long things befall each of them.")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--seed")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--rounds")))
