"""The groups of a host that a remedy can be switched on: found, told how they stand, and asked once."""

import os
from contextlib import closing

from sftriage.agent.agent import Switches
from sftriage.mitigate.switch_state import Setting
from sftriage.mitigate.switching import Switch, SwitchFile, make_switch


def test_groups_are_found_as_they_come_and_asked_once_for_what_is_wanted(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN a host on which there is no group yet, and then one, beside a file that is none
        assert switches.statuses() == []
        path = make_switch(tmp_path, (0, 1))
        (tmp_path / "rank-7.0.switch").write_bytes(b"somebody else's")
        ranks = [Switch(path, place) for place in range(2)]
        (status,) = switches.statuses()
        assert (status.name, status.ranks, status.value) == (path.name, (0, 1), 0)
        # WHEN a value is wanted, again and again THEN it is asked for once
        switches.want({path.name: Setting(2), "rank-9.0.switch": Setting(1)})
        with SwitchFile(path) as file:
            asked = file.status().request
        switches.want({path.name: Setting(2)})
        assert switches.statuses()[0].request == asked
        # AND it comes into force
        for _ in range(asked.round):
            for rank in ranks:
                rank.begin(step=5)
        assert switches.statuses()[0].value == 2
        # AND the ranks' next start has a file of its own
        again = make_switch(tmp_path, (0, 1))
        assert [one.name for one in switches.statuses()] == [again.name]


def made_by_another(rings, *groups):
    """The files of groups whose first rank is another process, which is gone by now; each with its microbatches."""
    child = os.fork()
    if child == 0:
        for ranks, microbatches in groups:
            make_switch(rings, ranks, microbatches)
        os._exit(0)
    os.waitpid(child, 0)


def test_groups_that_begin_with_the_same_rank_do_not_hide_one_another(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN pipelines of two stages, in two copies, whose ranks join both kinds of groups
        mesh = {(0, 1): 4, (2, 3): 4, (0, 2): 0, (1, 3): 0}
        paths = {ranks: make_switch(tmp_path, ranks, microbatches) for ranks, microbatches in mesh.items()}
        assert len(set(paths.values())) == 4
        # THEN all are found, each with a status of its own
        found = {one.ranks: one for one in switches.statuses()}
        assert {ranks: one.microbatches for ranks, one in found.items()} == mesh
        # WHEN something is wanted of one of those that a rank is the first of THEN it alone is asked
        switches.want({found[0, 2].name: Setting(2), found[0, 1].name: Setting()})
        assert {one.ranks: one.request.value for one in switches.statuses()} == dict.fromkeys(mesh, 0) | {(0, 2): 2}
        # WHEN ranks join one of them again THEN the new one is in its place, and the others are as they were
        again = make_switch(tmp_path, (0, 1), 4)
        assert {one.name for one in switches.statuses()} == {again.name, *(one.name for one in found.values())} - {
            found[0, 1].name
        }


def test_groups_of_ranks_that_have_ended_are_not_told_of_and_those_in_their_place_are(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN groups of a first rank that has ended, one of which is there no more
        made_by_another(tmp_path, ((0, 1), 4), ((0, 2), 0), ((0, 2), 0))
        assert switches.statuses() == []
        # WHEN it begins anew and joins THEN it is found, under whatever name
        first = make_switch(tmp_path, (0, 2))
        assert first.name == "rank-0.0.switch"
        assert [one.ranks for one in switches.statuses()] == [(0, 2)]


def test_a_file_in_the_place_of_one_that_was_open_is_found(tmp_path):
    # GIVEN a group that was seen while its first rank was there, as far as was known
    alive = True
    with closing(Switches(tmp_path, lambda *_: alive)) as switches:
        made_by_another(tmp_path, ((0, 1), 0))
        (before,) = switches.statuses()
        # WHEN the ranks begin anew between two looks, so that another file has the name of the first
        alive = False
        path = make_switch(tmp_path, (0, 1, 2))
        assert path.name == before.name
        switches.statuses()
        # THEN it is told of, once it is seen that the first rank's process is another one
        assert [one.ranks for one in switches.statuses()] == [(0, 1, 2)]
