from tests.unit.recorded import captured, run, store  # noqa: F401 (fixtures)
