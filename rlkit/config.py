"""What a trainer can be told. Every field has one meaning, a default, and a docstring below it.

Shape letters: B rollouts a step, P prompts a step, G responses a prompt, so B = P * G.
Fields marked live can be changed while a run goes on (`run.set(lr=1e-6)`); the others are fixed at the start.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

from rlkit.errors import ConfigError


def _live(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A live-tunable field with its bounds: `low`/`high` inclusive, `above` exclusive."""
    return field(default=default, metadata={"live": True, "low": low, "high": high, "above": above})


def _fixed(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A field that cannot change once the trainer is built, with its bounds."""
    return field(default=default, metadata={"live": False, "low": low, "high": high, "above": above})


class _Checked:
    """Shared by the configuration classes: strict keys with the nearest name, types and bounds checked on building."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a configuration from a dictionary.

        Raises:
            ConfigError: a key is unknown (the nearest known name is suggested) or a value is out of range.
        """
        refuse_unknown(values, (f.name for f in dataclasses.fields(cls)), what=cls.__name__)  # type: ignore[arg-type]
        return cls(**values)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, spec.name, _coerce(type(self), spec, getattr(self, spec.name)))

    @classmethod
    def doc(cls, name: str) -> str:
        """The docstring of one field."""
        return _field_docs(cast(Hashable, cls))[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class CheckpointConfig(_Checked):
    """When checkpoints of a run are written and how many stay."""

    save_interval: int = _fixed(100, low=0)
    """Steps between two checkpoints of a run; 0 writes one only when the run stops or is asked to."""
    keep_last_k: int = _fixed(3, low=1)
    """Complete checkpoints that stay on disk; older ones go once a newer one is complete."""
    async_save: bool = _fixed(False)
    """Write in a background thread from a private copy of the state, so that training goes on meanwhile."""


@dataclass(frozen=True)
class TrainerConfig(_Checked):
    """Settings of a trainer. Unknown keys are refused with the nearest known name."""

    batch_size: int = _fixed(16, low=1)
    """B: rollouts sampled and learned from in one step (prompts a step times `group_size`)."""
    group_size: int = _fixed(1, low=1)
    """G: responses sampled for each prompt. GRPO needs at least 2; PPO usually takes 1."""
    minibatch_size: int | None = _fixed(None, low=1)
    """Rollouts in one optimizer update; None takes all B, so one update an epoch."""
    micro_batch_size: int | None = _fixed(None, low=1)
    """Rollouts in one forward and backward pass; bounds memory, never changes the result. None: a whole minibatch."""
    ppo_epochs: int = _fixed(1, low=1)
    """Passes over the rollouts of a step."""
    total_steps: int | None = _fixed(None, low=1)
    """Steps a run trains for when none are named; also the length of a decaying learning-rate schedule."""

    lr: float | None = _live(None, low=0.0)
    """Peak learning rate of the actor. None takes that of an optimizer the actor came with, else 1e-6."""
    critic_lr: float | None = _live(None, low=0.0)
    """Peak learning rate of the critic. None takes that of an optimizer the critic came with, else the actor's."""
    lr_schedule: Literal["constant", "linear", "cosine"] = _fixed("constant")
    """Shape of the learning rate after warm-up; linear and cosine fall to zero at `total_steps`."""
    warmup_steps: int = _fixed(0, low=0)
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = _fixed(0.0, low=0.0)
    """AdamW's decoupled weight decay, for optimizers that rlkit builds."""
    max_grad_norm: float = _live(1.0, above=0.0)
    """Gradients are scaled down to this global L2 norm."""
    max_bad_steps: int = _fixed(3, low=1)
    """Consecutive updates with non-finite gradients after which training stops; each one is skipped and counted."""

    kl_coef: float = _live(0.0, low=0.0)
    """Weight of the KL penalty that holds the policy near the reference."""
    kl_placement: Literal["reward", "loss"] = _fixed("reward")
    """Where the penalty enters: subtracted from each token's reward, or added to the loss (GRPO)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = _fixed("k1")
    """Estimator of the per-token KL, see `rlkit.algorithms.kl`; "k3+" has k3's value with k2's unbiased gradient."""
    kl_target: float | None = _live(None, above=0.0)
    """Target KL a response, in nats, for the adaptive coefficient (Ziegler et al. 2019); None keeps `kl_coef` fixed."""
    kl_horizon: int = _fixed(10_000, low=1)
    """Rollouts over which the adaptive coefficient reacts."""

    clip_low: float = _live(0.2, low=0.0, high=1.0)
    """PPO clip: the probability ratio is held above 1 - clip_low."""
    clip_high: float = _live(0.2, low=0.0)
    """PPO clip: the probability ratio is held below 1 + clip_high."""
    dual_clip: float | None = _live(None, above=1.0)
    """Bound on the loss of tokens with negative advantage (Ye et al. 2020); None leaves it off."""
    value_clip: float | None = _live(0.2, above=0.0)
    """How far a value may move from the one before the update; None leaves the value loss unclipped."""
    value_coef: float = _live(0.5, low=0.0)
    """Weight of the value loss where critic and actor are updated together on one trunk."""
    entropy_coef: float = _live(0.0, low=0.0)
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        _fixed("token-mean")
    )
    """How token losses become one number; exact under any split into micro-batches."""

    gamma: float = _live(1.0, low=0.0, high=1.0)
    """Discount of future rewards, per token."""
    lam: float = _live(0.95, low=0.0, high=1.0)
    """GAE's lambda."""
    whiten_advantages: bool = _fixed(True)
    """PPO: shift and scale the advantages of a step to mean 0 and variance 1 over response tokens."""
    scale_by_std: bool = _fixed(True)
    """GRPO: divide by the group's standard deviation; False gives Dr.GRPO's centring."""

    max_new_tokens: int = _fixed(32, low=1)
    """T at most: tokens sampled for one response, the end token included."""
    max_prompt_length: int | None = _fixed(None, low=1)
    """Longest prompt in tokens; None takes what the model's context leaves beside `max_new_tokens`."""
    temperature: float = _live(1.0, above=0.0)
    """Sampling temperature; every log-prob in the loss belongs to this distribution."""
    top_p: float = _live(1.0, above=0.0, high=1.0)
    """Nucleus sampling; below 1 the sampler truncates the distribution that the loss uses, and the gap is logged."""
    top_k: int = _live(0, low=0)
    """Sample among the k most probable tokens; 0 takes all."""
    generation: Literal["native"] = _fixed("native")
    """Engine that samples responses; this version has the native one."""

    reward_weights: dict[str, float] | None = field(default=None, metadata={"live": False})
    """Starting weight of each named reward term; None takes the weights the controllers came with, else 1."""
    threads: int | None = _fixed(None, low=1)
    """CPU threads torch may use, also in a background run; None takes what is set where the trainer is built."""
    seed: int = _fixed(0, low=0)
    """Seed of prompt order and sampling."""

    actor_device_mapping: dict[str, str] | None = field(default=None, metadata={"live": False})
    """Devices of the actor, `{"model": "cuda:0"}`; None takes cuda:0 where there is one, else the CPU."""
    critic_device_mapping: dict[str, str] | None = field(default=None, metadata={"live": False})
    """Devices of the critic; None takes the actor's."""
    reward_device_mapping: dict[str, str] | None = field(default=None, metadata={"live": False})
    """Devices of reward models; None takes the actor's."""
    reference_device_mapping: dict[str, str] | None = field(default=None, metadata={"live": False})
    """Devices of the reference; None takes the actor's."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig, metadata={"live": False})
    """When checkpoints are written and how many stay; a dictionary of CheckpointConfig's fields will do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.group_size:
            raise ConfigError(
                f"batch_size={self.batch_size} rollouts cannot be divided into groups of group_size={self.group_size}; "
                f"take a multiple of {self.group_size}"
            )
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} exceeds batch_size={self.batch_size}; a minibatch is a part of "
                "the step's rollouts"
            )
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "kl_estimator='k1' in the loss holds nothing: its expected gradient is zero. Take 'k3+' or 'k2' with "
                "kl_placement='loss', or 'k1' with kl_placement='reward'"
            )
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"lr_schedule={self.lr_schedule!r} falls to zero at total_steps; set total_steps too")
        if self.lr_schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ConfigError(f"total_steps={self.total_steps} must be more than warmup_steps={self.warmup_steps}")
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError("kl_target moves kl_coef by factors, so kl_coef must start above 0")

    @property
    def prompts_per_step(self) -> int:
        """P: prompts drawn for one step."""
        return self.batch_size // self.group_size

    @classmethod
    def live_fields(cls) -> tuple[str, ...]:
        """Names of the fields that can change while a run goes on."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("live"))

    @classmethod
    def live_specs(cls) -> dict[str, dict[str, Any]]:
        """For each live field its type ("float" or "int"), bounds (inclusive; None where open) and docstring."""
        hints = _hints(cast(Hashable, cls))
        specs = {}
        for entry in dataclasses.fields(cls):
            if entry.metadata.get("live"):
                kind = next(k for k in (int, float) if k is hints[entry.name] or k in get_args(hints[entry.name]))
                low = entry.metadata["above"] if entry.metadata["low"] is None else entry.metadata["low"]
                specs[entry.name] = {
                    "type": kind.__name__,
                    "min": low,
                    "max": entry.metadata["high"],
                    "doc": cls.doc(entry.name),
                }
        return specs

    def replace_live(self, changes: Mapping[str, Any]) -> Self:
        """A copy with some live fields changed; all of them or none.

        Raises:
            ConfigError: a name is unknown or not live, or a value has the wrong type or is out of range.
        """
        live = self.live_fields()
        for name in changes:
            if name not in live:
                known = {f.name for f in dataclasses.fields(self)}
                if name in known:
                    raise ConfigError(f"{name} is fixed once a trainer is built; live settings are {', '.join(live)}")
                refuse_unknown([name], live, what="live setting")
        return dataclasses.replace(self, **changes)


def refuse_unknown(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raises ConfigError for the first given name that is not known, with the nearest known one."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(names))}"
            raise ConfigError(f"unknown {what} key {name!r}{hint}")


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _coerce(cls: type, spec: dataclasses.Field[Any], value: Any) -> Any:
    """Checks one value against the field's type and bounds; whole floats become ints and ints become floats."""
    hint = _hints(cls)[spec.name]
    options = get_args(hint) if get_origin(hint) not in (None, Literal, dict) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    if kind is CheckpointConfig and isinstance(value, Mapping):
        return CheckpointConfig.from_dict(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{spec.name}={value!r} is none of {', '.join(map(repr, get_args(kind)))}")
        return value
    if kind in (int, float):
        return _number(spec, kind, value)
    plain = get_origin(kind) or kind
    if not isinstance(value, plain):
        raise ConfigError(
            f"{spec.name} must be {getattr(plain, '__name__', plain)}, got {type(value).__name__} {value!r}"
        )
    return value


def _number(spec: dataclasses.Field[Any], kind: type, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
        raise ConfigError(f"{spec.name} must be {kind.__name__}, got {type(value).__name__} {value!r}")
    number: int | float = kind(value)
    if not math.isfinite(number):
        raise ConfigError(f"{spec.name} must be finite, got {value!r}")
    low, high, above = (spec.metadata.get(key) for key in ("low", "high", "above"))
    if low is not None and number < low:
        raise ConfigError(f"{spec.name}={value!r} is below its least value {low}")
    if high is not None and number > high:
        raise ConfigError(f"{spec.name}={value!r} is above its greatest value {high}")
    if above is not None and number <= above:
        raise ConfigError(f"{spec.name}={value!r} must be above {above}")
    return number


@cache
def _field_docs(cls: Hashable) -> dict[str, str]:
    """The string that stands below each field in the class's source."""
    tree = ast.parse(inspect.getsource(cls))  # type: ignore[arg-type]
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    docs = {}
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[ast.unparse(above.target)] = inspect.cleandoc(str(below.value.value))
    return docs
