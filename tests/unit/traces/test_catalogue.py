import multiprocessing
import shutil
import sqlite3
import stat
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import CatalogueError, UsageError
from sftriage.traces.catalogue import VERSION, CaptureQuery, CaptureRow, Catalogue
from sftriage.traces.manifest import CauseInfo, Manifest
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import TRACE_NAME, LocalStore
from tests.unit.conftest import keep
from tests.unit.traces.manifests import QUICKLY, agrees, questions, sets_of_manifests


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "catalogue.db"


@pytest.fixture(scope="module")
def stocked(module_path: Path) -> Path:
    """A run with four captures, the first put last, and their catalogue."""
    run = module_path / "run"
    catalogue = Catalogue(run / "catalogue.db", LocalStore(run))
    for capture_id, about in {
        "late": {"rank": 2, "first_step": 900, "window": (800, 849), "second": 9},
        "data-2": {"rank": 2, "first_step": 160, "window": (100, 149), "second": 1},
        "data-3": {"rank": 3, "first_step": 300, "window": (250, 299), "second": 2, "rule": "other"},
        "whole-3": {"rank": 3, "stage": None, "first_step": 500, "window": (450, 499), "second": 3},
    }.items():
        catalogue.add(keep(run, capture_id, **about))
    return run


@pytest.fixture
def catalogue(path, store, stocked) -> Catalogue:
    """A catalogue of four captures, in a run of the test's own."""
    shutil.copytree(stocked, path.parent, dirs_exist_ok=True)
    return Catalogue(path, store)


def ids(rows: list[CaptureRow]) -> list[str]:
    return [row.capture_id for row in rows]


def answers(catalogue: Catalogue) -> list[object]:
    return [
        catalogue.find(),
        catalogue.find(CaptureQuery(rank=3)),
        catalogue.find(CaptureQuery(stage="data", steps=(0, 310))),
        catalogue.find(CaptureQuery(rule="other")),
        catalogue.find(CaptureQuery(label="suspect")),
        catalogue.find(CaptureQuery(prefix="whole")),
    ]


EIGHT = datetime(2027, 1, 15, 8, 0, 3, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        # Values that no manifest can hold, and no database can compare.
        (CaptureQuery(job="\udcff"), []),
        (CaptureQuery(job="resnet\0"), []),
        # In another time zone, and in a year of one digit.
        (CaptureQuery(since=EIGHT.astimezone(timezone(timedelta(hours=1)))), ["whole-3", "late"]),
        (CaptureQuery(since=datetime(9, 1, 1, tzinfo=timezone.utc)), ["data-2", "data-3", "whole-3", "late"]),
    ],
)
def test_conditions_of_no_other_test_work_too(wanted, found, catalogue):
    assert ids(catalogue.find(wanted)) == found


