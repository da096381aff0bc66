"""Every bench can be started: what it imports is there, and the runner lists it."""

import importlib

import pytest

from bench.runner import HERE, main, names


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.py")), ids=lambda path: str(path.relative_to(HERE)))
def test_what_a_bench_imports_is_there(path, monkeypatch):
    # GIVEN the folder of jobs that tests and benches share, as the runner has it
    monkeypatch.syspath_prepend(str(HERE.parent / "tests" / "integration" / "jobs"))
    # THEN the module can be imported
    importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))


@pytest.mark.parametrize("name", names())
def test_a_bench_describes_its_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_without_a_name_they_are_listed(capsys):
    main([])
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(names())


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit, match="there is no bench 'nonsense'"):
        main(["nonsense"])
