"""A request as whoever made it sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, Self

from rlkit.errors import RequestRefused, RunError

if TYPE_CHECKING:
    from rlkit.runs.handle import Run

POLL_S = 0.05


class Request:
    """Something asked of a run. The driver answers it at the next step boundary."""

    def __init__(self, run: Run, id_: str, kind: str, args: dict[str, Any]) -> None:
        self.run, self.id, self.kind, self.args = run, id_, kind, args

    def _answer(self) -> dict[str, Any] | None:
        return self.run.reader.answer(self.id)

    @property
    def state(self) -> Literal["pending", "applied", "refused"]:
        """Whether it was answered yet, and how."""
        answer = self._answer()
        if answer is None:
            return "pending"
        return "applied" if answer.get("status") == "applied" else "refused"

    @property
    def step(self) -> int | None:
        """Steps completed when it was answered; the next step is the first to feel it. None while pending."""
        answer = self._answer()
        return None if answer is None else answer.get("step")

    @property
    def reason(self) -> str:
        """Why it was refused, or a remark; "" when there is none."""
        answer = self._answer() or {}
        return str(answer.get("reason", ""))

    def wait(self, timeout: float = 60) -> Self:
        """Wait for the answer; `timeout` in seconds.

        Raises:
            RequestRefused: with the driver's reason.
            RunError: no answer in time (the request stays pending), or the run ended without one.
        """
        deadline = time.monotonic() + timeout
        while (answer := self._answer()) is None:
            alive = self.run.alive
            if not alive and self._answer() is None:
                status = self.run.status
                raise RunError(
                    f"{self.kind} was not answered: the run is {status['state']} ({status.get('reason', '')})."
                )
            if time.monotonic() >= deadline:
                raise RunError(
                    f"{self.kind} was not answered within {timeout:g} s; it is still pending. The run answers between "
                    f"steps, and step {self.run.status.get('step', 0) + 1} is still going on."
                )
            time.sleep(POLL_S)
        if answer.get("status") != "applied":
            raise RequestRefused(answer.get("reason") or f"{self.kind} was refused")
        return self

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        state = self.state
        tail = "" if state == "pending" else f" at step {self.step}"
        reason = f": {self.reason}" if state == "refused" else ""
        return f"<{self.kind}({arguments}): {state}{tail}{reason}>"
