"""A trainer's model and the parameters of an engine that fuses its layers, for the tests of copies between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlkit.generation.vllm.direct_copy import DirectCopy, prove
from rlkit.generation.weights import Checkpoint, checkpoint_weights

__all__ = ["PACKED", "Attention", "Trained", "engine_of", "learn", "proven", "same"]

PACKED = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 6), nn.Linear(4, 2), nn.Linear(4, 2)


class Trained(nn.Module):
    """A trainer's model: three layers that an engine fuses, a norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attn = Attention()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def engine_of(model: nn.Module, rows: int = 8) -> dict[str, Tensor]:
    """Parameters as an engine holds them after an ordinary load; the vocabulary is padded to `rows`."""
    weights = dict(checkpoint_weights(model))
    embedding = torch.zeros(rows, 4)
    embedding[:5] = weights["embed.weight"]
    fused = {
        f"attn.qkv.{kind}": torch.cat([weights[f"attn.{part}.{kind}"] for part in "qkv"]) for kind in ("weight", "bias")
    }
    norm = {name: weights[name].clone() for name in ("norm.weight", "norm.bias")}
    return {"embed.weight": embedding, **fused, **norm}


def proven(engine: dict[str, Tensor], weights: Checkpoint) -> DirectCopy:
    found = prove(engine, PACKED, weights)
    assert found is not None
    return found


def learn(model: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def same(engine: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(engine[name], expected[name]) for name in expected)
