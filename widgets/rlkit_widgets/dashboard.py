"""Everything about a run in one cell."""

from collections.abc import Sequence
from typing import Any

from rlkit_widgets.model import PANELS, RunWidget
from rlkit_widgets.sources import RunLike


class Dashboard(RunWidget):
    """Status and progress, controls, reward mixer, live plots and the latest rollouts of a run.

    Works while the run goes on, after the kernel was restarted, and on runs that have ended. Re-running its cell
    replaces it; closing it never stops the run.

    Args:
        run: a `Run`, or the path of a run folder.
        patterns: metrics to plot, as in `MetricPlots`; None for all.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.

    Example:
        run = trainer.start("runs/exp")
        Dashboard(run)
    """

    def __init__(self, run: RunLike, *, patterns: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(run, panels=PANELS, patterns=patterns, **kwargs)
