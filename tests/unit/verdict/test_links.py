"""Which link between hosts is slow, by the rates of all of them: a truth table, and what holds for any rates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.verdicts import Settings
from sftriage.model.windows import LinkUse
from sftriage.policy.state import Losses
from sftriage.testing import SyntheticJob
from sftriage.verdict.judging import judge
from sftriage.verdict.links import best_rates, bulk_links, slow_link
from sftriage.words.verdicts import link_phrase, verdict_sentence

SETTINGS = Settings()
STEP_S, EXCHANGE_S = 0.1, 0.06
FAST, SLOW = 8e9, 200e6


def uses(host, peer, bits_per_s, busy, n=6, **about):
    """A link's readings, one a second, in each of which it is busy for a part of the time."""
    about = {"delivered_bits_per_s": bits_per_s, "at_rest": False} | about
    return tuple(
        LinkUse(host, f"of {host}", peer, at * 10**9, (at + 1) * 10**9, int(bits_per_s * busy / 8), busy, **about)
        for at in range(n)
    )


HEALTHY = uses("a", "b", FAST, 0.1) + uses("b", "c", FAST / 2, 0.1) + uses("c", "a", FAST, 0.1)
SENDS = uses("b", "c", SLOW, 0.9) + uses("a", "b", 2 * SLOW, 0.5, delivered_bits_per_s=FAST) + uses("c", "a", FAST, 0.1)
RECEIVES = uses("a", "b", SLOW, 0.9) + uses("b", "c", 2 * SLOW, 0.5) + uses("c", "a", FAST, 0.1)
SHORT_QUEUE = uses("b", "c", SLOW, 0.9) + uses("a", "b", FAST, 0.1) + uses("c", "a", FAST, 0.1)
STARVED = tuple(replace(use, delivered_bits_per_s=FAST) for use in SENDS)
UNKNOWN = tuple(replace(use, at_rest=True) for use in STARVED)
AT_REST = SENDS[:3] + tuple(replace(use, delivered_bits_per_s=FAST, at_rest=True) for use in SENDS[3:6]) + SENDS[6:]
TO_ALL = (("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b"))
MESH_SENDS, MESH_RECEIVES = (
    sum((uses(*pair, SLOW / 2, 0.8) if pair[at] == "c" else uses(*pair, FAST, 0.01) for pair in TO_ALL), ())
    for at in (0, 1)
)
PORTS = sum((uses(host, "", 25e9 if host == "c" else 100e9, 0.8) for host in "abc"), ())
ONE_WAY = uses("a", "b", SLOW, 0.9) + uses("b", "a", FAST, 0.1)
BOTH_WAYS = uses("a", "b", SLOW, 0.9) + uses("b", "a", SLOW, 0.9)
ON_10G = tuple(replace(use, speed_bits_per_s=10e9) for use in BOTH_WAYS)
FAST_BEFORE = {("a", "b"): FAST, ("b", "a"): FAST}
STORE = uses("a", "b", 1e6, 0.9)


@pytest.mark.parametrize(
    ("sent", "best", "expected"),
    [
        (HEALTHY, {}, None),
        (SENDS, {}, ("b", "", "send", "peers")),
        (RECEIVES, {}, ("b", "", "receive", "peers")),
        (SHORT_QUEUE, {}, ("b", "c", "send", "peers")),
        (STARVED, {}, None),
        (UNKNOWN, {}, None),
        (AT_REST, {}, ("b", "", "send", "peers")),
        (MESH_SENDS, {}, ("c", "", "send", "peers")),
        (MESH_RECEIVES, {}, ("c", "", "receive", "peers")),
        (PORTS, {}, ("c", "", "both", "peers")),
        (HEALTHY + STORE[:5], {}, None),
        (ONE_WAY, {}, ("a", "b", "send", "reverse")),
        (BOTH_WAYS, {}, None),
        (BOTH_WAYS, FAST_BEFORE, ("a", "b", "both", "before")),
        (ON_10G, {}, ("a", "b", "both", "interface")),
        (SENDS[:2] + SENDS[6:8] + SENDS[12:14], {}, None),
        ((), {}, None),
    ],
    ids=[
        "healthy",
        "a host sends slowly, and its acknowledgements wait",
        "a host receives slowly",
        "only one link is slow",
        "the path takes more, but the hosts wait for CPUs",
        "what the path takes is not known",
        "small messages passed in one piece in half of the readings",
        "all to all, and a host sends slowly",
        "all to all, and a host receives slowly",
        "an RDMA port at a quarter of the rate",
        "little is sent to a store",
        "two hosts, one direction",
        "two hosts, nothing to compare with",
        "two hosts, faster before",
        "two hosts, far below their interface",
        "too few readings",
        "no readings",
    ],
)
def test_the_slow_link_is_named_with_its_host_where_that_shows(sent, best, expected):
    # GIVEN what the hosts sent WHEN links are compared THEN the slow one is named, as far as its side shows
    found = slow_link(sent, STEP_S, EXCHANGE_S, best, SETTINGS)
    assert (found and (found.host, found.peer, found.direction, found.against)) == expected


