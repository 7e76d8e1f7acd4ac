"""The panels of the dashboard, each on its own in a cell."""

from threading import get_ident
from typing import Any

import traitlets as t

from rlkit_widgets.model import RunWidget
from rlkit_widgets.sources import RunLike
from rlkit_widgets.state import Changes, Json, RunState


class RunControls(RunWidget):
    """Status, progress and the run's controls: pause, resume, step, stop, checkpoint, and its live settings.

    Args:
        run: a `Run`, or the path of a run folder.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.
    """

    def __init__(self, run: RunLike, **kwargs: Any) -> None:
        super().__init__(run, panels=("status", "controls"), patterns=(), **kwargs)


class RewardMixer(RunWidget):
    """One slider and number per reward term. A change is pending until the run applies it at a step boundary.

    `value` holds the weights in force, {term: weight}. Setting it asks the run for the new weights; it follows the
    run again once the request is answered (so after a refusal the old weights are back).

    Args:
        run: a `Run`, or the path of a run folder.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.
    """

    value = t.Dict(key_trait=t.Unicode(), value_trait=t.Float(), help="weights in force, {term: weight}")

    def __init__(self, run: RunLike, **kwargs: Any) -> None:
        self._following_thread: int | None = None
        super().__init__(run, panels=("mixer",), patterns=("reward/*",), **kwargs)

    def adopt(self, state: RunState, changes: Changes) -> None:
        super().adopt(state, changes)
        refused = any(note["status"] == "refused" for note in changes.requests)
        if changes.settings or refused:
            self._follow(state.settings)

    def _follow(self, settings: Json) -> None:
        self._following_thread = get_ident()
        try:
            self.value = {str(term): float(weight) for term, weight in (settings.get("reward_weights") or {}).items()}
        finally:
            self._following_thread = None

    @t.observe("value")
    def _value_set(self, change: Json) -> None:
        if self._following_thread != get_ident():
            self._ask("set", {"reward_weights": dict(change["new"])})


class MetricPlots(RunWidget):
    """Live strips of the run's metrics, grouped by area. New names appear by themselves.

    Args:
        run: a `Run`, or the path of a run folder.
        *patterns: which metrics: whole names or shell patterns ("reward/*"), or one word of a name ("kl"). None: all.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.
    """

    def __init__(self, run: RunLike, *patterns: str, **kwargs: Any) -> None:
        super().__init__(run, panels=("plots",), patterns=patterns or None, **kwargs)


class RolloutBrowser(RunWidget):
    """The run's rollouts, step by step: texts, every reward term, length and finish reason.

    Args:
        run: a `Run`, or the path of a run folder.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.
    """

    def __init__(self, run: RunLike, **kwargs: Any) -> None:
        super().__init__(run, panels=("rollouts",), patterns=(), **kwargs)
