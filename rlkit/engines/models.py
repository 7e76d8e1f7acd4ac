"""Load language models and tokenizers by name, and ask them the questions that rlkit needs answered."""

from pathlib import Path
from typing import Any

from torch import nn

from rlkit.engines.forward import bare_model, output_head
from rlkit.engines.hub import hub_is_reachable
from rlkit.engines.small_model import is_small_model, small_model_path
from rlkit.errors import ModelError

__all__ = [
    "context_length",
    "hidden_size",
    "load_causal_lm",
    "load_sequence_classifier",
    "load_tokenizer",
    "resolve_model",
    "same_tokenizer",
]


def resolve_model(name: str | Path, revision: str | None = None, cache_dir: str | Path | None = None) -> str:
    """What `from_pretrained` is given for a name.

    Args:
        name: a local folder, a hub id, or a name of the small model that comes with rlkit ("smollm2-135m").
        revision: of a hub id.
        cache_dir: where the hub's files are kept, if not at the usual place.

    Returns:
        A folder for local models and for the small model (fetched into the user's cache when it is not there yet).
        A hub id unchanged; without a connection to the hub, the folder of the copy that was downloaded earlier.

    Raises:
        ModelError: when the name looks like a path and there is no such folder, or when it is a hub id, the hub cannot
            be reached and there is no earlier download.
    """
    text = str(name)
    if is_small_model(text):
        return str(small_model_path())
    folder = Path(text).expanduser()
    if folder.is_dir():
        return str(folder)
    if isinstance(name, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise ModelError(f"no model folder at {text!r}; give a folder that holds config.json and weights, or a hub id")
    return text if hub_is_reachable() else _downloaded_earlier(text, revision, cache_dir)


def _downloaded_earlier(hub_id: str, revision: str | None, cache_dir: str | Path | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(hub_id, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{hub_id!r} is no folder here, the hub cannot be reached, and it has not been downloaded before; connect "
            "to the network, or give the path of a folder that holds the model"
        ) from error


def load_causal_lm(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """A causal language model, in evaluation mode and in fp32 unless `dtype` says otherwise.

    Fp32 because these weights are trained: bf16 rounds away updates smaller than 0.4% of a weight.

    Args:
        name_or_path: see `resolve_model`.
        trust_remote_code: run Python code that comes with the model. Off unless asked for.
        kwargs: to `from_pretrained` as they are (`dtype`, `device_map`, `offload_folder`, `revision`, ...).

    Raises:
        ModelError: when the model cannot be loaded; says what was tried.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not {"dtype", "torch_dtype"} & kwargs.keys():
        kwargs["dtype"] = torch.float32
    return _from_pretrained(
        AutoModelForCausalLM, "causal language model", name_or_path, trust_remote_code=trust_remote_code, **kwargs
    )


def load_sequence_classifier(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """A sequence-classification model (a reward model), in evaluation mode; arguments as in `load_causal_lm`.

    Raises:
        ModelError: when it cannot be loaded, or when its checkpoint has no weights for the classification head
            (a plain language model), which would leave the head random.
    """
    from transformers import AutoModelForSequenceClassification

    return _from_pretrained(
        AutoModelForSequenceClassification,
        "sequence-classification model",
        name_or_path,
        trust_remote_code=trust_remote_code,
        **kwargs,
    )


def _from_pretrained(factory: Any, kind: str, name_or_path: str | Path, **kwargs: Any) -> Any:
    source = resolve_model(name_or_path, kwargs.get("revision"), kwargs.get("cache_dir"))
    try:
        model, info = factory.from_pretrained(source, output_loading_info=True, **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load {str(name_or_path)!r} as a {kind} (from {source!r}): {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{str(name_or_path)!r} is no {kind}: it holds no weights for {', '.join(missing[:4])}, which would be "
            f"random; give a checkpoint that was saved as a {kind}"
        )
    return model


def load_tokenizer(name_or_model: str | Path | nn.Module, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The tokenizer of a model, with a pad token set and prompts padded on the left.

    Args:
        name_or_model: a name as in `resolve_model`, or a model, whose tokenizer is looked for where it was loaded from.
        trust_remote_code: run Python code that comes with the tokenizer. Off unless asked for.
        kwargs: to `from_pretrained` as they are.

    Raises:
        ModelError: when the model does not say where it came from, or there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    if isinstance(name_or_model, nn.Module):
        name = getattr(getattr(bare_model(name_or_model), "config", None), "_name_or_path", "")
        if not name:
            raise ModelError(
                f"this {type(name_or_model).__name__} was not loaded from a name or folder, so its tokenizer is "
                "unknown; pass tokenizer= as well"
            )
    else:
        name = str(name_or_model)
    try:
        source = resolve_model(name, kwargs.get("revision"), kwargs.get("cache_dir"))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError, KeyError, ImportError, ModelError) as error:
        raise ModelError(f"no tokenizer found at {name!r}; pass tokenizer= as well ({error})") from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # safe: masks come from lengths, never from token values
    tokenizer.padding_side = "left"
    return tokenizer


def same_tokenizer(a: Any, b: Any) -> bool:
    """True when both map the same tokens to the same ids and agree on the special tokens' ids."""
    if a is b:
        return True
    special = ("bos_token_id", "eos_token_id", "unk_token_id")
    if any(getattr(a, name, None) != getattr(b, name, None) for name in special):
        return False
    return bool(a.get_vocab() == b.get_vocab())


def context_length(model: nn.Module) -> int | None:
    """Most tokens a sequence may have, or None when the model names no limit."""
    config = getattr(bare_model(model), "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(limit) if limit else None


def hidden_size(model: nn.Module) -> int:
    """H, the width of the model's last hidden state.

    Raises:
        ModelError: when neither its configuration nor its output head tells.
    """
    config = getattr(bare_model(model), "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    width = getattr(text_config, "hidden_size", None)
    head = output_head(model)
    if width is None and head is not None:
        width = getattr(head, "in_features", None)
    if width is None:
        raise ModelError(
            f"{type(model).__name__} does not say how wide its hidden states are; give it config.hidden_size, or "
            "get_output_embeddings() that returns a linear layer"
        )
    return int(width)
