"""rlkit: reinforcement-learning post-training of language models, from a notebook.

Importing this package loads none of torch, transformers, ray or vllm: a name is looked up where it is defined on its
first use. The static imports below exist for type-checkers and editors only. It does set OMP_WAIT_POLICY where it is
unset, see `rlkit.env.let_threads_sleep`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlkit.env import let_threads_sleep
from rlkit.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DataflowError,
    GenerationError,
    ModelError,
    PlacementError,
    RequestRefused,
    RewardError,
    RlkitError,
    RunError,
)

if TYPE_CHECKING:
    import rlkit_widgets as widgets
    from rlkit import presets, utils
    from rlkit.batch import DataCollector, Field, RolloutBatch
    from rlkit.config import TrainerConfig
    from rlkit.controllers.actor import ActorController
    from rlkit.controllers.base import Controller
    from rlkit.controllers.critic import CriticController
    from rlkit.controllers.reference import ReferenceController
    from rlkit.controllers.reward import RewardController
    from rlkit.curriculum import Curriculum, Ramp, Reaches, Stage, Steps
    from rlkit.data.pairs import PreferenceBatch
    from rlkit.data.tasks import graded_tasks
    from rlkit.dataflow import Dataflow
    from rlkit.device_map import DeviceMap
    from rlkit.metrics.tracker import MetricsTracker
    from rlkit.pipeline import Pipeline
    from rlkit.reward_lint import lint_rewards
    from rlkit.runs.handle import Run, attach, list_runs
    from rlkit.trainers.dpo import DPOTrainer
    from rlkit.trainers.from_names import RLTrainer
    from rlkit.trainers.grpo import GRPOTrainer
    from rlkit.trainers.hybrid import HybridTrainer
    from rlkit.trainers.online_dpo import OnlineDPOTrainer
    from rlkit.trainers.ppo import PPOTrainer
    from rlkit_widgets import Dashboard, MetricPlots, RewardMixer, RolloutBrowser, RunControls

let_threads_sleep()

__version__ = "0.1.0"

__all__ = [
    "ActorController",
    "CheckpointError",
    "ConfigError",
    "Controller",
    "CriticController",
    "Curriculum",
    "DPOTrainer",
    "Dashboard",
    "DataCollector",
    "DataError",
    "Dataflow",
    "DataflowError",
    "DeviceMap",
    "Field",
    "GRPOTrainer",
    "GenerationError",
    "HybridTrainer",
    "MetricPlots",
    "MetricsTracker",
    "ModelError",
    "OnlineDPOTrainer",
    "PPOTrainer",
    "Pipeline",
    "PlacementError",
    "PreferenceBatch",
    "RLTrainer",
    "Ramp",
    "Reaches",
    "ReferenceController",
    "RequestRefused",
    "RewardController",
    "RewardError",
    "RewardMixer",
    "RlkitError",
    "RolloutBatch",
    "RolloutBrowser",
    "Run",
    "RunControls",
    "RunError",
    "Stage",
    "Steps",
    "TrainerConfig",
    "__version__",
    "attach",
    "graded_tasks",
    "lint_rewards",
    "list_runs",
    "presets",
    "utils",
    "widgets",
]

_DEFINED_IN = {
    "ActorController": "rlkit.controllers.actor",
    "Controller": "rlkit.controllers.base",
    "CriticController": "rlkit.controllers.critic",
    "Curriculum": "rlkit.curriculum",
    "DPOTrainer": "rlkit.trainers.dpo",
    "Dashboard": "rlkit_widgets",
    "DataCollector": "rlkit.batch",
    "Dataflow": "rlkit.dataflow",
    "DeviceMap": "rlkit.device_map",
    "Field": "rlkit.batch",
    "GRPOTrainer": "rlkit.trainers.grpo",
    "HybridTrainer": "rlkit.trainers.hybrid",
    "MetricPlots": "rlkit_widgets",
    "MetricsTracker": "rlkit.metrics.tracker",
    "OnlineDPOTrainer": "rlkit.trainers.online_dpo",
    "PPOTrainer": "rlkit.trainers.ppo",
    "Pipeline": "rlkit.pipeline",
    "PreferenceBatch": "rlkit.data.pairs",
    "RLTrainer": "rlkit.trainers.from_names",
    "Ramp": "rlkit.curriculum",
    "Reaches": "rlkit.curriculum",
    "ReferenceController": "rlkit.controllers.reference",
    "RewardController": "rlkit.controllers.reward",
    "RewardMixer": "rlkit_widgets",
    "RolloutBatch": "rlkit.batch",
    "RolloutBrowser": "rlkit_widgets",
    "Run": "rlkit.runs.handle",
    "RunControls": "rlkit_widgets",
    "Stage": "rlkit.curriculum",
    "Steps": "rlkit.curriculum",
    "TrainerConfig": "rlkit.config",
    "attach": "rlkit.runs.handle",
    "graded_tasks": "rlkit.data.tasks",
    "lint_rewards": "rlkit.reward_lint",
    "list_runs": "rlkit.runs.handle",
}
_MODULES = {"presets": "rlkit.presets", "utils": "rlkit.utils", "widgets": "rlkit_widgets"}
_NOTEBOOK_PACKAGES = ("anywidget", "ipywidgets", "traitlets", "IPython")


def __getattr__(name: str) -> Any:
    """Import a public name where it is defined and keep it; AttributeError for any other name."""
    module_name = _MODULES.get(name) or _DEFINED_IN.get(name)
    if module_name is None:
        raise AttributeError(f"module 'rlkit' has no attribute {name!r}")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in _NOTEBOOK_PACKAGES:
            raise ImportError(
                f"rlkit.{name} needs the package {error.name!r}, which comes with pip install 'rlkit-lab[notebook]'"
            ) from error
        raise
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
