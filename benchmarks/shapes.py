"""What the benchmarks on a GPU share: model shapes, random models and tokenizers, rooflines, one way of timing."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import rlkit
from rlkit.utils import installed_version

SHAPES = {
    "tiny": (64, 2, 4, 2, 128),
    "0.5b": (896, 24, 14, 2, 4864),
    "1.5b": (1536, 28, 12, 2, 8960),
    "7b": (3584, 28, 28, 4, 18944),
}
"""Width, layers, heads, key heads and width of the MLP, as in Qwen2.5."""
VOCABULARY = 49_152
BANDWIDTH = 4.3e12
"""Bytes a second that an H200 reads from its memory, measured with a large copy."""
PEAK_FLOPS = 989e12
"""Operations a second of an H200 in bf16 without sparsity, by its data sheet."""


def device_of_machine() -> str:
    """The device that benchmarks run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(shape: str, device: str, dtype: torch.dtype | None = None, layers: int | None = None) -> Any:
    """A causal language model of random weights, by default in bf16 on a GPU and in fp32 on the CPU."""
    width, depth, heads, key_heads, inner = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=4096,
        tie_word_embeddings=shape != "7b",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(dtype or (torch.bfloat16 if device == "cuda" else torch.float32))
        model = transformers.AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def tokenizer_of(end: str | None = None) -> Any:
    """Words "w0", "w1", ... for the whole vocabulary; nothing ends a response but the limit, unless an end is named."""
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="w0", pad_token="w0", eos_token=end, padding_side="left"
    )


def prompts_of(count: int, tokens: int) -> list[str]:
    """Distinct prompts of so many words."""
    ids = torch.randint(1, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(0))
    return [" ".join(f"w{token}" for token in row) for row in ids.tolist()]


def decoding_bound(model: Any, rows: int, prompt: int, response: int) -> float:
    """Least seconds of one token step: weights once, and the cache of the rows as it is on average."""
    config = model.config
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters()) * size
    head = config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head * size
    return (weights + rows * (prompt + response / 2) * cache) / BANDWIDTH


def training_flops(model: Any, tokens: int, pairs: int) -> float:
    """Operations of a forward and a backward pass: 6 a weight and token, 12 a pair and width of attention.

    Args:
        model: a dense decoder; a tied embedding counts once, as the output head.
        tokens: that go through the model.
        pairs: of a query and a key it attends to, over all sequences.
    """
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = sum(p.numel() for p in model.parameters()) - embedding
    return 6.0 * weights * tokens + 12.0 * pairs * config.num_hidden_layers * config.hidden_size


def causal_pairs(prompts: Sequence[int], responses: Sequence[int]) -> int:
    """Pairs of query and key of whole sequences."""
    return sum((p + r) * (p + r + 1) // 2 for p, r in zip(prompts, responses, strict=True))


def workload(description: str) -> argparse.ArgumentParser:
    """Options of a step's size: shape, layers, prompts, responses to each, lengths, and tokens of a pass."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers of the shape, where memory is short")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a pass, on sides that count tokens")
    return parser


def header() -> str:
    """Versions and hardware, the first line of every table."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    others = [
        f"{name} {version}"
        for name in ("trl", "vllm", "flash-attn", "liger-kernel")
        if (version := installed_version(name))
    ]
    own = [f"rlkit {rlkit.__version__}", f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    return ", ".join([*own, *others, card])


def free_memory() -> None:
    """Gives back what the last row of a table has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(run: Callable[[], Any], repeats: int, warm_up: int = 1) -> tuple[list[float], float]:
    """Seconds of each repeat, and the peak of memory allocated by this process meanwhile, in GiB."""
    for _ in range(warm_up):
        run()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def spread(seconds: Sequence[float]) -> str:
    """Median, and smallest to largest."""
    return f"{statistics.median(seconds):.3f} | {min(seconds):.3f} to {max(seconds):.3f}"
