from tests.scenario import captured, run, store  # noqa: F401 (fixtures)
