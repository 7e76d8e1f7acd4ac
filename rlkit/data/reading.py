"""Reads prompts from lists, datasets and files, and turns them into token ids."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import DataError

__all__ = ["PromptEncoder", "begin_once", "beginning_token", "read_rows", "split_row"]


def beginning_token(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before every text; None where it puts none. Found out by two calls."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    framed, bare = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
    return bos if bos is not None and framed[:1] == [bos] and bare[:1] != [bos] else None


def begin_once(ids: list[int], bos: int | None) -> list[int]:
    """The ids with exactly one beginning token, however many the text and the tokenizer wrote; as they are for None."""
    if bos is None:
        return ids
    while ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids if ids[:1] == [bos] else [bos, *ids]


class PromptEncoder:
    """Turns a text or a chat into the text to read and the token ids.

    Args:
        tokenizer: of the policy. Whether it uses a beginning-of-sequence token, and whether it appends an end token, is
            found out by a call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        framed, bare = self._ids("a"), self._ids("a", add_special_tokens=False)
        eos = getattr(tokenizer, "eos_token_id", None)
        self._bos = beginning_token(tokenizer)
        self._end = eos if eos is not None and framed[-1:] == [eos] and bare[-1:] != [eos] else None

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self._tokenizer(text, **options)["input_ids"])

    def encode(self, index: int, prompt: Any) -> tuple[str, list[int]]:
        """Text and ids of prompt `index`. Raises DataError where the prompt is empty or not a chat of texts."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise DataError(f"prompt {index} is empty ({prompt!r}); a prompt needs at least one word. Drop the row")
            ids = self._ids(prompt)
            ids = ids[:-1] if self._end is not None and ids[-1:] == [self._end] else ids
            text = prompt
        else:
            text, ids = self._encode_chat(index, prompt)
        ids = begin_once(ids, self._bos)
        if not ids:
            raise DataError(f"prompt {index} has no tokens ({text!r:.80}); a prompt needs at least one. Drop the row")
        return text, ids

    def _encode_chat(self, index: int, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise DataError(
                    f"prompt {index} has a message {message!r:.80}; expected a dict with text under role and content"
                )
        if not any(message["content"].strip() for message in messages):
            raise DataError(f"prompt {index} is empty; a chat needs at least one message with content. Drop the row")
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f"prompt {index} is a chat, but the tokenizer has no chat template. Pass text prompts, or set "
                "tokenizer.chat_template"
            )
        rendered = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = messages[0]["content"] if len(messages) == 1 else "\n".join(lines)
        return text, self._ids(rendered, add_special_tokens=False)


def read_rows(prompts: Any, column: str) -> Iterator[Any]:
    """The rows of whatever was given: a sequence, a `datasets.Dataset`, or a file. Raises DataError otherwise."""
    if isinstance(prompts, str | Path):
        yield from _read_file(Path(prompts))
    elif isinstance(getattr(prompts, "column_names", None), list) and hasattr(prompts, "__len__"):
        yield from (prompts[index] for index in range(len(prompts)))
    elif isinstance(prompts, Sequence):
        if prompts and isinstance(prompts[0], Mapping) and "role" in prompts[0] and column not in prompts[0]:
            raise DataError("the prompts look like the messages of one chat; put the chat into a list: [messages]")
        yield from prompts
    else:
        raise DataError(
            f"cannot read prompts from a {type(prompts).__name__}; expected a list, a datasets.Dataset (of one split, "
            "not streamed), or the path of a .jsonl or .parquet file"
        )


def _read_file(path: Path) -> Iterator[Any]:
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"cannot read prompts from {str(path)!r}; expected a .jsonl or .parquet file, or a list of prompts"
        )
    if not path.is_file():
        raise DataError(f"the prompt file {str(path)!r} does not exist (looked in {Path.cwd()})")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(path).to_pylist()
        else:
            yield from _read_lines(path)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from error


def _read_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"line {number} of {str(path)!r} is not JSON: {error}") from error


def split_row(index: int, row: Any, column: str) -> tuple[str | list[Any], dict[str, Any]]:
    """(prompt, other columns) of a row in any of its forms."""
    columns: dict[str, Any] = {}
    prompt = row
    if isinstance(row, Mapping):
        if column not in row:
            raise DataError(f"row {index} has no column {column!r}; it has {sorted(map(str, row))}. Set prompt_column")
        prompt = row[column]
        columns = {str(name): value for name, value in row.items() if name != column}
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        return list(prompt), columns
    if not isinstance(prompt, str):
        raise DataError(f"prompt {index} is a {type(prompt).__name__}; expected text or a list of chat messages")
    return prompt, columns
