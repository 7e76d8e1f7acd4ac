"""What makes a trainer something that can be run: its state, its description, and the ways to let it go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlkit.config import TrainerConfig
from rlkit.dataflow import Dataflow
from rlkit.errors import RunError
from rlkit.runs.protocol import StepResult
from rlkit.trainers.learner import Learner
from rlkit.trainers.state import (
    frozen_state_of,
    load_frozen_state,
    load_state,
    release_memory,
    state_of,
    take_memory,
)

if TYPE_CHECKING:
    from rlkit.runs.handle import Run


PACKAGES = ("rlkit-lab", "torch", "transformers", "tensordict", "peft")


class Stateful(Protocol):
    """A part of a trainer that training changes."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Runnable(ABC):
    """The part of a trainer that a run folder and its driver deal with (`rlkit.runs.protocol.Trainable`)."""

    algorithm: ClassVar[str]
    config: TrainerConfig
    dataflow: Dataflow
    learner: Learner
    global_step: int

    def __init__(self) -> None:
        self._owner: str | None = None

    @abstractmethod
    def step(self) -> StepResult:
        """One optimizer iteration."""

    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """What keeps state beside the controllers, by its key in `state_dict`."""

    def let_go(self) -> None:  # noqa: B027 - a hook
        """Ends processes and threads of the trainer's parts; they start anew when they are needed."""

    def settle(self) -> None:  # noqa: B027 - a hook
        """Makes the dataflow that of the step the trainer stands at."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Live settings and the values in force."""

    @abstractmethod
    def setting_specs(self) -> dict[str, dict[str, Any]]:
        """For each live setting its type, bounds and description."""

    @abstractmethod
    def set(self, **changes: Any) -> None:
        """Changes live settings; all of them or none."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that training changes; leaves are tensors or plain values."""
        self.require_own_state()
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; missing or unknown keys raise."""
        load_state(self, state)

    def frozen_state_dict(self) -> dict[str, Any]:
        """Weights that never change (reference, reward models, the base of an adapter), by controller."""
        return frozen_state_of(self)

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `frozen_state_dict` gave; missing or unknown keys raise."""
        load_frozen_state(self, state)

    def describe(self) -> dict[str, Any]:
        """What was asked for, as plain values, for the run folder."""
        return {
            "algorithm": self.algorithm,
            "config": self.config.to_dict(),
            "setting_specs": self.setting_specs(),
            "controllers": {c.name: {"role": c.role, "device": str(c.device)} for c in self.dataflow.controllers},
            "versions": {name: version for name in PACKAGES if (version := _version(name))},
        }

    def train(
        self,
        steps: int | None = None,
        dir: str | None = None,
        *,
        progress: bool = True,
        track_metrics: Sequence[str] = (),
    ) -> Run:
        """Trains in the foreground: this cell is busy until it ends.

        An interrupt finishes or abandons the step at a safe point, writes a checkpoint and returns; training goes on
        where it stopped when `train` is called again.

        Args:
            steps: steps to take; None takes `total_steps`.
            dir: run folder; None makes one under `runs/`.
            progress: show a progress bar.
            track_metrics: further places for metrics: "tensorboard", "csv".
        """
        from rlkit.runs.foreground import train_here

        self.require_own_state()
        return train_here(
            self,
            steps or self.config.total_steps,
            dir,
            progress=progress,
            track_metrics=track_metrics,
            checkpoint_config=self.config.checkpoint_config.to_dict(),
        )

    def start(
        self, dir: str, steps: int | None = None, *, track_metrics: Sequence[str] = (), replace: bool = False
    ) -> Run:
        """Starts a background run that owns the state from now on, and goes on without this kernel.

        Args:
            dir: folder of the run; must not hold another one.
            steps: steps to take; None takes `total_steps`, or goes on until stopped.
            track_metrics: further places for metrics: "tensorboard", "csv".
            replace: if the folder holds an earlier run, stop it and keep it aside as `<dir>.1`, so that a cell that
                starts a run can be run again.

        Raises:
            RunError: the folder is taken, or the driver did not come up (the message holds the end of its log).
        """
        from rlkit.runs.archive import set_aside
        from rlkit.runs.launch import launch

        self.require_own_state()
        if replace:
            set_aside(dir)
        run = launch(self, dir, steps or self.config.total_steps, track_metrics=track_metrics)
        self.release(str(run.dir))
        return run

    def release(self, owner: str) -> None:
        """Gives up device memory and processes; `owner`, the folder of a run, owns the state from now on."""
        self.let_go()
        release_memory(self)
        self._owner = owner

    def reclaim(self, state: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
        """Takes the state back from a run."""
        take_memory(self)
        load_frozen_state(self, frozen)
        load_state(self, state)
        self._owner = None

    def close(self) -> None:
        """Frees the memory of the models and ends processes; the trainer cannot be used afterwards."""
        if self._owner is None:
            self.let_go()
            release_memory(self)
        self._owner = "a closed trainer"

    def dataflow_json(self) -> dict[str, Any]:
        """The graph as plain values, for the run folder."""
        return self.dataflow.to_json()

    def require_own_state(self) -> None:
        """Raises RunError where a run owns this trainer's state."""
        if self._owner is not None:
            raise RunError(
                f"the run in {self._owner} owns this trainer's weights; stop it and call run.load() to bring them "
                f"back (rlkit.attach({self._owner!r}).load() in another kernel)"
            )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
