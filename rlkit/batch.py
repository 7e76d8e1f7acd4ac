"""The carrier of rollouts from generation to the loss.

Shape letters: B rollouts, P prompt width, T response width, L = P + T. Prompts are padded on the left and responses on
the right, so `generated_ids (B, L)` is a prompt block of P columns followed by a response block of T columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlkit.algorithms.truncation import Sampled
from rlkit.collate import DataCollector, PackedBatch, mask_from_lengths, resize_column
from rlkit.errors import DataError
from rlkit.fields import FIELDS, Field, field_for, require_field

__all__ = ["FIELDS", "DataCollector", "Field", "PackedBatch", "RolloutBatch", "field_for", "mask_from_lengths"]

Column: TypeAlias = Tensor | Sequence[Any]


class RolloutBatch:
    """Columns of B rollouts on a `tensordict.TensorDict`. Operations return a new batch and share unchanged tensors.

    Tensors are stored detached, all on the device of the first one. Text and object columns come back as lists.
    Example:

        batch = RolloutBatch({"input_ids": ids, "attention_mask": mask, "prompts": ["The film was"]})
        batch = batch.with_fields({"rewards": [0.5]})
        batch["rewards"], batch.rewards, "values" in batch

    Args:
        fields: name -> tensor, list of numbers, or list of text / objects, one entry per rollout.
        specs: descriptions of fields of your own, which `field_for` does not know.

    Raises:
        DataError: unknown name, wrong shape, dtype or length; the message names field, expected and given shape.
    """

    def __init__(self, fields: Mapping[str, Column], specs: Iterable[Field] = ()) -> None:
        if not fields:
            raise DataError("a RolloutBatch needs at least one field, given none")
        self._specs: dict[str, Field] = {}
        self._data = TensorDict({}, batch_size=[])
        self._set(fields, specs)

    def _set(self, fields: Mapping[str, Column], specs: Iterable[Field]) -> None:
        given = {spec.name: spec for spec in specs}
        found = {n: given.get(n) or self._specs.get(n) or require_field(n, self._specs) for n in fields}
        columns = {name: self._data.get(name) for name in self._specs}
        device = next((c.device for n, c in columns.items() if self._specs[n].is_tensor), None)
        for name, value in fields.items():
            columns[name] = _to_column(found[name], value, device)
            if device is None and found[name].is_tensor:
                device = columns[name].device
        self._specs = {**self._specs, **found}
        sizes = _bind_sizes(self._specs, {name: tuple(column.shape) for name, column in columns.items()})
        self._data = TensorDict(columns, batch_size=[sizes["B"]])

    @classmethod
    def _wrap(cls, data: TensorDict, specs: Mapping[str, Field]) -> "RolloutBatch":
        batch = cls.__new__(cls)
        batch._data, batch._specs = data, dict(specs)
        return batch

    def __getitem__(self, name: str) -> Any:
        if name not in self._specs:
            raise DataError(f"the batch has no field {name!r}; it has {', '.join(self.names)}")
        column = self._data.get(name)
        return column if isinstance(column, Tensor) else list(column.tolist())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._specs:
            raise AttributeError(f"RolloutBatch has neither an attribute nor a field {name!r}")
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        columns = (f"{n}{tuple(self._data.get(n).shape)} {spec.dtype}" for n, spec in self._specs.items())
        return f"RolloutBatch({', '.join(columns)})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, in the order they were added."""
        return tuple(self._specs)

    @property
    def specs(self) -> dict[str, Field]:
        """Description per field."""
        return dict(self._specs)

    @property
    def device(self) -> torch.device:
        """Device of the tensors; cpu when the batch holds none."""
        tensors = (self._data.get(name) for name, spec in self._specs.items() if spec.is_tensor)
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def batch_size(self) -> int:
        """B, the number of rollouts."""
        return int(self._data.batch_size[0])

    @property
    def prompt_width(self) -> int:
        """P, columns of the prompt block."""
        return self._width("P")

    @property
    def response_width(self) -> int:
        """T, columns of the response block."""
        return self._width("T")

    @property
    def full_attention_mask(self) -> Tensor:
        """(B, L) bool: true on real prompt tokens and on sampled tokens."""
        return torch.cat([self["attention_mask"], self["response_mask"]], dim=1)

    @property
    def position_ids(self) -> Tensor:
        """(B, L) int64: 0, 1, 2 ... over the real tokens of each row; 0 on left padding."""
        return (self.full_attention_mask.long().cumsum(1) - 1).clamp_min(0)

    @property
    def response_lengths(self) -> Tensor:
        """(B,) int64: sampled tokens per row."""
        mask: Tensor = self["response_mask"]
        return mask.sum(1)

    @property
    def drawn_at_random(self) -> Tensor:
        """(B,) bool: false for responses that took the likeliest token throughout; all true where nothing says so."""
        if "temperatures" not in self:
            return torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        temperatures: Tensor = self["temperatures"]
        return temperatures > 0

    def sampled(self, temperature: float = 1.0) -> Sampled:
        """What each row was sampled from, which its log-probs belong to.

        Args:
            temperature: of rows that the batch says nothing about, and of which no token is cut off.
        """
        if "temperatures" not in self:
            return Sampled(temperature)
        return Sampled(self["temperatures"], self["top_ks"], self["top_ps"])

    @property
    def reward_terms(self) -> dict[str, Tensor]:
        """Raw reward (B,) float32 per term, keyed by the term's name without `reward/`; NaN where it abstained."""
        return {name[7:]: self[name] for name in self.names if name.startswith("reward/")}

    def with_fields(self, fields: Mapping[str, Column], specs: Iterable[Field] = ()) -> "RolloutBatch":
        """A new batch with columns added or replaced. Args and errors as for the constructor."""
        batch = self._wrap(self._data, self._specs)
        batch._set(fields, specs)
        return batch

    def select(self, indices: Tensor | Sequence[int] | Sequence[bool] | slice) -> "RolloutBatch":
        """Rows by index (repeats allowed), by B booleans, or by slice, in the order given."""
        if isinstance(indices, slice):
            return self._wrap(self._data[indices], self._specs)
        index = torch.as_tensor(indices).cpu()
        size = self.batch_size
        if index.dtype == torch.bool:
            if index.shape != (size,):
                raise DataError(f"a row mask needs shape ({size},), given {tuple(index.shape)}")
            index = index.nonzero().squeeze(1)
        index = index.long() if index.numel() == 0 else index
        if index.ndim != 1 or index.is_floating_point() or (index.numel() and not _within(index, size)):
            raise DataError(f"row indices must be one list of ints within {-size}..{size - 1}, given {index.tolist()}")
        return self._wrap(self._data[index], self._specs)

    def split(self, size: int) -> list["RolloutBatch"]:
        """Consecutive pieces of `size` rows (the last may be smaller)."""
        if size < 1:
            raise DataError(f"split needs pieces of at least one row, given {size}")
        return [self._wrap(part, self._specs) for part in self._data.split(size)]

    @staticmethod
    def cat(batches: Sequence["RolloutBatch"], pad_token_id: int = 0) -> "RolloutBatch":
        """One batch with the rows of all, in order; narrower ones are padded (prompts left, responses right).

        Padding cells are False in masks, `pad_token_id` in token ids and 0 elsewhere.

        Raises:
            DataError: no batch given, or the batches do not hold the same fields.
        """
        if not batches:
            raise DataError("cat needs at least one batch, given none")
        first = batches[0]
        for number, batch in enumerate(batches):
            if odd := sorted(set(batch.names) ^ set(first.names)):
                raise DataError(f"cat needs batches with the same fields; batch {number} and batch 0 differ in {odd}")
        sizes = [b._sizes() for b in batches]
        prompt, response = (max(s[x] for s in sizes) if x in sizes[0] else None for x in "PT")
        parts = [b.resize(prompt, response, pad_token_id)._data.select(*first.names) for b in batches]
        return RolloutBatch._wrap(TensorDict.cat(parts), first._specs)

    def to(self, device: str | torch.device) -> "RolloutBatch":
        """The same batch with its tensors on `device`."""
        moved = {n: self._data.get(n).to(device) if s.is_tensor else self._data.get(n) for n, s in self._specs.items()}
        return self._wrap(TensorDict(moved, batch_size=self._data.batch_size), self._specs)

    def trim(self) -> "RolloutBatch":
        """Without the columns that are padding in every row: left of the prompts, right of the responses.

        At least one column of each block stays.
        """
        prompt = response = None
        if "attention_mask" in self and self.batch_size:
            prompt = max(self.prompt_width - int(self["attention_mask"].any(0).long().argmax()), 1)
        if "response_mask" in self and self.batch_size:
            used = self["response_mask"].any(0).nonzero()
            response = int(used.max()) + 1 if len(used) else min(self.response_width, 1)
        return self.resize(prompt, response)

    def resize(self, prompt_width: int | None, response_width: int | None, pad_token_id: int = 0) -> "RolloutBatch":
        """Pad or cut the prompt block at its left and the response block at its right; None keeps a width.

        Cutting drops cells without asking whether they are padding: use `trim` unless you know that they are.
        """
        sizes = self._sizes()
        old: dict[str, int] = {x: sizes[x] for x in ("P", "T") if x in sizes}
        asked: dict[str, int | None] = {"P": prompt_width, "T": response_width}
        new = {x: width if (wanted := asked[x]) is None else wanted for x, width in old.items()}
        if new == old:
            return self
        data = {name: self._data.get(name) for name in self.names}
        for name, spec in self._specs.items():
            if {"P", "T", "L"} & set(spec.dims):
                fill = pad_token_id if name in ("input_ids", "generated_ids") else 0
                data[name] = resize_column(data[name], spec.dims, old, new, fill)
        return self._wrap(TensorDict(data, batch_size=self._data.batch_size), self._specs)

    def _sizes(self) -> dict[str, int]:
        return _bind_sizes(self._specs, {name: tuple(self._data.get(name).shape) for name in self._specs})

    def _width(self, letter: str) -> int:
        sizes = self._sizes()
        if letter not in sizes:
            raise DataError(f"the batch has no field with a dimension {letter!r}; it has {', '.join(self.names)}")
        return sizes[letter]


