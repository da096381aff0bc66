from tests.scenario import run  # noqa: F401 (fixture)
