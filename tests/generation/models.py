"""Tiny random models of several families, and left-padded prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from rlkit.algorithms.truncation import Sampled
from rlkit.engines.logprobs import response_scores
from rlkit.generation.base import Generated
from tests.tiny import tiny_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-long": LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=4),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "gemma": GemmaConfig(**_SHAPE, head_dim=8),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(
        **_SHAPE,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": GraniteConfig(**_SHAPE, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "olmo2": Olmo2Config(**_SHAPE),
    "phi3": Phi3Config(**_SHAPE),
    "smollm3": SmolLM3Config(**_SHAPE, no_rope_layer_interval=2),
    "gpt2": GPT2Config(
        vocab_size=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    ),
}
WRITTEN_OUT = ("llama", "llama-biased", "llama-long", "mistral", "qwen2", "qwen3")
"""Families whose decoding step is written out."""
OWN_FORWARD = ("gemma", "gemma2", "gemma3", "granite", "mistral-window", "olmo2", "phi3", "smollm3")
"""Families that decode through their own forward in fixed buffers."""


def family_model(name: str, seed: int = 0) -> Any:
    """A random model with large enough weights that its next tokens differ, dropout (where it has any) of 0.1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)  # they start at zero, where a forgotten one would not be noticed
    return model.eval()


def prompts(rows: int = 5, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of lengths width, width - 1, ... (at least 1), padded on the left with token 2; (ids, mask)."""
    lengths = torch.tensor([max(1, width - row) for row in range(rows)])
    ids = torch.randint(3, 48, (rows, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(width) >= (width - lengths).unsqueeze(1)
    return ids.masked_fill(~mask, 2), mask


class Recurrent(nn.Module):
    """A plain language model without cache or configuration: an embedding, a recurrent layer, a linear layer."""

    def __init__(self, vocabulary: int = 48, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 16)
        self.cell = nn.GRUCell(16, 16)
        self.out = nn.Linear(16, vocabulary)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """(B, L, V) logits. Padding leaves the state as it is; the position is part of the input."""
        state = torch.zeros(len(input_ids), 16)
        states = []
        for column in range(input_ids.shape[1]):
            inputs = self.embed(input_ids[:, column]) + position_ids[:, column, None] / 10
            state = torch.where(attention_mask[:, column, None].bool(), self.cell(inputs, state), state)
            states.append(state)
        logits: Tensor = self.out(torch.stack(states, dim=1))
        return logits


class WithoutCache(nn.Module):
    """A transformers model behind a plain module's forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = tiny_model(seed)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        """Logits under their name."""
        output = self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        return {"logits": output.logits}


def rng(seed: int = 0) -> torch.Generator:
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def teacher_forced(model: nn.Module, mask: Tensor, out: Generated, temperature: float | Sampled = 1.0) -> Tensor:
    """(B, T) log-probs of the responses from one forward over the whole sequences."""
    full = torch.cat([mask, out.response_mask], dim=1)
    with torch.no_grad():
        return response_scores(model, out.generated_ids, full, mask.shape[1], temperature).logprobs
