"""Tokens a second of generation with log-probs: rlkit's engines beside transformers' `generate` and vLLM.

    python benchmarks/generate.py [--shape 0.5b] [--rows 512 64] [--prompt 128] [--response 512] [--repeats 3]
                                  [--engines native ragged waiting rlkit-vllm vllm vllm-text transformers]

Random weights of Qwen2's shapes with a vocabulary of 49,152, bf16, no early end, so that every engine does the same
work. Rows share a prompt by eights, as groups do. "ragged" is native generation of lengths drawn evenly from a tenth of
the response to all of it, other ones in each repeat; "waiting" is the same with four times as many rows, of which the
given number decodes at once. "rlkit-vllm" is `generation="vllm"`; "vllm" calls vLLM directly in
its best setting for log-probs (ids in and out), "vllm-text" makes text as well, as trainers often set it. One line an
engine: median and spread of the repeats, time of a token step, peak memory, and the bound that reading weights and
cache from memory sets.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES, VOCABULARY, decoding_bound, device_of_machine, header, model_of, timed, tokenizer_of
from torch import Tensor

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.native import NativeGenerator
from rlkit.generation.vllm.generator import VllmGenerator

SHARE = 0.35
"""Of the GPU's memory, what vLLM may take: room for two engines one after the other beside the trainer's model."""


def prompts_of(rows: int, width: int, device: str) -> Tensor:
    """Prompts (rows, width), each eight times."""
    distinct = torch.randint(1, VOCABULARY, (max(rows // 8, 1), width), generator=torch.Generator().manual_seed(0))
    return distinct.repeat_interleave(8, 0)[:rows].to(device)


def native(model: Any, ids: Tensor, response: int) -> Callable[[], int]:
    """rlkit's own engine; one generator for all calls, as in training."""
    return with_rlkit(NativeGenerator(model, 0), ids, response)


def with_rlkit(generator: Any, ids: Tensor, response: int) -> Callable[[], int]:
    """An engine of rlkit's through its interface."""
    params, mask = SamplingParams(response), torch.ones_like(ids, dtype=torch.bool)

    def run() -> int:
        made = generator.generate(ids, mask, params, torch.Generator().manual_seed(0))
        return int(made.response_mask.sum())

    return run


def ragged(model: Any, ids: Tensor, response: int, slots: int | None = None) -> Callable[[], int]:
    """rlkit's own engine with lengths of ten to one: a random number of 0 takes token 0, which ends a response."""
    decoder = GraphedDecoder(model, cache_argument(model) or "", 0, slots=slots)
    params, mask = SamplingParams(response, stop_token_ids=(0,)), torch.ones_like(ids, dtype=torch.bool)
    rng = torch.Generator().manual_seed(0)

    def run() -> int:
        lengths = torch.randint(response // 10, response + 1, (len(ids),), generator=rng)
        uniforms = torch.rand(len(ids), response, dtype=torch.float64, generator=rng) * 0.99 + 0.01
        uniforms[torch.arange(len(ids)), lengths - 1] = 0.0
        with torch.no_grad():
            made = decoder.generate(ids, mask, params, uniforms.to(ids.device))
        return int(made.response_mask.sum())

    return run


def waiting(model: Any, ids: Tensor, response: int) -> Callable[[], int]:
    """Four times as many rows, of which as many decode at once as there are in `ids`."""
    return ragged(model, ids.repeat(4, 1), response, slots=len(ids))


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
        gpu_memory_utilization=SHARE,
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


OWN: dict[str, Callable[..., Callable[[], int]]] = {
    "native": native,
    "ragged": ragged,
    "waiting": waiting,
    "transformers": with_transformers,
}


def report(name: str, rows: int, response: int, run: Callable[[], int], repeats: int, least: float) -> None:
    """One line of the table."""
    tokens: list[int] = []
    seconds, memory = timed(lambda: tokens.append(run()), repeats)
    rates = [tokens[-1] / s for s in seconds]
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
    engines = [*OWN, "rlkit-vllm", "vllm", "vllm-text"]
    parser.add_argument("--engines", nargs="+", default=["native", "ragged", "transformers"], choices=engines)
    options = parser.parse_args()
    device = device_of_machine()
    print(header())
    print(f"{options.shape}: prompt {options.prompt}, response {options.response}\n")
    print(f"| engine | rows | tokens/s | spread | ms a step | least ms | peak GiB |\n{'|---' * 7}|")
    model = model_of(options.shape, device).requires_grad_(False)
    for rows in options.rows:
        ids = prompts_of(rows, options.prompt, device)
        least = decoding_bound(model, rows, options.prompt, options.response)
        for engine in options.engines:
            given, generator = (ids, options.response), None
            with tempfile.TemporaryDirectory() as folder:
                if engine == "rlkit-vllm":
                    settings = {"gpu_memory_utilization": SHARE, "max_num_seqs": rows, "sleep": False}
                    generator = VllmGenerator(settings, 0, options.prompt + options.response)
                    generator.sync(model, 0)
                    run = with_rlkit(generator, *given)
                elif engine.startswith("vllm"):
                    model.save_pretrained(folder)
                    tokenizer_of("w0").save_pretrained(folder)
                    run = with_vllm(folder, *given, detokenize=engine == "vllm-text")
                else:
                    run = OWN[engine](model, *given)
            report(engine, rows, options.response, run, options.repeats, least)
            if generator is not None:
                generator.release()
            del run, generator
            gc.collect()


if __name__ == "__main__":
    main()
