"""The policies of a job: found, read, combined, and watched while the job runs.

A `PolicySet` has all rules of its policies, in the order of the files, under the strictest of each limit. A valid
change of a watched file takes effect; an invalid one is reported and changes nothing. Files are compared by content,
which detects edits, replaced files, and the symbolic links that Kubernetes switches when a ConfigMap changes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from sftriage.errors import UsageError
from sftriage.model.events import NamedPolicy, PolicyChanged
from sftriage.model.verdicts import Suspect
from sftriage.policy.fields import AT_ONCE, CONTENTION, Lasting
from sftriage.policy.parsing import MAX_FILE_BYTES, LoadedPolicy, Location, PolicyError, Problem, parse, path_text
from sftriage.policy.schema import Detection, Limits, Mitigate, Rule, Spec
from sftriage.traces.disk import Do, at_once

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

_PACKAGE = Path(__file__).resolve().parent.parent


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file at a path, or of a shipped policy of that name; raises UsageError if there is neither."""
    path, name, policies = Path(name_or_path), os.fspath(name_or_path), shipped()
    if path.exists() and not path.is_dir():
        return path
    if name in policies:
        return policies[name]
    raise UsageError(f"no policy {name!r}: not a file, and not shipped (shipped: {', '.join(policies) or 'none'})")


def shipped(name: str = "policies", source: str = "policies") -> dict[str, Path]:
    """The files in a folder that ships with sftriage (its policies), by name; ``source`` is that of a checkout."""
    directory, checkout = _PACKAGE / name, _PACKAGE.parent
    # In a checkout they are beside the package. In site-packages, a folder of that name would be another project's.
    if not directory.is_dir() and (checkout / "pyproject.toml").is_file():
        directory = checkout / source
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def read(source: str) -> bytes:
    """The bytes of a policy file, at most one more than allowed; raises PolicyError if it cannot be read."""
    try:
        if not stat.S_ISREG(Path(source).stat().st_mode):
            raise PolicyError(source, [Problem(0, 0, "", "not a regular file")])
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyError(source, [Problem(0, 0, "", f"cannot read it: {error.strerror}")]) from None


def load(path: str | os.PathLike[str]) -> LoadedPolicy:
    """Load a policy file; raises PolicyError with every problem in it."""
    source = os.fspath(path)
    return parse(read(source), source)


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_S = 253_402_300_799.0
"""The last second of the year 9999, after which there are no dates."""


def next_open_s(found: CronTrigger, now_s: float) -> float | None:
    """When the window is next open: ``now_s`` if it is open now, None if it never opens again."""
    # By addition, because the C library's conversion has a narrower range.
    now = _EPOCH + timedelta(seconds=min(now_s, _LAST_S))
    opens: datetime | None = found.get_next_fire_time(None, now.replace(second=0, microsecond=0))
    if opens is None:
        return None
    return max(now_s, (opens - _EPOCH).total_seconds())


_MOST_TURNS = 100
"""Maximum turns to find a time that several policies allow; after them there is none."""


