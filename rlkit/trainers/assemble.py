"""From what a user hands to a trainer to controllers, weights, devices and a complete dataflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller, field_names
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.reward import RewardController
from rlkit.dataflow import Dataflow
from rlkit.device_map import DeviceMap
from rlkit.engines.budget import TokenBudget
from rlkit.errors import ConfigError, RewardError
from rlkit.generation.adaptive import AdaptiveSampling
from rlkit.generation.base import SamplingParams
from rlkit.rewards.weights import Normalization


def as_rewards(given: Any) -> tuple[list[RewardController], dict[str, float]]:
    """Reward controllers and starting weights from whatever a user passes.

    Args:
        given: a RewardController, a callable, a model or its name; a dictionary of term name to one of these; or a list
            of these or of `(reward, weight)` pairs.

    Raises:
        RewardError: nothing was given, or two terms have the same name.
    """
    named: list[tuple[str | None, Any]]
    if isinstance(given, Mapping):
        named = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        named = [(None, entry) for entry in given]
    else:
        named = [] if given is None else [(None, given)]
    if not named:
        raise RewardError("a trainer needs at least one reward: reward_model=a callable, a RewardController or a list")
    rewards, weights = [], {}
    for name, entry in named:
        reward, weight = _weighed(entry)
        controller = _as_reward(reward, name)
        if controller.name in weights:
            raise RewardError(
                f"two reward terms are named {controller.name!r}; name one otherwise: RewardController(fn, name=...)"
            )
        rewards.append(controller)
        weights[controller.name] = weight
    return rewards, weights


def _weighed(entry: Any) -> tuple[Any, float]:
    if isinstance(entry, tuple):
        if len(entry) != 2 or isinstance(entry[1], bool) or not isinstance(entry[1], int | float):
            raise RewardError(f"a weighted reward is a pair (reward, weight), got {entry!r}")
        return entry[0], float(entry[1])
    return entry, 1.0


def _as_reward(given: Any, name: str | None) -> RewardController:
    if not isinstance(given, RewardController):
        return RewardController(given, name=name)
    if name is not None and given.name != name:
        raise RewardError(f"the reward controller {given.name!r} stands under the key {name!r}; make the two agree")
    return given


def place(config: TrainerConfig, actor: ActorController, others: Sequence[HostedController]) -> None:
    """Moves every controller to its device (the configuration's, else its own, else the actor's), in its precision."""
    mappings = {
        "actor": config.actor_device_mapping,
        "critic": config.critic_device_mapping,
        "reward": config.reward_device_mapping,
        "reference": config.reference_device_mapping,
    }
    for controller in (actor, *others):
        mapping = mappings.get(controller.role)
        if mapping is not None:
            if set(mapping) != {"model"}:
                raise ConfigError(
                    f"{controller.role}_device_mapping names {sorted(mapping)}; expected {{'model': devices}}"
                )
            controller.device_map = DeviceMap.from_spec(mapping["model"])
        elif controller is actor or controller.has_own_device_map:
            controller.device_map = controller.device_map
        else:
            controller.device_map = actor.device_map
    dtype = _working_precision(config, actor.device)
    for controller in (actor, *others):
        if dtype is not None and controller.role in ("actor", "critic", "reference"):
            controller.round(dtype)
        controller.activations = config.activations
        controller.scoring = TokenBudget(tokens=config.micro_batch_tokens and 4 * config.micro_batch_tokens)


def _working_precision(config: TrainerConfig, device: str) -> torch.dtype | None:
    """What weights are cast to; None leaves them as they are."""
    if config.precision is not None:
        return torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    return torch.bfloat16 if device.startswith("cuda") and torch.cuda.is_bf16_supported() else None


def normalization_of(config: TrainerConfig, terms: Sequence[str]) -> dict[str, Normalization]:
    """How each term is normalised before it is weighted.

    Raises:
        ConfigError: the settings name a term that is not there.
    """
    asked = config.reward_normalization or {}
    for term in asked:
        if term != "*" and term not in terms:
            raise ConfigError(
                f"reward_normalization names the term {term!r}; the terms are {', '.join(terms)}, and '*'"
            )
    rest = asked.get("*", "none")
    return {term: cast(Normalization, asked.get(term, rest)) for term in terms}


def complete(
    dataflow: Dataflow | None,
    actor: ActorController,
    rewards: Sequence[RewardController],
    learners: Sequence[Controller],
    scorers: Sequence[Controller],
    mixer: Controller,
    correction: Controller | None,
    last: Controller,
) -> Dataflow:
    """The user's dataflow with what a trainer adds: mixing, scoring, estimating, and the loops back to the learners.

    The user's own edges and controllers stay; edges into the trainer's controllers are added from whatever they read,
    and into the user's controllers that read what the trainer's write.

    Args:
        learners: controllers beside the actor that `last` gives feedback to; they score rollouts too.
        scorers: others that read rollouts and whose fields `last` reads.
        correction: reads what the scorers write, if any.
        last: writes what is learned from.
    """
    flow = dataflow.copy() if dataflow is not None else Dataflow()
    for reward in rewards:
        flow.connect(actor.output, reward.input).connect(reward.output, mixer.input)
    flow.connect(mixer.output, last.input)
    for controller in (*learners, *scorers):
        flow.connect(actor.output, controller.input).connect(controller.output, last.input)
        if correction is not None and "logprobs" in field_names(controller, controller.writes, "writes"):
            flow.connect(controller.output, correction.input)
    if correction is not None:
        flow.connect(correction.output, last.input)
    for learner in (actor, *learners):
        flow.connect(last.output, learner.feedback)
    own = [node for node in (mixer, *scorers, correction, last) if node is not None]
    for controller in () if dataflow is None else dataflow.controllers:
        for node in own:
            if set(field_names(controller, controller.reads, "reads")) & set(field_names(node, node.writes, "writes")):
                flow.connect(node.output, controller.input)
    return flow


def adaptive_sampling(config: TrainerConfig, sampling: SamplingParams) -> AdaptiveSampling | None:
    """How short and long prompts are sampled from, beside `sampling`; None where all are sampled alike."""
    if not config.adaptive_sampling:
        return None
    return AdaptiveSampling(
        replace(
            sampling,
            temperature=config.adaptive_short_temperature,
            top_p=config.adaptive_short_top_p,
            top_k=config.adaptive_short_top_k,
        ),
        replace(
            sampling,
            temperature=config.adaptive_long_temperature,
            top_p=config.adaptive_long_top_p,
            top_k=config.adaptive_long_top_k,
        ),
        config.adaptive_short_prompt,
        config.adaptive_long_prompt,
    )
