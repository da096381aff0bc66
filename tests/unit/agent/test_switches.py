"""The groups of a host that a remedy can be switched on: found, told how they stand, and asked once."""

from contextlib import closing

from sftriage.agent.switches import Switches
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