@dataclass(frozen=True)
class PolicySet:
    """One or more policies that are in force together.

    All judge the same windows, so none may contradict the ``detection`` of the first. A rule that samples more ranks
    than another policy's limits allow samples as many as they do.
    Raises PolicyError with every conflict between them.
    """

    loaded: tuple[LoadedPolicy, ...]

    def __post_init__(self) -> None:
        if not self.loaded:
            raise ValueError("no policy")
        problems = list(_between(self.loaded))
        if problems:
            raise PolicyError(self.loaded[0].source, problems)

    @property
    def current(self) -> PolicySet:
        """Itself; for `PolicyFiles`, the policies now in force."""
        return self

    @property
    def detection(self) -> Detection:
        return self.loaded[0].policy.spec.detection

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for spec in self._specs for rule in spec.rules)

    @cached_property
    def lasting(self) -> Mapping[str, Lasting]:
        """How long suspects must last, for each rule that waits; all policies judge the same windows.

        Includes the wait for `CONTENTION`, which holds for every rule.
        """
        every = {rule.name: rule.lasts(self.detection) for rule in self.rules}
        waiting = {name: wanted for name, wanted in every.items() if wanted != AT_ONCE}
        return {**waiting, CONTENTION: self.detection.contended_for}

    @cached_property
    def limits(self) -> Limits:
        every = [spec.limits for spec in self._specs]
        return Limits(
            captures_per_hour=min(limits.captures_per_hour for limits in every),
            captures_per_day=min(limits.day_limit for limits in every),
            captures_per_run=min((each.captures_per_run for each in every if each.captures_per_run), default=None),
            concurrent_ranks=min(limits.concurrent_ranks for limits in every),
            overhead_budget=min(every, key=lambda limits: limits.overhead_fraction).overhead_budget,
        )

    @cached_property
    def mitigate(self) -> Mitigate | None:
        """The remedies allowed by all policies with ``mitigate``, under the strictest bounds."""
        every = [spec.mitigate for spec in self._specs if spec.mitigate is not None]
        if not every:
            return None
        return Mitigate(
            remedies=tuple(name for name in every[0].remedies if all(name in other.remedies for other in every)),
            min_saving=max(every, key=lambda mitigate: mitigate.min_saving_fraction).min_saving,
            steps=max(mitigate.steps for mitigate in every),
            cooldown=max(every, key=lambda mitigate: mitigate.cooldown_s).cooldown,
        )

    @property
    def retention_s(self) -> float | None:
        kept = (spec.retention.age_s for spec in self._specs if spec.retention is not None)
        return min(filter(None, kept), default=None)

    @property
    def retention_bytes(self) -> int | None:
        kept = (spec.retention.size_bytes for spec in self._specs if spec.retention is not None)
        return min(filter(None, kept), default=None)

    @property
    def gathers(self) -> frozenset[str]:
        return frozenset(evidence for spec in self._specs for evidence in spec.on_needs_evidence.gather)

    def owner(self, rule: str) -> LoadedPolicy:
        return next(entry for entry in self.loaded if any(own.name == rule for own in entry.policy.spec.rules))

    def about(self, label: str, suspect: Suspect) -> tuple[tuple[Rule, ...], Rule]:
        """The rules that match this suspect, whatever its gain, and the closest one of all rules."""
        misses = {rule.name: rule.misses(label, suspect) for rule in self.rules}
        nearest = min(self.rules, key=lambda rule: (*misses[rule.name], rule.min_share, rule.min_gain_s))
        return tuple(rule for rule in self.rules if not any(misses[rule.name])), nearest

    def opens_s(self, now_s: float) -> float | None:
        """When captures are next allowed: ``now_s`` if they are now, None if they never will be."""
        time_s = now_s
        for _ in range(_MOST_TURNS):
            before_s = time_s
            for window in self._windows:
                opens_s = next_open_s(window, time_s)
                if opens_s is None:
                    return None
                time_s = opens_s
            if time_s == before_s:
                return time_s
        return None

    @property
    def _specs(self) -> list[Spec]:
        return [entry.policy.spec for entry in self.loaded]

    @cached_property
    def _windows(self) -> tuple[CronTrigger, ...]:
        return tuple(spec.active.trigger for spec in self._specs if spec.active.trigger is not None)


def load_set(names: Iterable[str | os.PathLike[str]]) -> PolicySet:
    """The policies of several files, or of names that ship with sftriage, in force together.

    Raises UsageError if one is neither a file nor a name, and PolicyError with every problem in all of them.
    """
    loaded, problems = [], []
    for path in [find(name) for name in names]:
        try:
            loaded.append(load(path))
        except PolicyError as error:
            problems += [replace(problem, source=error.source) for problem in error.problems]
    if problems:
        raise PolicyError(problems[0].source, problems)
    return PolicySet(tuple(loaded))


def _between(loaded: tuple[LoadedPolicy, ...]) -> Iterator[Problem]:
    first = loaded[0]
    first_of: dict[str, tuple[LoadedPolicy, Location]] = {}
    for entry in loaded:
        mine, theirs = entry.policy.spec.detection, first.policy.spec.detection
        # Only what a policy sets can conflict.
        for name in sorted(mine.model_fields_set):
            value, other = getattr(mine, name), getattr(theirs, name)
            if value != other:
                message = f"{value}, but {other} in {first.source}; all policies of a job must judge the same windows"
                yield entry.problem(("spec", "detection", name), message)
        for index, rule in enumerate(entry.policy.spec.rules):
            where: Location = ("spec", "rules", index)
            known, at = first_of.setdefault(rule.name, (entry, where))
            if known is not entry:
                message = f"a second rule named {rule.name!r}; the first is {path_text(at)} of {known.source}"
                yield entry.problem((*where, "name"), message)


