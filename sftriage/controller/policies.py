"""Policy files, watched while a job runs: a valid change takes effect, an invalid one is reported and changes nothing.

What a file holds decides whether it has changed: that sees an edit, a file put in another's place, and the symbolic
links that Kubernetes turns when a ConfigMap changes.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from sftriage.errors import UsageError
from sftriage.model.events import NamedPolicy, PolicyChanged
from sftriage.policy.loading import PolicyError, PolicySet, Problem, load_set, read
from sftriage.traces.disk import Do, at_once

SETTLED_S = 2.0
"""A file that changed this recently may be half written: what is wrong with it is reported at the second look."""


def change_lines(change: PolicyChanged) -> tuple[str, ...]:
    """What became of the policies, in lines for people."""
    name = ", ".join(one.name for one in change.policies)
    if change.kind == "refused":
        return (f"the policy has changed and is not valid; going on under {name} as it was", *change.problems)
    if change.kind == "restored":
        return (f"the policy is again the one in force: {name}",)
    waiting = f"; {', '.join(change.later)} will take effect with another run" if change.later else ""
    return (f"the policy has changed: now under {name}{waiting}",)


_CUTS = ("window_steps", "stride_steps", "warmup_steps")
"""How windows are cut is settled when a run begins: these take effect with another run."""


class PolicyFiles:
    """The policies of some files, in order; a directory stands for all ``*.yaml`` in it, by name.

    ``now`` is the clock that dates files, in seconds of the epoch.

    Attributes:
        do: reads the files once they are in force, so that a slow disk delays nobody.

    Raises:
        PolicyError: one of them cannot be used, or not with the others.
        UsageError: one of them is not there.
    """

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.time) -> None:
        # Absolute, so that a file that goes is never taken for the name of a policy that ships.
        self._paths = tuple(path.absolute() for path in paths)
        self._now = now
        self._good = self._considered = self._contents()
        self._doubted: tuple[str, ...] | None = None
        self.current = _load(self._files())
        self._begun = self.current.detection
        self._found: deque[PolicyChanged] = deque()
        self.do: Do = at_once

    def poll(self, now_s: float = 0.0) -> PolicyChanged | None:
        """Look whether the files have changed; what has become of the policies by ``now_s``, if anything has.

        What is wrong is returned once for each content that is wrong.
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
                # Perhaps only half written: it is refused once it is there a second time.
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
        # (with the whole of what was taken over, for no other file may keep it)
        policies = tuple(
            NamedPolicy(one.policy.metadata.name, one.sha256, one.policy.filled() if kind == "changed" else None)
            for one in self.current.loaded
        )
        self._found.append(
            PolicyChanged(time_s=0.0, kind=kind, policies=policies, problems=tuple(problems), later=tuple(later))
        )

    def _contents(self) -> tuple[str, ...]:
        return tuple(_content(path) for path in self._files())

    def _files(self) -> tuple[Path, ...]:
        return tuple(chain.from_iterable(map(files_of, self._paths)))


def files_of(path: Path) -> list[Path]:
    """A policy's file; of a directory those in it, or where there are none the directory, which is no policy."""
    return (sorted(path.glob("*.yaml")) or [path]) if path.is_dir() else [path]


def _load(paths: Sequence[Path]) -> PolicySet:
    gone = [path for path in paths if not path.exists()]
    if empty := next(filter(Path.is_dir, paths), None):
        raise PolicyError(str(empty), [Problem(0, 0, "", "no policy (*.yaml) in this folder", str(empty))])
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
