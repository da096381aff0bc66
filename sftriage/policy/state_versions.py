"""States that earlier versions have written, as JSON of the present version."""

from __future__ import annotations

from typing import Any

import pydantic_core


def upgraded(text: str | bytes) -> str | bytes:
    """The text of a state; one of version 1 or 2 as version 3. What is no state is left for others to refuse.

    Before version 3 a cooldown was a rule's own, whoever it was about. Under the rule's name alone it goes on, and
    holds for all of its suspects until it is over. How many windows in a row had shown a suspect is
    forgotten: it is counted in steps now, from the next window on.
    """
    try:
        values = pydantic_core.from_json(text)
    except ValueError:
        return text
    version = values.get("version") if isinstance(values, dict) else None
    if version not in (1, 2) or isinstance(version, bool):
        return text
    return pydantic_core.to_json(_third(values, version), inf_nan_mode="constants")


def _third(values: dict[str, Any], version: int) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in ("hour_s", "streak")}
    # Version 1 counted every capture as made, and knew nothing of the rest.
    asked = {"asked": values.get("captures", 0)} if version == 1 else {}
    return {**kept, "asked_s": values.get("hour_s", []), **asked, "version": 3}