SETTLED_S = 2.0
"""A file that changed this recently may be half written: its problems are reported at the second check."""


def change_lines(change: PolicyChanged) -> tuple[str, ...]:
    """A change of the policies, in lines for people."""
    name = ", ".join(policy.name for policy in change.policies)
    if change.kind == "refused":
        return (f"the changed policy is not valid; keeping {name} as it was", *change.problems)
    if change.kind == "restored":
        return (f"the policy file matches the policy in force again: {name}",)
    waiting = f"; {', '.join(change.later)} takes effect with the next run" if change.later else ""
    return (f"the policy has changed; now in force: {name}{waiting}",)


_CUTS = ("window_steps", "stride_steps", "warmup_steps")
"""How windows are cut is fixed when a run begins: changes of these take effect with the next run."""


class PolicyFiles:
    """Watches policy files, in order; a directory stands for all ``*.yaml`` in it, by name.

    ``now`` returns seconds since the epoch, on the clock of the files' times. ``do`` runs later reads of the files, so
    that a slow disk delays nothing. Raises PolicyError if one of them is invalid, or conflicts with another, and
    UsageError if one is missing.
    """

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.time) -> None:
        # Absolute, so that a deleted file is never mistaken for the name of a shipped policy.
        self._paths = tuple(path.absolute() for path in paths)
        self._now = now
        self._good = self._considered = self._contents()
        self._doubted: tuple[str, ...] | None = None
        self.current = _load(self._files())
        self._begun = self.current.detection
        self._found: deque[PolicyChanged] = deque()
        self.do: Do = at_once

    def poll(self, now_s: float = 0.0) -> PolicyChanged | None:
        """Check whether the files have changed; return the change of the policies by ``now_s``, or None.

        Each invalid content is reported once.
        """
        self.do(self._look, "policies", latest=True)
        return msgspec.structs.replace(self._found.popleft(), time_s=now_s) if self._found else None

    def _look(self) -> None:
        contents = self._contents()
        if contents == self._considered:
            return
        try:
            policies = _load(self._files())
        except (PolicyError, UsageError) as error:
            changed_s = max(map(_changed_s, self._files()), default=0.0)
            if contents != self._doubted and self._now() - changed_s <= SETTLED_S:
                # Perhaps only half written: refuse it if it is still the same at the next check.
                self._doubted = contents
                return
            self._considered = contents
            self._note("refused", problems=str(error).splitlines())
            return
        restored = contents == self._good
        self._doubted, self._considered, self._good = None, contents, contents
        if restored:
            self._note("restored")
            return
        self.current = policies
        others = [name for name in _CUTS if getattr(self._begun, name) != getattr(policies.detection, name)]
        self._note("changed", later=[f"detection.{name}" for name in others])

    def _note(
        self, kind: Literal["changed", "refused", "restored"], problems: Sequence[str] = (), later: Sequence[str] = ()
    ) -> None:
        # (with the whole new policy, since no other file may keep it)
        policies = tuple(
            NamedPolicy(entry.policy.metadata.name, entry.sha256, entry.policy.filled() if kind == "changed" else None)
            for entry in self.current.loaded
        )
        self._found.append(
            PolicyChanged(time_s=0.0, kind=kind, policies=policies, problems=tuple(problems), later=tuple(later))
        )

    def _contents(self) -> tuple[str, ...]:
        return tuple(_content(path) for path in self._files())

    def _files(self) -> tuple[Path, ...]:
        return tuple(chain.from_iterable(map(files_of, self._paths)))


def files_of(path: Path) -> list[Path]:
    """A policy's file; for a directory the files in it, or if there are none the directory itself."""
    return (sorted(path.glob("*.yaml")) or [path]) if path.is_dir() else [path]


def _load(paths: Sequence[Path]) -> PolicySet:
    gone = [path for path in paths if not path.exists()]
    if empty := next(filter(Path.is_dir, paths), None):
        raise PolicyError(str(empty), [Problem(0, 0, "", "no policy (*.yaml) in this directory", str(empty))])
    if gone:
        raise PolicyError(str(gone[0]), [Problem(0, 0, "", "no such file", str(path)) for path in gone])
    return load_set(paths)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(read(str(path))).hexdigest()
    except PolicyError as error:
        return str(error)
