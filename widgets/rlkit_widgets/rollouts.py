"""Rollouts of one step, cut to what a table shows."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import pandas as pd

from rlkit.errors import RunError
from rlkit_widgets.state import Json, RunState

ROWS_SHOWN = 32
PROMPT_SHOWN = 240
RESPONSE_SHOWN = 480
FULL_TEXT_SHOWN = 20_000
TERM_PREFIX = "reward/"


def rollouts_message(state: RunState, step: int | None) -> Json:
    """Rollouts of a step for the table; of the newest step when `step` is None.

    A step without rollouts is answered with the nearest earlier one that has some.
    """
    steps = state.rollout_steps
    message: Json = {"kind": "rollouts", "step": None, "previous": None, "next": None, "latest": None, "rows": []}
    if not steps:
        return message
    shown = steps[-1] if step is None else steps[max(0, bisect_right(steps, step) - 1)]
    message |= {"step": shown, "latest": steps[-1], "previous": _before(steps, shown), "next": _after(steps, shown)}
    frame = _read(state, shown)
    if frame is None:
        return message | {"error": f"the rollouts of step {shown} are no longer in the run folder"}
    terms = [str(column) for column in frame.columns if str(column).startswith(TERM_PREFIX)]
    message["total"] = len(frame)
    message["terms"] = [term.removeprefix(TERM_PREFIX) for term in terms]
    message["rows"] = [_row(frame.iloc[place], place, terms) for place in range(min(len(frame), ROWS_SHOWN))]
    return message


def rollout_message(state: RunState, step: int, place: int) -> Json:
    """Prompt and response of one rollout in full. `place` counts the rows of that step's table from 0."""
    frame = _read(state, step)
    if frame is None or not 0 <= place < len(frame):
        return {"kind": "rollout", "step": step, "place": place, "error": "this rollout is no longer in the run folder"}
    row = frame.iloc[place]
    return {
        "kind": "rollout",
        "step": step,
        "place": place,
        "prompt": _cut(row.get("prompt"), FULL_TEXT_SHOWN),
        "response": _cut(row.get("response"), FULL_TEXT_SHOWN),
    }


def _row(row: "pd.Series[Any]", place: int, terms: Sequence[str]) -> Json:
    prompt, response = str(row.get("prompt") or ""), str(row.get("response") or "")
    return {
        "place": place,
        "prompt": _cut(prompt, PROMPT_SHOWN),
        "response": _cut(response, RESPONSE_SHOWN),
        "cut": len(prompt) > PROMPT_SHOWN or len(response) > RESPONSE_SHOWN,
        "terms": [_number(row[term]) for term in terms],
        "reward": _number(row.get("reward")),
        "length": _number(row.get("response_length")),
        "finish": str(row.get("finish_reason") or ""),
    }


def _read(state: RunState, step: int) -> pd.DataFrame | None:
    try:
        frame: pd.DataFrame = state.reader.rollouts(step)
    except (FileNotFoundError, RunError):
        return None
    return frame.reset_index(drop=True)


def _cut(text: object, limit: int) -> str:
    whole = str(text or "")
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


def _number(value: object) -> float | None:
    """A finite number rounded to what a cell shows, or None (an abstained term, a missing column)."""
    if value is None or not math.isfinite(number := float(value)):  # type: ignore[arg-type]
        return None
    return float(f"{number:.6g}")


def _before(steps: Sequence[int], step: int) -> int | None:
    place = bisect_left(steps, step)
    return steps[place - 1] if place > 0 else None


def _after(steps: Sequence[int], step: int) -> int | None:
    place = bisect_right(steps, step)
    return steps[place] if place < len(steps) else None
