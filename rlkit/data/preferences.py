"""Preference pairs: a prompt with a better and a worse answer, read, tokenised once, and drawn in shuffled epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.data.epochs import Epochs, RowSource, fingerprint
from rlkit.data.reading import PromptEncoder, read_rows
from rlkit.errors import ConfigError, DataError

__all__ = ["PreferenceRow", "PreferenceSource"]

_SHAPES = (
    'expected {"prompt": ..., "chosen": ..., "rejected": ...} with texts or lists of chat messages, or '
    '{"chosen": messages, "rejected": messages} of two chats that begin alike'
)


@dataclass(frozen=True)
class PreferenceRow:
    """One pair as drawn from a source. The ids of both answers follow the same prompt ids and end with the end token.

    Attributes:
        index: its row in the source.
        prompt, chosen, rejected: what people read.
        prompt_ids, chosen_ids, rejected_ids: token ids, unpadded.
        columns: the other columns of the row.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    chosen: str
    chosen_ids: list[int]
    rejected: str
    rejected_ids: list[int]
    columns: dict[str, Any]


class PreferenceSource(RowSource[PreferenceRow]):
    """Pairs in shuffled epochs, with a state that resumes exactly.

    A row is `{"prompt", "chosen", "rejected"}`, each a text or a list of chat messages (answers: what the assistant
    says), or `{"chosen", "rejected"}` of two whole chats, whose common beginning is the prompt. Prompt and answers are
    tokenised apart, so that no token spans the boundary and both answers follow the same ids. What is learned from is
    the answer and one end token, on the text and the chat path alike.

    Args:
        pairs: list of rows; a `datasets.Dataset`; or the path of a .jsonl or .parquet file with such rows.
        tokenizer: of the policy; must have an end token.
        seed: decides the order.
        max_length: tokens of a prompt with one of its answers at most, the end token included.
        max_prompt_length: longest prompt in tokens; None leaves it to `max_length`.
        shuffle: false keeps the rows in order in every epoch.

    Raises:
        DataError: no rows, a row of another form, an empty prompt or answer, equal answers, or one that is too long
            (row, length and limit are named).
    """

    def __init__(
        self,
        pairs: Any,
        tokenizer: Any,
        seed: int,
        max_length: int,
        max_prompt_length: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if max_length < 2:
            raise ConfigError(f"max_length must leave room for a prompt and an answer, given {max_length}")
        encoder = _PairEncoder(tokenizer, max_length, max_prompt_length or max_length)
        rows = [encoder.encode(index, row) for index, row in enumerate(read_rows(pairs, "chosen"))]
        identity = fingerprint([r.prompt_ids, r.chosen_ids, r.rejected_ids] for r in rows)
        super().__init__(rows, Epochs(len(rows), seed, identity, shuffle=shuffle, what="pair"))


class _PairEncoder:
    """From a row in any of its forms to ids, with the limits checked."""

    def __init__(self, tokenizer: Any, max_length: int, max_prompt_length: int) -> None:
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise DataError("the tokenizer has no end token, so an answer would not teach where to stop; set eos_token")
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._max_length, self._max_prompt_length = max_length, max_prompt_length

    def encode(self, index: int, row: Any) -> PreferenceRow:
        prompt, answers, columns = _take_apart(index, row)
        text, ids = self._prompts.encode(index, prompt)
        encoded = {side: self._answer(index, side, prompt, answer) for side, answer in answers.items()}
        if len(ids) > self._max_prompt_length:
            raise DataError(
                f"pair {index}: its prompt has {len(ids)} tokens, more than the limit of {self._max_prompt_length}. "
                "Shorten or drop the pair, or raise max_prompt_length if the model's context allows"
            )
        for side, (_, answer_ids) in encoded.items():
            if len(ids) + len(answer_ids) > self._max_length:
                raise DataError(
                    f"pair {index}: its prompt has {len(ids)} tokens and its {side} answer {len(answer_ids)}, together "
                    f"more than the limit of {self._max_length}. Shorten or drop the pair"
                )
        if encoded["chosen"][1] == encoded["rejected"][1]:
            raise DataError(f"pair {index}: chosen and rejected are the same answer, so it teaches nothing; drop it")
        return PreferenceRow(index, text, ids, *encoded["chosen"], *encoded["rejected"], columns)

    def _answer(self, index: int, side: str, prompt: Any, answer: Any) -> tuple[str, list[int]]:
        """Text and ids of one answer, cut after its end token or given one."""
        chat = not isinstance(answer, str)
        text = "\n".join(message["content"] for message in answer) if chat else answer
        if not text.strip():
            raise DataError(f"pair {index}: its {side} answer is empty; drop the pair")
        written = self._in_template(index, side, prompt, answer) if chat else answer
        ids = list(self._tokenizer(written, add_special_tokens=False)["input_ids"])
        end = self._tokenizer.eos_token_id
        ids = ids[: ids.index(end) + 1] if end in ids else [*ids, end]
        return text, ids

    def _in_template(self, index: int, side: str, prompt: Any, answer: Any) -> str:
        """What the chat template writes after the prompt for these answer messages."""
        render = self._tokenizer.apply_chat_template
        before = str(render(list(prompt), tokenize=False, add_generation_prompt=True))
        whole = str(render([*prompt, *answer], tokenize=False))
        if not whole.startswith(before):
            raise DataError(
                f"pair {index}: with its {side} answer the chat template writes the prompt otherwise than before a "
                "new answer, so the answer cannot be told from the prompt; use a template that only adds to the end"
            )
        return whole[len(before) :]


def _take_apart(index: int, row: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(prompt, {"chosen", "rejected"}, other columns) of a row; prompt and answers are of one kind, text or chat."""
    if not isinstance(row, Mapping) or "chosen" not in row or "rejected" not in row:
        shown = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise DataError(f"pair {index} is {shown}; {_SHAPES}")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    columns = {str(name): value for name, value in row.items() if name not in ("prompt", "chosen", "rejected")}
    if prompt is None and _is_chat(chosen) and _is_chat(rejected):
        shared = _shared_beginning(chosen, rejected)
        if not shared:
            raise DataError(f"pair {index}: its two chats do not begin alike, so there is no prompt; {_SHAPES}")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if _is_chat(prompt):
        chosen, rejected = (_said(answer) for answer in (chosen, rejected))
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in (chosen, rejected)):
        return prompt, {"chosen": chosen, "rejected": rejected}, columns
    if all(_is_chat(part) for part in (prompt, chosen, rejected)):
        return list(prompt or ()), {"chosen": list(chosen), "rejected": list(rejected)}, columns
    parts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    kinds = ", ".join(f"{name}: {type(part).__name__}" for name, part in parts.items())
    raise DataError(f"pair {index} holds {kinds}; {_SHAPES}")


def _said(answer: Any) -> Any:
    """An answer to a chat, as messages where it is given as text."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _is_chat(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) == 0:
        return False
    return all(isinstance(m, Mapping) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)


def _shared_beginning(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Messages that both chats begin with; at least one is left of each."""
    limit = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(limit) if dict(chosen[i]) != dict(rejected[i])), max(limit, 0))
