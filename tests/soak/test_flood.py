"""A hundred thousand messages of garbage and lies at a job on many hosts. SOAK_FLOOD says how many instead."""

import os

import pytest

from tests.integration.hubs import Hosts
from tests.integration.test_hub_hostile import flooded

FLOOD = int(os.environ.get("SOAK_FLOOD", "100000"))

pytestmark = pytest.mark.timeout(600 + FLOOD // 100)


def test_a_long_flood_is_dropped_and_counted_and_the_job_is_judged_on(tmp_path, environment):
    flooded(Hosts(tmp_path, environment), FLOOD)
