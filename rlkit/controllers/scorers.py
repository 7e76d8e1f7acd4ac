"""Reward models: text in, one number a response out.

A reward model may have another tokenizer than the actor, so it is always given text, tokenised anew through its own
chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlkit.data.reading import begin_once, beginning_token
from rlkit.engines.heads import last_states
from rlkit.engines.logprobs import last_logits
from rlkit.errors import ModelError, RewardError

Columns = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Judge:
    """How a causal language model is asked for its judgement.

    The score is the probability of `yes` against `no` as the next token, in [0, 1].
    """

    question: str = (
        "Prompt:\n{prompt}\n\nResponse:\n{response}\n\nIs this a good response to the prompt? Answer Yes or No."
    )
    """Shown to the judge through its chat template; `{prompt}` and `{response}` are filled in."""
    yes: str = "Yes"
    """Answer that counts as 1."""
    no: str = "No"
    """Answer that counts as 0."""


@dataclass(frozen=True)
class TextBatcher:
    """Turns texts into right-padded batches of a model's ids and runs `read` on each."""

    model: nn.Module
    tokenizer: Any
    max_length: int
    batch_size: int

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template, which then writes the special tokens too."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat(self, messages: list[dict[str, str]], *, ask: bool) -> str:
        """The messages in the model's own chat template; their plain text where it has none."""
        if self.has_template:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
        return "".join(message["content"] for message in messages)

    def run(self, texts: Sequence[str], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
        """Scores of the texts. `read` maps ids (b,L) and mask (b,L) to scores (b,).

        Raises:
            RewardError: a score is not finite; names the sample.
        """
        scores: list[float] = []
        with torch.no_grad():
            for start in range(0, len(texts), self.batch_size):
                scores += self.forward(texts[start : start + self.batch_size], read).cpu().tolist()
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                raise RewardError(f"the reward model gave {score} for sample {index}: {texts[index][:200]!r}")
        return scores

    def forward(self, texts: Sequence[str], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Scores (b,) float32 of the texts in one pass, differentiable."""
        specials, bos = not self.has_template, beginning_token(self.tokenizer)
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            given = self.tokenizer(list(texts), add_special_tokens=specials)["input_ids"]
        else:  # one of the user's own, of which no more is asked than to take one text
            given = [self.tokenizer(text, add_special_tokens=specials)["input_ids"] for text in texts]
        encoded = [begin_once(list(tokens), bos)[-self.max_length :] for tokens in given]
        if not all(encoded):
            raise RewardError(
                f"the reward model's tokenizer makes no token of {texts[encoded.index([])]!r}: a prompt and its "
                "response must not both be empty"
            )
        width = max(map(len, encoded))
        ids = torch.zeros(len(texts), width, dtype=torch.int64)
        mask = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        device = next(self.model.parameters()).device
        return read(ids.to(device), mask.to(device)).float()


class ClassifierScorer:
    """A sequence classifier's score, read at the last attended token for decoder models.

    Args:
        batcher: the model, its tokenizer and limits.
        label: output whose probability is the score; None takes the one output as it is.

    Raises:
        ModelError: the model has several outputs and `label` does not name one.
    """

    def __init__(self, batcher: TextBatcher, label: int | None) -> None:
        self.batcher = batcher
        self.label = label
        outputs = getattr(getattr(batcher.model, "config", None), "num_labels", 1)
        if outputs > 1 and (label is None or not 0 <= label < outputs):
            raise ModelError(
                f"the reward model has {outputs} outputs; say which one is the score: "
                f"RewardController(model, label=0..{outputs - 1})"
            )

    def score(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> list[float]:
        """Scores of the responses, one a response."""
        return self.batcher.run(self._texts(prompts, responses), self._read)

    def differentiable(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Scores (B,) of the responses in one pass, for learning from them."""
        return self.batcher.forward(self._texts(prompts, responses), self._read)

    def _texts(self, prompts: Sequence[str], responses: Sequence[str]) -> list[str]:
        return [
            self.batcher.chat(
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], ask=False
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def _read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self._logits(ids, mask)
        if logits.dim() == 1:
            return logits
        return logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Outputs (b, labels). Decoders are pooled by the mask: their own pooling looks for the pad id."""
        model: Any = self.batcher.model
        if hasattr(model, "score") and hasattr(model, "base_model"):
            logits: torch.Tensor = model.score(last_states(model.base_model, ids, mask))
            return logits
        output = model(input_ids=ids, attention_mask=mask)
        logits = output.logits if hasattr(output, "logits") else output
        return logits


class JudgeScorer:
    """A causal language model's probability of answering yes rather than no.

    Args:
        batcher: the model, its tokenizer and limits.
        judge: the question and the two answers.

    Raises:
        ModelError: the two answers begin with the same token, so that the model cannot tell them apart.
    """

    def __init__(self, batcher: TextBatcher, judge: Judge) -> None:
        self.batcher = batcher
        self.judge = judge
        first = [batcher.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in (judge.yes, judge.no)]
        if not all(first) or first[0][0] == first[1][0]:
            raise ModelError(f"the answers {judge.yes!r} and {judge.no!r} begin with the same token; choose others")
        self.answers = (first[0][0], first[1][0])

    def score(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> list[float]:
        """Scores of the responses in [0, 1], one a response."""
        return self.batcher.run(self._texts(prompts, responses), self._read)

    def differentiable(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Scores (B,) of the responses in one pass, for learning from them."""
        return self.batcher.forward(self._texts(prompts, responses), self._read)

    def _texts(self, prompts: Sequence[str], responses: Sequence[str]) -> list[str]:
        texts = []
        for prompt, response in zip(prompts, responses, strict=True):
            question = self.judge.question.replace("{prompt}", prompt).replace("{response}", response)
            texts.append(self.batcher.chat([{"role": "user", "content": question}], ask=True))
        return texts

    def _read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = last_logits(self.batcher.model, ids, mask)
        yes, no = self.answers
        return torch.sigmoid(logits[:, yes] - logits[:, no])


def is_causal(model: nn.Module) -> bool:
    """Whether the model ends in a language-modelling head rather than a score head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None and not hasattr(model, "score")