@pytest.mark.parametrize(
    ("step_s", "exchange_s", "split", "cost_s"),
    [
        (0.1, 0.06, True, 0.06 * (1 - SLOW / FAST)),
        (0.1, 0.003, True, None),
        (0.1, 0.2, False, 0.09 * (1 - SLOW / FAST)),
        (0.1, 0.2, True, None),
    ],
    ids=["bounded by the exchange", "hidden by compute", "bounded by its own time", "idle for most of the exchange"],
)
def test_a_slow_link_costs_what_the_exchange_waits_for_it(step_s, exchange_s, split, cost_s):
    # GIVEN a link that is busy for 90 % of the time WHEN the exchange takes a part of the step THEN it costs that
    found = slow_link(SENDS, step_s, exchange_s, {}, SETTINGS, split=split)
    assert (found and found.cost_s) == (cost_s and pytest.approx(cost_s, rel=0.03))


def test_a_rate_of_several_links_is_what_the_interface_carries():
    # GIVEN a host that sends to two others at once, at half of its rate each
    found = slow_link(MESH_SENDS, STEP_S, EXCHANGE_S, {}, SETTINGS)
    # THEN its rate is that of both together
    assert found.bits_per_s == pytest.approx(SLOW)


@given(st.permutations(range(18)), st.floats(0.1, 10.0))
def test_neither_the_order_of_readings_nor_a_faster_clock_changes_the_name(order, factor):
    # GIVEN readings in any order, of machines that are all faster or slower
    sent = [replace(SENDS[at], sent_bytes=int(SENDS[at].sent_bytes * factor)) for at in order]
    sent = [replace(use, delivered_bits_per_s=use.delivered_bits_per_s * factor) for use in sent]
    # THEN the same link is named
    assert slow_link(sent, STEP_S, EXCHANGE_S, {}, SETTINGS).host == "b"


def test_the_best_rates_are_kept_while_nothing_is_sent():
    # GIVEN rates of two windows, and a window without readings THEN the best of each link stays
    best = best_rates(uses("a", "b", SLOW, 0.5), best_rates(HEALTHY, {}))
    assert best_rates((), best)["a", "b"] == FAST
    assert {link.pair for link in bulk_links(HEALTHY)} == set(best)


JOB = SyntheticJob(6, 50, exchange_s=0.06, hosts=tuple("aabbcc"))


def test_a_window_with_a_slow_link_is_held_for_it_and_names_no_rank():
    # GIVEN a job whose exchange takes most of the step, and what its hosts sent
    window = JOB.run()
    # WHEN it is judged with healthy links THEN none is named
    verdict, past = judge(replace(window, links=HEALTHY), None, SETTINGS)
    assert verdict.link is None
    assert past.best_rates["a", "b"] == FAST
    # WHEN a link is slow in one window THEN it may be chance
    verdict, past = judge(replace(window, links=SENDS, first_step=50), past, SETTINGS)
    assert verdict.link is None
    # WHEN it is slow in the next one too THEN that is held for the link
    verdict, _ = judge(replace(window, links=SENDS, first_step=100), past, SETTINGS)
    assert (verdict.label, verdict.reasons, verdict.named) == ("needs_evidence", ("slow_link",), None)
    assert verdict.link.host == "b"
    assert link_phrase(verdict.link) in verdict_sentence(verdict)
    # AND its steps are charged to it, once each
    losses = Losses().after(verdict).after(verdict)
    (loss,) = losses.largest
    assert (loss.who, loss.where, loss.steps) == ("the link of b", "backward", len(window.durations_NRS))
    assert losses.lost_s == pytest.approx(loss.steps * verdict.link.cost_s)
    # AND ranks that are missing leave it undecided
    window.durations_NRS[::2, 3] = np.nan
    verdict, _ = judge(replace(window, links=SENDS), None, SETTINGS)
    assert (verdict.reasons, verdict.link) == (("low_coverage",), None)
