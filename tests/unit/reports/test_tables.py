"""Tables of windows and decisions: of a job that has started again, they say of which attempt each row is."""

import pytest
from rich.console import Console

from sftriage.reports.tables import decisions_table, windows_table
from sftriage.words.decisions import decision_values
from tests.unit.recorded import decision, verdict


def printed(table):
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return [line.replace("┃", "│").split("│")[1:-1] for line in captured.get().splitlines()]


@pytest.mark.parametrize("table", [windows_table, lambda some: decisions_table(list(map(decided, some)))])
def test_rows_say_of_which_attempt_they_are_where_there_are_several(table):
    def steps_and_attempts(seen):
        titles, *rows = [[cell.strip() for cell in line] for line in printed(table(seen)) if line]
        return [tuple(row[titles.index(title)] for title in ("attempt", "steps") if title in titles) for row in rows]

    assert steps_and_attempts([verdict(20), verdict(20, attempt=1)]) == [("1", "20 to 69"), ("2", "20 to 69")]
    assert steps_and_attempts([verdict(20), verdict(30)]) == [("20 to 69",), ("30 to 79",)]


def decided(seen):
    return decision_values(decision(seen)) | {"results": []}