def _within(index: Tensor, size: int) -> bool:
    return -size <= int(index.min()) and int(index.max()) < size


def _to_column(field: Field, value: Any, device: torch.device | None) -> Any:
    """The value as stored: a detached tensor on `device`, or a stack of non-tensor entries."""
    if not field.is_tensor:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            raise DataError(
                f"field {field.name!r} needs a list with one entry per rollout, given {type(value).__name__}"
            )
        if field.dtype == "text":
            for index, entry in enumerate(value):
                if not isinstance(entry, str):
                    raise DataError(f"field {field.name!r} holds text; entry {index} is a {type(entry).__name__}")
        return NonTensorStack(*[NonTensorData(entry) for entry in value])
    dtype = getattr(torch, field.dtype)
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"field {field.name!r} needs {field.dtype} numbers, given {value!r:.200}") from error
    if value.dtype != dtype:
        raise DataError(
            f"field {field.name!r} has dtype {field.dtype}, given {str(value.dtype).removeprefix('torch.')}; "
            f"convert it with .to(torch.{field.dtype})"
        )
    return value.detach() if device is None else value.detach().to(device)


def _bind_sizes(specs: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Size of each shape letter, checked to be the same in every field, and L = P + T."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, spec in specs.items():
        shape = shapes[name]
        want = ", ".join(f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in spec.dims)
        if len(shape) != len(spec.dims):
            raise DataError(f"field {name!r} needs shape ({want}), given {shape}")
        for letter, size in zip(spec.dims, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise DataError(
                    f"field {name!r} needs shape ({want}), given {shape}: "
                    f"{letter} is {sizes[letter]} in {owner[letter]!r}"
                )
            owner.setdefault(letter, name)
    if {"P", "L"} <= sizes.keys():
        sizes.setdefault("T", sizes["L"] - sizes["P"])
    if {"P", "T", "L"} <= sizes.keys() and sizes["L"] != sizes["P"] + sizes["T"]:
        raise DataError(
            f"field {owner['L']!r} needs L = P + T = {sizes['P']} + {sizes['T']} columns, given {sizes['L']}"
        )
    return sizes
