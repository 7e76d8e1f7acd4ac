"""Notebook widgets that watch and steer a run: they read its folder and append requests, and hold no trainer.

`Dashboard(run)` shows everything; `RunControls(run)`, `RewardMixer(run)`, `MetricPlots(run, "reward/*")` and
`RolloutBrowser(run)` are its panels, each in a cell of its own. `run` is a `Run` or the path of a run folder.
"""

import logging

from rlkit_widgets.dashboard import Dashboard
from rlkit_widgets.model import RunWidget
from rlkit_widgets.panels import MetricPlots, RewardMixer, RolloutBrowser, RunControls

__all__ = ["Dashboard", "MetricPlots", "RewardMixer", "RolloutBrowser", "RunControls", "RunWidget"]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the feed's warnings must not be printed into a cell
