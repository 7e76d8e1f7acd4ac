"""Tokens a second of generation with log-probs: rlkit's native engine beside transformers' `generate` and vLLM.

    python benchmarks/generate.py [--shape 0.5b] [--rows 512 64] [--prompt 128] [--response 512]
                                  [--engines native transformers vllm] [--repeats 3]

Random weights of Qwen2's shapes with a vocabulary of 49,152, bf16, no early end, so that every engine does the same
work; "ragged" stops at random, so that lengths spread by more than ten to one. Rows share a prompt by eights, as groups
do. One line an engine: median and spread of the repeats, time of a token step, peak memory, and the bound that reading
weights and cache from memory sets. vLLM runs twice where it is installed: with log-probs and detokenizing, as trainers
set it, and in its best setting for log-probs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import rlkit
from rlkit.generation.base import SamplingParams
from rlkit.generation.native import NativeGenerator

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


def model_of(shape: str, device: str) -> Any:
    """A model of random weights in bf16 (fp32 on the CPU)."""
    width, layers, heads, key_heads, inner = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=4096,
        tie_word_embeddings=shape in ("tiny", "0.5b", "1.5b"),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = transformers.AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def prompts_of(rows: int, width: int, device: str) -> Tensor:
    """Prompts (rows, width), each eight times."""
    distinct = torch.randint(1, VOCABULARY, (max(rows // 8, 1), width), generator=torch.Generator().manual_seed(0))
    return distinct.repeat_interleave(8, 0)[:rows].to(device)


def bound(model: Any, rows: int, prompt: int, response: int) -> float:
    """Least seconds of one token step: weights once, and the cache of the rows as it is on average."""
    config = model.config
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters()) * size
    head = config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head * size
    return (weights + rows * (prompt + response / 2) * cache) / BANDWIDTH


def native(model: Any, ids: Tensor, response: int, stops: tuple[int, ...]) -> Callable[[], int]:
    """rlkit's own engine; one generator for all calls, as in training."""
    generator = NativeGenerator(model, 0)
    params, mask = SamplingParams(response, stop_token_ids=stops), torch.ones_like(ids, dtype=torch.bool)

    def run() -> int:
        made = generator.generate(ids, mask, params, torch.Generator().manual_seed(0))
        return int(made.response_mask.sum())

    return run


def with_transformers(model: Any, ids: Tensor, response: int) -> Callable[[], int]:
    """`generate` with sampling; it gives the scores of all tokens, from which log-probs would still be made."""

    def run() -> int:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=response,
            min_new_tokens=response,
        )
        return int(out[:, ids.shape[1] :].numel())

    return run


def with_vllm(folder: str, ids: Tensor, response: int, detokenize: bool) -> Callable[[], int]:
    """vLLM's offline engine, ids in, ids and log-probs out."""
    from vllm import LLM
    from vllm import SamplingParams as Params

    engine = LLM(
        folder,
        skip_tokenizer_init=not detokenize,
        dtype="bfloat16",
        gpu_memory_utilization=0.5,
        max_model_len=ids.shape[1] + response,
        enable_prefix_caching=True,
        max_num_seqs=len(ids),
    )
    params = Params(temperature=1.0, max_tokens=response, ignore_eos=True, logprobs=0, detokenize=detokenize)
    prompts: Any = [{"prompt_token_ids": row} for row in ids.tolist()]

    def run() -> int:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def measure(run: Callable[[], int], repeats: int, device: str) -> tuple[list[float], int, float]:
    """Seconds of each repeat after one to warm up, tokens of a call, and peak memory in GiB."""
    run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, tokens = [], 0
    for _ in range(repeats):
        began = time.perf_counter()
        tokens = run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, tokens, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def report(name: str, rows: int, response: int, measured: tuple[list[float], int, float], least: float) -> None:
    """One line of the table."""
    seconds, tokens, memory = measured
    rates = [tokens / s for s in seconds]
    step = 1e3 * statistics.median(seconds) / response
    print(
        f"| {name} | {rows} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
        f"| {step:.2f} | {1e3 * least:.2f} | {memory:.1f} |",
        flush=True,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["native", "ragged", "transformers"])
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"rlkit {rlkit.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, {card}")
    print(f"{options.shape}: prompt {options.prompt}, response {options.response}, bf16\n")
    print(f"| engine | rows | tokens/s | spread | ms a step | least ms | peak GiB |\n{'|---' * 7}|")
    model = model_of(options.shape, device)
    rare = tuple(range(1, 1 + round(VOCABULARY * 8 / options.response)))  # about a response / 8 tokens to the first
    for rows in options.rows:
        ids = prompts_of(rows, options.prompt, device)
        least = bound(model, rows, options.prompt, options.response)
        for engine in options.engines:
            if engine.startswith("vllm"):
                import vllm

                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    run = with_vllm(folder, ids, options.response, detokenize=False)
                    name = f"vllm {vllm.__version__}, no detokenizing"
            elif engine == "transformers":
                run, name = with_transformers(model, ids, options.response), engine
            else:
                run = native(model, ids, options.response, rare if engine == "ragged" else ())
                name = f"native{', ragged' if engine == 'ragged' else ''}"
            report(name, rows, options.response, measure(run, options.repeats, device), least)


if __name__ == "__main__":
    main()