def test_a_row_says_what_the_manifest_says_and_is_private(catalogue, store, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (artefact,) = store.manifest("data-3").artefacts
    (row,) = catalogue.find(CaptureQuery(prefix="data-3"))
    assert (row.size_bytes, row.sha256) == (artefact.size_bytes, artefact.sha256)
    assert (row.window_first_step, row.window_last_step, row.first_step, row.last_step) == (250, 299, 300, 304)
    assert (row.scope, row.gain_s, row.policy, row.why, row.reproduced) == ("rank", 0.02, "default", "", None)
    assert (row.created_at, row.store, row.reference) == ("2027-01-15T08:00:02.000000Z", store.place, "data-3")


def test_a_row_has_the_cause_of_a_hang(catalogue, store):
    cause = CauseInfo(code="absent", sure=True, sentence="Rank 2 waits for a lock.", next_step="Free it.")
    store.put_manifest(store.manifest("data-3").model_copy(update={"hang": cause}))
    catalogue.add(store.manifest("data-3"))
    (row,) = catalogue.find(CaptureQuery(prefix="data-3"))
    assert row.why_slow == cause


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE captures (mine TEXT)")


def overwritten_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xa5" * 4096
    path.write_bytes(content)


def not_utf8(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sftriage_captures SET job = CAST(X'6aff' AS TEXT)")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"not a database" * 1000),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "half a page": lambda path: path.write_bytes(path.read_bytes()[: 4096 * 3 + 2048]),
    "overwritten": overwritten_in_the_middle,
    "text that is not UTF-8": not_utf8,
    "no UTF-8": lambda path: path.write_bytes(path.read_bytes().replace(b"capture_id TEXT", b"\xff" * 15)),
    "foreign": foreign,
    "no table": lambda path: sqlite3.connect(path).execute("DROP TABLE sftriage_captures"),
    "no column": lambda path: sqlite3.connect(path).execute("ALTER TABLE sftriage_captures DROP COLUMN rank"),
}


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_in_the_database_raise_only_catalogue_errors(catalogue, store, path, seed):
    # GIVEN some bytes of it are others, in one place or in many
    random, content = Random(seed), bytearray(path.read_bytes())
    for _ in range(random.choice((1, 30))):
        at = random.choice((random.randrange(1000), random.randrange(len(content))))
        other = random.randbytes(min(random.choice((1, 50, 3000)), len(content) - at))
        content[at : at + len(other)] = other
    path.write_bytes(bytes(content))
    # WHEN it is used THEN there is an answer, or one line that names it
    message: list[str] = []
    for act in (Catalogue.find, Catalogue.refresh, Catalogue.reindex, Catalogue.find):
        try:
            act(Catalogue(path, store))
        except (CatalogueError, UsageError) as error:
            message.append(str(error))
    assert all("catalogue.db" in one for one in message)


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_query_is_answered_whatever_happens_to_the_database(damage, catalogue, store, path):
    before = answers(catalogue)
    DAMAGE[damage](path)
    assert answers(catalogue) == before
    assert answers(Catalogue(path, store)) == before


def test_a_foreign_database_is_set_aside_and_not_lost(catalogue, path):
    foreign(path)
    path.with_name("catalogue.db-wal").write_bytes(b"of the foreign one, and no part of the new one")
    catalogue.find()
    assert not path.with_name("catalogue.db-wal").exists()
    with sqlite3.connect(path.with_name("catalogue.db.damaged")) as connection:
        assert connection.execute("SELECT name FROM pragma_table_info('captures')").fetchall() == [("mine",)]


def test_adding_to_a_damaged_database_loses_nothing(catalogue, path, put):
    path.write_bytes(b"garbage" * 2000)
    catalogue.add(put("new", second=5))
    assert ids(catalogue.find()) == ["data-2", "data-3", "whole-3", "new", "late"]


def test_reindex_finds_what_was_put_but_never_added_and_forgets_what_is_gone(catalogue, store, put):
    put("orphan", second=5)  # as after a crash between putting and adding
    store.path("data-2", TRACE_NAME).unlink()
    progress: list[tuple[int, int]] = []
    number, problems = catalogue.reindex(lambda done, total: progress.append((done, total)))
    assert ids(catalogue.find()) == ["data-3", "whole-3", "orphan", "late"]
    assert (number, ["data-2" in one for one in problems]) == (4, [True])
    assert progress == [(done, 5) for done in range(1, 6)]


def test_refresh_reads_only_what_is_new_and_forgets_what_is_gone(catalogue, store, put):
    catalogue.find()
    put("orphan", second=5)
    store.remove("late")
    # GIVEN a manifest that the catalogue has read already, and that can be read no more
    store.path("data-3", TRACE_NAME).with_name("manifest.json").unlink()
    progress: list[tuple[int, int]] = []
    # WHEN the catalogue is compared with the store THEN it reads what it does not know, and nothing else
    assert catalogue.refresh(lambda done, total: progress.append((done, total))) == ()
    assert ids(catalogue.find()) == ["data-2", "data-3", "whole-3", "orphan"]
    assert progress == [(1, 1)]
    # AND a second time there is nothing to do
    assert catalogue.refresh(lambda done, total: progress.append((done, total))) == ()
    assert progress == [(1, 1)]


def test_what_is_added_while_the_store_is_listed_stays(catalogue, store, put, monkeypatch):
    catalogue.find()
    listing = store.ids
    added: list[Manifest] = []

    def listed_just_before() -> frozenset[str]:
        listed = listing()
        if not added:
            added.append(put("new", second=5))
            Catalogue(Path(catalogue.name), store).add(added[0])
        return listed

    # GIVEN a refresh that lists the store WHEN another process puts and adds a capture just after that
    monkeypatch.setattr(store, "ids", listed_just_before)
    catalogue.refresh()
    # THEN it is not taken for one that is gone
    assert ids(catalogue.find()) == ["data-2", "data-3", "whole-3", "new", "late"]


def test_what_is_added_while_the_store_is_read_stays(catalogue, store, put, monkeypatch):
    # GIVEN a reindex that has listed the store, and reads it
    listed = store.ids()
    late_to_it = put("new", second=5)
    monkeypatch.setattr(store, "ids", lambda: listed)
    # WHEN another process adds a capture meanwhile
    other = Catalogue(Path(catalogue.name), store)
    catalogue.reindex(lambda done, total: other.add(late_to_it) if done == 1 else None)
    # THEN it is there, although the listing did not have it
    assert ids(catalogue.find()) == ["data-2", "data-3", "whole-3", "new", "late"]


def test_a_locked_or_impossible_database_is_an_error_and_not_a_rebuild(catalogue, store, path, tmp_path, monkeypatch):
    monkeypatch.setattr("sftriage.traces.catalogue.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(CatalogueError, match=r"catalogue\.db: database is locked"):
        catalogue.find()
    holder.execute("ROLLBACK")
    holder.close()
    assert len(catalogue.find()) == 4
    assert not path.with_name("catalogue.db.damaged").exists()
    (tmp_path / "directory").mkdir()
    with pytest.raises(
        CatalogueError, match=r"directory: unable to open .*move it away, then `sftriage traces reindex`"
    ):
        Catalogue(tmp_path / "directory", store).find()
    with pytest.raises(UsageError, match="nowhere"):
        Catalogue(tmp_path / "nowhere" / "catalogue.db", store).find()


def query(path: Path, root: Path) -> None:
    assert len(Catalogue(path, LocalStore(root)).find()) == 4


def test_many_processes_rebuild_at_once(catalogue, path):
    path.unlink()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=query, args=(path, path.parent)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 6


@pytest.fixture(scope="module")
def shelf(module_path: Path) -> Catalogue:
    """The catalogue of a store of many runs, of which nothing is in it yet."""
    (module_path / "store").mkdir()
    catalogue = Catalogue(module_path / "catalogue.db", RemoteStore.open(f"file://{module_path / 'store'}"))
    catalogue.reindex()
    return catalogue


@given(stored=sets_of_manifests(), wanted=st.lists(questions(), min_size=8, max_size=12))
@settings(max_examples=40, phases=QUICKLY)
def test_the_catalogue_answers_as_the_manifests_would(stored, wanted, shelf):
    agrees(shelf, stored, wanted)


AS_OF_0001 = [
    """CREATE TABLE sftriage_captures ( "key" TEXT NOT NULL, capture_id TEXT NOT NULL, job TEXT NOT NULL,
    run TEXT NOT NULL, rank BIGINT NOT NULL, stage TEXT, label TEXT NOT NULL, scope TEXT NOT NULL,
    window_first_step BIGINT NOT NULL, window_last_step BIGINT NOT NULL, first_step BIGINT NOT NULL,
    last_step BIGINT NOT NULL, gain_s DOUBLE NOT NULL, size_bytes BIGINT NOT NULL, sha256 TEXT NOT NULL,
    profiler TEXT NOT NULL, rule TEXT NOT NULL, policy TEXT NOT NULL, why TEXT NOT NULL, created_at TEXT NOT NULL,
    host TEXT NOT NULL, reproduced TEXT, store TEXT NOT NULL, reference TEXT NOT NULL, onset_step BIGINT, cause TEXT,
    PRIMARY KEY ("key") )""",
    """CREATE TABLE sftriage_stores ( "key" TEXT NOT NULL, store TEXT NOT NULL, PRIMARY KEY ("key") )""",
    "CREATE TABLE sftriage_schema ( version_num VARCHAR(32) NOT NULL, PRIMARY KEY (version_num) )",
    "CREATE INDEX ix_sftriage_captures_created_at ON sftriage_captures (created_at)",
]
"""Tables that differ from these need another version."""


def test_the_tables_are_those_of_their_version(tmp_path, store):
    (tmp_path / "run").mkdir(exist_ok=True)
    Catalogue(tmp_path / "made.db", store).find()
    with sqlite3.connect(tmp_path / "made.db") as connection:
        made = {" ".join(sql.split()) for (sql,) in connection.execute("SELECT sql FROM sqlite_master") if sql}
    assert VERSION == "0001"
    assert made == {" ".join(sql.split()) for sql in AS_OF_0001}


def test_one_of_another_version_is_refused_and_left_alone(tmp_path, store, put):
    path = tmp_path / "catalogue.db"
    put("a")
    Catalogue(path, store).find()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sftriage_schema SET version_num = '0003'")
    before = path.read_bytes()
    for act in (Catalogue(path, store).find, Catalogue(path, None).find, Catalogue(path, store).reindex):
        with pytest.raises(UsageError, match=r"catalogue\.db: schema 0003; this sftriage reads 0001"):
            act()
    assert path.read_bytes() == before
    assert not path.with_name("catalogue.db.damaged").exists()
