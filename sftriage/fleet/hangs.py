"""Gathers what the hosts of a job know of their ranks while it hangs, for `NatsFleet`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from sftriage.fleet.hosts import Host, status_of_all
from sftriage.fleet.hub import Lease
from sftriage.fleet.wire import HangQuery, WireError, decode_evidence, encode
from sftriage.model.hangs import FACTS, RankEvidence
from sftriage.model.windows import JobStatus, RankStatus

PATIENCE_S = 5.0
"""How long the hosts may take: an agent waits for its ranks for `sftriage.agent.hangs.ANSWER_S`."""
FACTS_PATIENCE_S = 15.0
"""The same for facts: the drivers of GPUs take their time."""
UNANSWERED, UNKNOWN = "its host does not answer", "its host has no evidence of it"


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What a host has sent, by rank; ``problem`` is why ranks are missing."""

    ranks: Mapping[int, RankEvidence] = field(default_factory=dict)
    problem: str = UNKNOWN


def ranks_of(host: Host) -> dict[int, int]:
    """The pids of a host's ranks of the newest generation that have a status, by rank."""
    job, status = host.doing(), host.status
    if job is None or status is None:
        return {}
    rings = host.rings.get(status.attempt, {})
    return {rank: rings[rank].pid for rank in job.rank_R.tolist() if rank in rings}


def completed(
    job: JobStatus | None, owners: Mapping[int, tuple[str, int]], answers: Mapping[str, HostAnswer]
) -> tuple[RankEvidence, ...]:
    """The evidence of each rank of a job, once each.

    It is taken from the agent of a rank in ``owners`` alone; a rank without any has its last status.
    """
    found = []
    for status in () if job is None else job.ranks:
        agent, pid = owners.get(status.rank, ("", 0))
        answer = answers.get(agent, HostAnswer())
        evidence = answer.ranks.get(status.rank)
        if evidence is None:
            found.append(_unanswered(status, pid, answer.problem))
        else:
            found.append(replace(evidence, host=status.host, pid=pid))
    return tuple(found)


def _unanswered(status: RankStatus, pid: int, problem: str) -> RankEvidence:
    in_stage_s = max(0.0, status.stage_age_ns / 1e9)
    about = status.rank, status.host, pid, status.step, status.stage, in_stage_s, status.alive, status.closed
    return RankEvidence(*about, problem=problem)


class HangQueries:
    """The queries about one hang to all hosts of a job; a new token replaces them."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._subject: tuple[str, tuple[int, ...]] | None = None
        self._end_s = 0.0
        self._owners: dict[int, tuple[str, int]] = {}
        self._answers: dict[str, Future[HostAnswer]] = {}

    def poll(self, token: str, detail: Sequence[int], hosts: Mapping[str, Host]) -> tuple[RankEvidence, ...] | None:
        """See `Fleet.hang_evidence`."""
        if self._subject != (subject := (token, tuple(detail))):
            self._begin(token, detail, hosts)
            self._subject = subject
        if not all(answer.done() for answer in self._answers.values()) and time.monotonic() < self._end_s:
            return None
        answers = {agent: _result(answer) for agent, answer in self._answers.items()}
        self._subject = None
        return completed(status_of_all(hosts.values(), time.monotonic()), self._owners, answers)

    def _begin(self, token: str, detail: Sequence[int], hosts: Mapping[str, Host]) -> None:
        for answer in self._answers.values():
            answer.cancel()
        of_facts = token.startswith(FACTS)
        self._end_s = time.monotonic() + (FACTS_PATIENCE_S if of_facts else PATIENCE_S)
        here = {agent: ranks for agent, host in hosts.items() if (ranks := ranks_of(host))}
        self._owners = {rank: (agent, pid) for agent, ranks in here.items() for rank, pid in ranks.items()}
        of_each = {agent: tuple(rank for rank in detail if rank in ranks) for agent, ranks in here.items()}
        self._answers = {
            agent: self._lease.hub.later(self._query(agent, token, some))
            for agent, some in of_each.items()
            if some or not of_facts
        }

    async def _query(self, agent: str, token: str, detail: tuple[int, ...]) -> HostAnswer:
        found, part, n_parts = dict[int, RankEvidence](), 0, 1
        try:
            while part < n_parts:
                query, left_s = encode(HangQuery(token, detail, part)), self._end_s - time.monotonic()
                answer = await self._lease.hub.client.request(self._lease.places.query(agent), query, timeout=left_s)
                n_parts, some = decode_evidence(answer.data)
                found |= {evidence.rank: evidence for evidence in some}
                part += 1
        except WireError as error:
            return HostAnswer(found, f"the answer of its host cannot be read: {error}")
        except Exception:
            return HostAnswer(found, UNANSWERED)
        return HostAnswer(found)


def _result(answer: Future[HostAnswer]) -> HostAnswer:
    if answer.done():
        return answer.result()
    answer.cancel()
    return HostAnswer(problem=UNANSWERED)
