"""Prompts: read from lists, datasets and files, tokenised once, and drawn in shuffled epochs that resume exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlkit.data.epochs import Epochs, RowSource, fingerprint
from rlkit.data.reading import PromptEncoder, read_rows, split_row
from rlkit.errors import ConfigError, DataError

__all__ = ["OPENINGS", "PromptRow", "PromptSource"]

OPENINGS: Final[tuple[str, ...]] = (
    "The film was",
    "Dinner at the new place was",
    "My first day at work was",
    "The hotel by the station is",
    "We opened the box and found",
    "The train arrived and",
    "Our neighbour's garden is",
    "The lecture this morning was",
    "After the long walk we felt",
    "The second chapter of the book is",
    "The soup they served was",
    "When the music started,",
    "The new phone turned out to be",
    "Last weekend at the lake was",
    "The people at the counter were",
    "Looking back at the trip, it was",
    "The match on Sunday was",
    "The room on the third floor has",
    "My sister said the concert was",
    "The repair of the roof was",
    "This morning the weather is",
    "The teacher read the essay and",
    "The bakery on the corner makes",
    "We waited for an hour and then",
)
"""Short neutral beginnings of sentences, for examples and for trainers that are given no prompts."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt as drawn from a source.

    Attributes:
        index: its row in the source.
        text: what reward functions and people read; see `PromptSource` for chats.
        ids: token ids, unpadded, as the policy reads them.
        columns: the other columns of the row; a chat adds its messages as "messages".
    """

    index: int
    text: str
    ids: list[int]
    columns: dict[str, Any]


class PromptSource(RowSource[PromptRow]):
    """Prompts in endless epochs, each in an order of its own that depends on the seed and the epoch only.

    A prompt is text or a chat, a list of {"role", "content"} messages. Text is tokenised as the tokenizer does by
    default; a chat goes through the tokenizer's chat template, ready for the assistant's answer. Either way there is
    exactly one beginning-of-sequence token if the tokenizer uses one, and no end token that the tokenizer added. The
    `text` of a chat is its only message, or "role: content" lines when there are several. Every prompt is checked here,
    so that a run does not stop at a bad one later.

    Args:
        prompts: list of text, of chats, or of dicts with the column `prompt_column`; a `datasets.Dataset`; or the path
            of a .jsonl or .parquet file with such rows.
        tokenizer: of the policy.
        seed: decides the order.
        max_prompt_length: longest prompt in tokens.
        shuffle: false keeps the rows in order in every epoch.
        prompt_column: name of the column that holds the prompt.

    Raises:
        DataError: no rows, a row without prompt, an empty prompt, one longer than the limit (row, length and limit are
            named), a chat without a chat template, or a file that cannot be read.
    """

    def __init__(
        self,
        prompts: Any,
        tokenizer: Any,
        seed: int,
        max_prompt_length: int,
        shuffle: bool = True,
        prompt_column: str = "prompt",
    ) -> None:
        if max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length must be at least 1 token, given {max_prompt_length}")
        encoder = PromptEncoder(tokenizer)
        rows = [split_row(i, row, prompt_column) for i, row in enumerate(read_rows(prompts, prompt_column))]
        epochs = Epochs(len(rows), seed, _fingerprint(rows), shuffle=shuffle)
        names = {name: None for _, columns in rows for name in columns}
        if any(not isinstance(prompt, str) for prompt, _ in rows):
            names["messages"] = None
        read: list[PromptRow] = []  # a column that some rows lack is None there
        for index, (prompt, columns) in enumerate(rows):
            text, ids = encoder.encode(index, prompt)
            if len(ids) > max_prompt_length:
                raise DataError(
                    f"prompt {index} has {len(ids)} tokens, more than the limit of {max_prompt_length}. Shorten or "
                    "drop it, or raise max_prompt_length if the model's context allows"
                )
            chat = {} if isinstance(prompt, str) else {"messages": prompt}
            read.append(PromptRow(index, text, ids, {**names, **chat, **columns}))
        super().__init__(read, epochs)


def _fingerprint(rows: Sequence[tuple[Any, dict[str, Any]]]) -> str:
    return fingerprint([prompt, sorted(columns.items(), key=lambda item: item[0])] for prompt, columns in rows)
