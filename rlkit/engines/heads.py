"""Scalar heads on a language model's hidden states: where they read, how they start, how they are kept on disk."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from rlkit.engines.attention import packed_forward, packs
from rlkit.engines.packing import pack_sequences
from rlkit.errors import ModelError

__all__ = ["ValueHead", "last_states", "load_head", "pool_last", "save_head"]

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """One number from each hidden state, in fp32. Starts at zero, so a fresh critic expects nothing.

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """States (..., H) to values (...), fp32."""
        values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values.float()


def pool_last(states: Tensor, mask: Tensor) -> Tensor:
    """(B, H): the state of the last attended token of each row, found by the mask and never by a token's value.

    Args:
        states: (B, L, H).
        mask: (B, L) bool, true at real tokens, padded on either side; every row has at least one.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (mask.bool() * (positions + 1)).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def last_states(trunk: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, H): the last hidden state at the last attended token of each row, from a forward without padding if possible.

    Args:
        trunk: a decoder without an output head.
        ids: (B, L) int64.
        mask: (B, L) bool, true at real tokens; every row has at least one.
    """
    if not packs(trunk):
        return pool_last(trunk(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
    layout = pack_sequences(ids, mask)
    with packed_forward(trunk, layout):
        output = trunk(input_ids=layout.ids[None], position_ids=layout.positions[None], use_cache=False)
    states: Tensor = output.last_hidden_state[0, layout.predicts]
    return states


def save_head(head: nn.Module, directory: str | PathLike[str]) -> Path:
    """Writes a head beside a model's weights and returns the file."""
    from safetensors.torch import save_file

    path = Path(directory) / HEAD_FILE
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, path)
    return path


def load_head(head: nn.Module, directory: str | PathLike[str]) -> None:
    """Loads what `save_head` wrote, bit for bit.

    Raises:
        ModelError: the directory holds no head, or one of another size.
    """
    from safetensors.torch import load_file

    path = Path(directory) / HEAD_FILE
    if not path.is_file():
        raise ModelError(
            f"{directory} holds no value head ({HEAD_FILE}), so the critic's values would be made up; save one with "
            "rlkit.engines.heads.save_head, or ask for a fresh head with new_head=True"
        )
    state = load_file(path)
    try:
        head.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ModelError(f"the value head in {path} does not fit this model: {error}") from error
