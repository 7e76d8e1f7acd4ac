"""What a trainer can be told. Every field has one meaning, a default, and a docstring below it.

Shape letters: B rollouts a step, P prompts a step, G responses a prompt, so B = P * G.
Fields marked live can be changed while a run goes on (`run.set(lr=1e-6)`); the others are fixed at the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlkit.config_fields import Checked, Tunable, fixed, live
from rlkit.config_vllm import VllmConfig
from rlkit.errors import ConfigError

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo-tv", "dppo-kl", "dro", "gpg"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "gpg", "pass@k", "gdpo"]
NORMALIZATIONS = ("none", "batch", "group")


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """When checkpoints of a run are written and how many stay."""

    save_interval: int = fixed(100, low=0)
    """Steps between two checkpoints of a run; 0 writes one only when the run stops or is asked to."""
    keep_last_k: int = fixed(3, low=1)
    """Complete checkpoints that stay on disk; older ones go once a newer one is complete."""
    async_save: bool = fixed(False)
    """Write in a background thread from a private copy of the state, so that training goes on meanwhile."""


@dataclass(frozen=True)
class TrainerConfig(Tunable):
    """Settings of a trainer. Unknown keys are refused with the nearest known name."""

    batch_size: int = fixed(16, low=1)
    """B: rollouts learned from in one step (prompts a step times `group_size`); of DPO: preference pairs a step."""
    group_size: int = fixed(1, low=1)
    """G: responses sampled for each prompt. GRPO needs at least 2; PPO usually takes 1."""
    minibatch_size: int | None = fixed(None, low=1)
    """Rollouts (of DPO: pairs) in one optimizer update; None takes all B, so one update an epoch."""
    micro_batch_size: int | None = fixed(None, low=1)
    """Rollouts (pairs) in one forward and backward pass; bounds memory, never changes the result. None: a minibatch."""
    micro_batch_tokens: int | None = fixed(None, low=1)
    """Tokens in one forward and backward pass at most, padding not counted where the model runs without it; a single
    longer sequence goes alone. A pass that does not fit in memory is cut in half and tried again in any case."""
    use_dynamic_batching: bool = fixed(False)
    """Size passes by the memory that is free, up to `micro_batch_tokens`."""
    activations: Literal["keep", "recompute", "offload"] = fixed("keep")
    """Between forward and backward: keep activations, compute them again layer by layer, or move them to the host."""
    precision: Literal["float32", "bfloat16"] | None = fixed(None)
    """Of actor, critic and reference. "bfloat16" computes in it and updates float32 master weights; None takes
    bfloat16 on a GPU that has it, and elsewhere each model's own."""
    pairs_per_step: int | None = fixed(None, low=1)
    """Preference pairs that a hybrid step learns from beside its rollouts; None takes half of `batch_size`."""
    ppo_epochs: int = fixed(1, low=1)
    """Passes over the rollouts of a step."""
    total_steps: int | None = fixed(None, low=1)
    """Steps a run trains for when none are named; also the length of a decaying learning-rate schedule."""

    lr: float | None = live(None, low=0.0)
    """Peak learning rate of the actor. None takes that of an optimizer the actor came with, else 1e-6."""
    critic_lr: float | None = live(None, low=0.0, aspect="critic")
    """Peak learning rate of the critic. None takes that of an optimizer the critic came with, else the actor's."""
    reward_lr: float | None = live(None, low=0.0, aspect="feedback")
    """Peak learning rate of reward models that learn from feedback; None takes the actor's."""
    lr_schedule: Literal["constant", "linear", "cosine"] = fixed("constant")
    """Shape of the learning rate after warm-up; linear and cosine fall to zero at `total_steps`."""
    warmup_steps: int = fixed(0, low=0)
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = fixed(0.0, low=0.0)
    """AdamW's decoupled weight decay, for optimizers that rlkit builds."""
    max_grad_norm: float = live(1.0, above=0.0)
    """Gradients are scaled down to this global L2 norm."""
    max_bad_steps: int = fixed(3, low=1)
    """Consecutive updates with non-finite gradients after which training stops; each one is skipped and counted."""

    kl_coef: float = live(0.0, low=0.0, aspect="policy")
    """Weight of the KL penalty that holds the policy near the reference."""
    kl_placement: Literal["reward", "loss"] = fixed("reward")
    """Where the penalty enters: subtracted from each token's reward, or added to the loss (GRPO)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = fixed("k1")
    """Estimator of the per-token KL, see `rlkit.algorithms.kl`; "k3+" has k3's value with k2's unbiased gradient."""
    kl_target: float | None = live(None, above=0.0, aspect="policy")
    """Target KL a response, in nats, for the adaptive coefficient (Ziegler et al. 2019); None keeps `kl_coef` fixed."""
    kl_horizon: int = fixed(10_000, low=1)
    """Rollouts over which the adaptive coefficient reacts."""

    policy_loss: PolicyLoss = fixed("ppo")
    """Loss of the policy, see `rlkit.algorithms`: PPO's clipped surrogate or one of its kin."""
    clip_low: float = live(0.2, low=0.0, high=1.0, aspect="clip")
    """The probability ratio is held above 1 - clip_low (DPPO: the bound on the divergence of falling tokens)."""
    clip_high: float = live(0.2, low=0.0, aspect="clip")
    """The probability ratio is held below 1 + clip_high (DPPO: the bound on the divergence of rising tokens)."""
    dual_clip: float | None = live(None, above=1.0, aspect="dual clip")
    """PPO: bound on the loss of tokens with negative advantage (Ye et al. 2020); None leaves it off."""
    ratio_cap: float = live(20.0, above=1.0, aspect="dppo")
    """DPPO: largest probability ratio that weighs a token."""
    sapo_tau_pos: float = live(1.0, above=0.0, aspect="sapo")
    """SAPO: temperature of the soft gate on tokens with positive advantage."""
    sapo_tau_neg: float = live(1.05, above=0.0, aspect="sapo")
    """SAPO: temperature of the soft gate on tokens with negative advantage."""
    dro_beta: float = live(0.05, above=0.0, aspect="dro")
    """DRO: weight of the squared log-ratio."""
    value_clip: float | None = live(0.2, above=0.0, aspect="critic")
    """How far a value may move from the one before the update; None leaves the value loss unclipped."""
    value_coef: float = live(0.5, low=0.0, aspect="critic")
    """Weight of the value loss where critic and actor are updated together on one trunk."""
    entropy_coef: float = live(0.0, low=0.0, aspect="policy")
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        fixed("token-mean")
    )
    """How token losses become one number; exact under any split into micro-batches."""

    advantage_estimator: AdvantageEstimator = fixed("grpo")
    """How trainers without a critic turn rewards into advantages, see `rlkit.algorithms.advantages`."""
    gamma: float = live(1.0, low=0.0, high=1.0, aspect="discount")
    """Discount of future rewards, per token."""
    lam: float = live(0.95, low=0.0, high=1.0, aspect="critic")
    """GAE's lambda."""
    whiten_advantages: bool = fixed(True)
    """PPO and GDPO: shift and scale the advantages of a step to mean 0 and variance 1 over response tokens."""
    scale_by_std: bool = fixed(True)
    """GRPO and pass@k: divide by the group's standard deviation; False gives Dr.GRPO's centring."""
    bootstrap_truncated: bool = fixed(False)
    """PPO: a response cut off at the length limit goes on to the critic's value of its end, not to 0."""
    mask_truncated: bool = fixed(False)
    """Learn nothing from responses cut off at the length limit (DAPO's overlong filtering, Yu et al. 2025)."""
    dynamic_sampling: bool = fixed(False)
    """Sample on until all B rollouts belong to groups whose rewards differ (DAPO, Yu et al. 2025)."""
    max_sampling_rounds: int = fixed(4, low=1)
    """Rounds of sampling a step at most with `dynamic_sampling`; then the step learns from the rollouts there are."""

    correction_weights: Literal["none", "token", "sequence"] = fixed("none")
    """Importance weights of trainer against sampler, truncated (TIS): none, one a token, or one a response."""
    correction_threshold: float = live(2.0, above=0.0, aspect="correction")
    """Largest correction weight."""
    correction_floor: float | None = live(None, above=0.0, aspect="correction")
    """Weights outside [floor, threshold] become 0 (IcePop); None only truncates."""
    correction_normalise: bool = fixed(False)
    """Divide the correction weights by their mean over the step, so that the loss keeps its size."""
    rejection: Literal["none", "token", "sequence-sum", "sequence-mean", "sequence-max"] = fixed("none")
    """What is not learned from where trainer and sampler disagree: nothing, tokens, responses."""
    rejection_kind: Literal["k1", "k2", "k3"] = fixed("k1")
    """Rejection: the measure of disagreement, see `rlkit.algorithms.correction`."""
    rejection_band: float = live(2.0, above=1.0, aspect="rejection by band")
    """Rejection by k1: the ratio of trainer to sampler lies within [1 / band, band]."""
    rejection_limit: float = live(0.1, above=0.0, aspect="rejection by limit")
    """Rejection by k2 and k3: largest divergence in nats."""

    beta: float = live(0.1, above=0.0, aspect="dpo")
    """DPO: how strongly the policy is held to the reference (Rafailov et al. 2023)."""
    preference_loss: Literal["sigmoid", "ipo", "hinge"] = fixed("sigmoid")
    """DPO: loss of a pair's margin."""
    label_smoothing: float = live(0.0, low=0.0, high=0.5, aspect="dpo")
    """DPO, sigmoid: probability that a pair's labels are the wrong way round (Mitchell 2023)."""
    average_logprobs: bool | None = fixed(None)
    """DPO: compare log-probs per token rather than per response; None takes what the loss is defined on."""
    dpo_ratio: float = live(0.5, low=0.0, high=1.0, aspect="hybrid")
    """Hybrid: share of the DPO loss; the policy loss has the rest. Set live by itself, it holds and ends a schedule."""
    dpo_ratio_end: float | None = live(None, low=0.0, high=1.0, aspect="hybrid")
    """Hybrid: share that `dpo_ratio` moves to on a straight line over `dpo_ratio_steps`; None keeps it."""
    dpo_ratio_steps: int = live(100, low=1, aspect="hybrid")
    """Hybrid: steps from `dpo_ratio` to `dpo_ratio_end`, counted from the first step."""

    max_new_tokens: int = fixed(32, low=1)
    """T at most: tokens sampled for one response, the end token included."""
    max_prompt_length: int | None = fixed(None, low=1)
    """Longest prompt in tokens; None takes what the model's context leaves beside `max_new_tokens`."""
    temperature: float = live(1.0, above=0.0)
    """Sampling temperature; every log-prob in the loss belongs to this distribution."""
    top_p: float = live(1.0, above=0.0, high=1.0, aspect="sampling")
    """Nucleus sampling: the most probable tokens with at least this mass; the loss uses their distribution as well."""
    top_k: int = live(0, low=0, aspect="sampling")
    """Sample among the k most probable tokens, and learn under their distribution; 0 takes all."""
    adaptive_sampling: bool = fixed(False)
    """Sample short and long prompts in ways of their own; those between take `temperature`, `top_p` and `top_k`."""
    adaptive_short_prompt: int = live(64, low=0, aspect="adaptive sampling")
    """Prompts under this many tokens are short; 0 takes none for short."""
    adaptive_long_prompt: int = live(512, low=0, aspect="adaptive sampling")
    """Prompts over this many tokens are long."""
    adaptive_short_temperature: float = live(0.0, low=0.0, aspect="adaptive sampling")
    """Temperature of short prompts; at 0 the most probable token is taken, which nothing can be learned from."""
    adaptive_short_top_p: float = live(1.0, above=0.0, high=1.0, aspect="adaptive sampling")
    """`top_p` of short prompts."""
    adaptive_short_top_k: int = live(0, low=0, aspect="adaptive sampling")
    """`top_k` of short prompts."""
    adaptive_long_temperature: float = live(0.7, low=0.0, aspect="adaptive sampling")
    """Temperature of long prompts."""
    adaptive_long_top_p: float = live(1.0, above=0.0, high=1.0, aspect="adaptive sampling")
    """`top_p` of long prompts."""
    adaptive_long_top_k: int = live(50, low=0, aspect="adaptive sampling")
    """`top_k` of long prompts."""
    generation: Literal["native", "vllm"] | None = fixed(None)
    """Engine that samples responses; None takes "native", or "vllm" where `use_vllm` says so."""
    use_vllm: bool | None = fixed(None)
    """The same choice as yes or no: True is `generation="vllm"`, False is `generation="native"`."""
    vllm: VllmConfig = field(default_factory=VllmConfig, metadata={"live": False})
    """Settings of vLLM's engine; a dictionary of VllmConfig's fields will do."""

    reward_normalization: dict[str, str] | None = fixed(None)
    """Term -> "none", "batch" or "group": scaled to mean 0, deviation 1 before weighting; "*" stands for the rest."""
    reward_weights: dict[str, float] | None = fixed(None)
    """Starting weight of each named reward term; None takes the weights the controllers came with, else 1."""
    threads: int | None = fixed(None, low=1)
    """CPU threads torch may use, also in a background run; None takes what is set where the trainer is built."""
    seed: int = fixed(0, low=0)
    """Seed of prompt order and sampling."""

    actor_device_mapping: dict[str, str] | None = fixed(None)
    """Devices of the actor, `{"model": "cuda:0"}`; None takes cuda:0 where there is one, else the CPU."""
    critic_device_mapping: dict[str, str] | None = fixed(None)
    """Devices of the critic; None takes the actor's."""
    reward_device_mapping: dict[str, str] | None = fixed(None)
    """Devices of reward models; None takes the actor's."""
    reference_device_mapping: dict[str, str] | None = fixed(None)
    """Devices of the reference; None takes the actor's."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig, metadata={"live": False})
    """When checkpoints are written and how many stay; a dictionary of CheckpointConfig's fields will do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_generation()
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
        if self.policy_loss == "gmpo" and self.loss_aggregation != "seq-mean-token-mean":
            raise ConfigError(
                "policy_loss='gmpo' is a loss of whole responses, so every response must count the same: set "
                "loss_aggregation='seq-mean-token-mean'"
            )
        if self.label_smoothing and self.preference_loss != "sigmoid":
            raise ConfigError(
                f"label_smoothing has no meaning for preference_loss={self.preference_loss!r}; set it to 0, or take "
                "'sigmoid'"
            )
        if self.correction_floor is not None and not self.correction_floor < self.correction_threshold:
            raise ConfigError(
                f"correction_floor={self.correction_floor} must be below "
                f"correction_threshold={self.correction_threshold}"
            )
        if self.rejection == "sequence-max" and self.rejection_kind == "k1":
            raise ConfigError("rejection='sequence-max' needs a size, and k1 has a sign: set rejection_kind to 'k3'")
        if self.adaptive_short_prompt > self.adaptive_long_prompt + 1:
            raise ConfigError(
                f"adaptive_short_prompt={self.adaptive_short_prompt} and "
                f"adaptive_long_prompt={self.adaptive_long_prompt} make some prompts short and long at once; "
                "adaptive_long_prompt must not be the smaller one"
            )
        for term, mode in (self.reward_normalization or {}).items():
            if mode not in NORMALIZATIONS:
                raise ConfigError(
                    f"reward_normalization[{term!r}]={mode!r} is none of {', '.join(map(repr, NORMALIZATIONS))}"
                )

    @property
    def generation_engine(self) -> Literal["native", "vllm"]:
        """The engine that `generation` and `use_vllm` name together."""
        return self.generation or ("vllm" if self.use_vllm else "native")

    def _check_generation(self) -> None:
        if self.use_vllm is not None and self.use_vllm != (self.generation_engine == "vllm"):
            raise ConfigError(
                f"use_vllm={self.use_vllm} and generation={self.generation!r} contradict each other; leave one out"
            )
        if self.generation_engine == "native" and self.vllm != VllmConfig():
            raise ConfigError("vllm={...} means nothing to native generation; set generation='vllm', or leave it out")

    @property
    def prompts_per_step(self) -> int:
        """P: prompts drawn for one step."""
        return self.batch_size // self.group_size
