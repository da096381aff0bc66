from tests.unit.recorded import run  # noqa: F401 (fixtures)
