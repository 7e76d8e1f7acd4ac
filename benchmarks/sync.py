"""Weights from the trainer to the engine that samples: bytes, milliseconds, and the time that memory alone would take.

    python benchmarks/sync.py [--shape 0.5b] [--engines native vllm] [--repeats 5]

"native" reads the trainer's own weights, so that nothing moves. vLLM keeps weights of its own on the same device; every
byte is read once and written once, which is the bound beside the figure. A time ends when the device has the weights.
The first sync is not in it: it loads as vLLM loads any checkpoint, and shows whether later ones can be plain copies,
which the last column says.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from shapes import BANDWIDTH, SHAPES, device_of_machine, header, model_of, spread

from rlkit.generation.native import NativeGenerator
from rlkit.generation.vllm.generator import VllmGenerator


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"], choices=["native", "vllm"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(header())
    model = model_of(options.shape, device_of_machine())
    print(f"\n| engine | bytes | ms | spread | GB/s | least ms | times the least | plain copy |\n{'|---' * 8}|")
    for engine in options.engines:
        generator: Any = NativeGenerator(model, 0) if engine == "native" else VllmGenerator({"sleep": False}, 0, 1024)
        generator.sync(model, 0)
        moved = [generator.sync(model, version) for version in range(1, options.repeats + 1)]
        seconds, size = [each.seconds for each in moved], moved[-1].bytes
        median, least = statistics.median(seconds), 2 * size / BANDWIDTH
        rate = f"{size / median / 1e9:,.0f} | {least * 1e3:.3f} | {median / least:.1f}" if size else "| 0 |"
        plain = "yes" if engine == "vllm" and generator.copied_directly else "no"
        print(
            f"| {engine} | {size:,} | {spread([each * 1e3 for each in seconds])} | {rate} | {plain if size else ''} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
