"""What the columns of a batch are called and hold: the vocabulary that controllers declare and batches are checked by.

Shape letters: B rollouts, P prompt width, T response width, L = P + T. Loads no torch, so that graphs can be drawn
and run folders read without it.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlkit.errors import DataError

__all__ = ["FIELDS", "SAMPLED_FIELDS", "TENSOR_DTYPES", "Field", "field_for", "require_field"]

TENSOR_DTYPES: Final = ("int64", "bool", "float32")
SAMPLED_FIELDS: Final = ("temperatures", "top_ks", "top_ps")
"""What each response was sampled from, see `rlkit.batch.RolloutBatch.sampled`."""


@dataclass(frozen=True)
class Field:
    """What a batch column holds.

    Attributes:
        name: key of the column; `reward/<term>` names one reward term.
        dims: one letter a dimension, B first; equal letters have equal sizes within one batch.
        dtype: "int64" | "bool" | "float32" for tensors, "text" for a list of str, "object" for a list of anything.
        doc: meaning and units.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    doc: str

    def __post_init__(self) -> None:
        if self.dtype not in (*TENSOR_DTYPES, "text", "object"):
            raise DataError(
                f"field {self.name!r} has dtype {self.dtype!r}; expected one of int64, bool, float32, text, object"
            )
        if self.dims[:1] != ("B",) or (not self.is_tensor and len(self.dims) != 1):
            raise DataError(
                f"field {self.name!r} has dims {self.dims}; expected 'B' (rollouts) first, and nothing after it for "
                "text and object fields"
            )

    @property
    def is_tensor(self) -> bool:
        """True for fields stored as a tensor, false for lists of text or objects."""
        return self.dtype in TENSOR_DTYPES


_B, _BP, _BT, _BL = ("B",), ("B", "P"), ("B", "T"), ("B", "L")
_ALL: Final = (
    Field("input_ids", _BP, "int64", "prompt token ids, padded on the left"),
    Field("attention_mask", _BP, "bool", "true on real prompt tokens"),
    Field("prompts", _B, "text", "prompt text, as reward functions and people read it"),
    Field("generated_ids", _BL, "int64", "prompt block, then response tokens padded on the right"),
    Field("response_mask", _BT, "bool", "true where the policy sampled a token, the end token included"),
    Field("rollout_logprobs", _BT, "float32", "log-probability (nats) under the distribution that sampled the token"),
    Field("temperatures", _B, "float32", "temperature that the response was sampled at; 0: always the likeliest token"),
    Field("top_ks", _B, "int64", "number of tokens that each token was sampled from; 0: all"),
    Field("top_ps", _B, "float32", "share of the mass that each token was sampled from; 1: all"),
    Field("responses", _B, "text", "decoded response, for reward functions and display only"),
    Field("finish_reasons", _B, "text", "'stop' (end token sampled) or 'length' (cut off)"),
    Field("policy_versions", _B, "int64", "version of the weights that sampled the response"),
    Field("groups", _B, "int64", "id shared by the responses to one prompt"),
    Field("rows", _B, "int64", "index of the prompt in its source"),
    Field("columns", _B, "object", "dict with the other columns of the dataset row"),
    Field("rewards", _B, "float32", "mixed reward of the response"),
    Field("ref_logprobs", _BT, "float32", "log-probability (nats) under the reference policy"),
    Field("logprobs", _BT, "float32", "log-probability (nats) under the trainer's policy before the update"),
    Field("values", _BT, "float32", "critic's estimate for the state before token t"),
    Field("token_rewards", _BT, "float32", "reward per token after the KL penalty was placed"),
    Field("advantages", _BT, "float32", "advantage per response token"),
    Field("returns", _BT, "float32", "value target per response token"),
    Field("reward_valid", _B, "bool", "false where every reward term abstained: not learned from"),
    Field("reward_baselines", _B, "float32", "reward of the greedy response to the same prompt (ReMax)"),
    Field("bootstrap_values", _B, "float32", "critic's estimate for the state after the last token"),
    Field("correction_weights", _BT, "float32", "importance weight of the trainer's policy against the sampler's"),
    Field("correction_mask", _BT, "bool", "false where trainer and sampler disagree too much to learn from"),
    Field("learn_mask", _BT, "bool", "true on the tokens that are learned from"),
    Field("reward_targets", _B, "float32", "what a reward model that learns from feedback should have given"),
    Field("preferences", _B, "float32", "1 for the chosen response of a pair, -1 for the rejected one, 0 for neither"),
)
FIELDS: Final[dict[str, Field]] = {field.name: field for field in _ALL}


def field_for(name: str) -> Field | None:
    """The field rlkit itself knows under `name` (the family `reward/<term>` included), or None."""
    if name.startswith("reward/") and len(name) > len("reward/"):
        return Field(name, _B, "float32", f"raw reward of the term {name[7:]!r}; NaN where the term abstained")
    return FIELDS.get(name)


def require_field(name: str, known: Iterable[str] = ()) -> Field:
    """`field_for(name)`, or a DataError that names the nearest known field and says how to declare a new one."""
    field = field_for(name)
    if field is None:
        near = difflib.get_close_matches(name, [*known, *FIELDS], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"unknown field {name!r}.{hint} For a field of your own pass its description: "
            f'specs=[Field({name!r}, ("B",), "float32", "what it holds")]'
        )
    return field
