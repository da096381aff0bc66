"""Refused messages are counted, in bounded memory, and logged once."""

from sftriage.fleet.incoming import MAX_NAMED, Refusals


def test_a_flood_of_names_is_counted_and_said_a_few_times(caplog):
    refusals = Refusals()
    names = ["\x1b[31m", "", "a.b", "*", "\u202e", *(f"node-{number}" for number in range(1000))]
    for _ in range(10):
        for name in names:
            refusals.note(name, "garbage")
    assert len(refusals.problems) == len(caplog.messages) <= MAX_NAMED + 1
    assert sum(int(how.split()[0]) for how in refusals.problems.values()) == 10 * len(names)
    assert all(said.isprintable() for said in (*caplog.messages, *refusals.problems))
