"""Which generator a trainer's settings ask for. No other place decides it."""

from torch import nn

from rlkit.config import TrainerConfig
from rlkit.generation.base import Generator
from rlkit.generation.native import NativeGenerator
from rlkit.generation.vllm.generator import VllmGenerator

__all__ = ["generator_for"]


def generator_for(
    config: TrainerConfig, current: Generator, model: nn.Module, pad_token_id: int, context: int | None
) -> Generator:
    """The generator that `config.generation_engine` names.

    Args:
        config: the trainer's settings.
        current: the one in use. It stays where it serves: "native" keeps any that is not vLLM's, so a generator of
            one's own too.
        model: the module that is trained.
        pad_token_id: written right of a response.
        context: most tokens that prompts and responses of this trainer have together; None for no limit known.
    """
    if config.generation_engine == "vllm":
        chosen: Generator = VllmGenerator(config.vllm, pad_token_id, context)
    elif isinstance(current, VllmGenerator):
        chosen = NativeGenerator(model)
    else:
        return current
    current.release()
    return chosen
