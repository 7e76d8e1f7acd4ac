"""A language model and a tokenizer small enough to be made on the fly, so that tests download nothing."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["good", "bad", "film", "the", "was", "is", "a", "very", "day", "food", "not", "so", "and", "of", "to", "it"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(*, bos: bool = False, extra: int = 16, chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words. Ids: 0 unknown, 1 start, 2 end (also the padding id), then the words."""
    special = ["<unk>", "<s>", "</s>", "<user>", "<assistant>"]
    words = [*special, *WORDS, *(f"w{i}" for i in range(extra)), "Yes", "No"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(vocab_size: int = 48, **changes: object) -> LlamaConfig:
    """Two layers of width 32."""
    settings: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random language model of `tiny_config`, in fp32 on the CPU."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


def tiny_classifier(seed: int = 0, **changes: object) -> LlamaForSequenceClassification:
    """A random reward model with one output."""
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(tiny_config(**{"num_labels": 1, **changes})).eval()
