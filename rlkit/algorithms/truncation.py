"""Which distribution a token was drawn from: temperature, then top-k, then top-p, then the rest renormalised.

One rule for whoever samples and whoever scores. With x the logits divided by the temperature and p = softmax(x):

    top-k  keeps the k most likely tokens (Fan et al. 2018);
    top-p  keeps, of these, the smallest set whose renormalised probabilities add up to top_p (Holtzman et al. 2020).

Both cut at a logit, so that tokens which are as likely as the last one kept are kept as well, and the set depends on
the logits alone and not on the order of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.errors import ConfigError, DataError

__all__ = ["Kind", "Sampled", "least_kept"]

_TOP_P_SLACK = 1e-6
"""Sums of float32 probabilities of a set that reaches top_p exactly may fall short by this much."""
_FEW = 1024
"""Tokens that nearly always hold the mass of top_p, looked at before the whole vocabulary is sorted on a CPU."""


def least_kept(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The least logit that truncation keeps: a token stays when its own is not below.

    Args:
        scaled: (N, V) logits divided by the temperature, float32 or float64; -inf excludes a token.
        top_k: number of tokens to keep; 0 for all.
        top_p: mass to keep of what top-k left, above 0; 1 for all.

    Returns:
        (N, 1), of the dtype of the logits. Rows are independent: a row gives the same bits in any batch.
    """
    vocabulary = scaled.shape[-1]
    width = min(top_k or vocabulary, vocabulary)
    first = min(width, _FEW) if width == vocabulary and scaled.device.type == "cpu" and top_p < 1 else width
    values = scaled.topk(first, dim=-1).values  # falling
    if top_p >= 1:
        return values[:, -1:]
    weights = (scaled - values[:, :1]).exp_()
    if width < vocabulary:
        weights.masked_fill_(scaled < values[:, -1:], 0.0)
    wanted = weights.sum(-1, keepdim=True, dtype=torch.float64) * (_single(top_p) - _TOP_P_SLACK)
    least, reached = _least_reaching(values, wanted)
    if first < width and (left := (~reached).nonzero().squeeze(1).tolist()):
        least[left] = _least_reaching(scaled[left].topk(width, dim=-1).values, wanted[left])[0]
    return least


def _least_reaching(values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 1) the last of the values (N, K) needed for a mass (N, 1), and (N,) whether they have that mass.

    The values fall, and the first of a row weighs 1.
    """
    weights = (values - values[:, :1]).exp_()
    mass = weights.cumsum(-1, dtype=torch.float64)
    dropped = mass - weights >= wanted
    dropped[:, 0] = False
    return values.masked_fill(dropped, float("inf")).amin(-1, keepdim=True), mass[:, -1] >= wanted.squeeze(1)


@dataclass(frozen=True)
class Kind:
    """Rows that were sampled alike."""

    rows: Tensor | None
    """(M,) int64, which rows; None for all of them."""
    temperature: float
    top_k: int
    top_p: float

    @property
    def is_greedy(self) -> bool:
        """The most likely token was taken: a distribution of one token."""
        return self.temperature == 0

    def truncates(self, vocabulary: int) -> bool:
        """Whether some of so many tokens cannot be drawn."""
        return 0 < self.top_k < vocabulary or self.top_p < 1


@dataclass(frozen=True)
class Sampled:
    """The distribution that rows were drawn from; each value is one number for all rows, or one a row.

    Values a row may take a handful of different settings in all: rows of the same settings are computed together.
    """

    temperature: float | Tensor = 1.0
    """Above 0, or (B,) float32 at least 0: 0 marks greedy rows, whose distribution is one token of log-prob 0."""
    top_k: int | Tensor = 0
    """Number of tokens kept, or (B,) int64; 0 keeps all."""
    top_p: float | Tensor = 1.0
    """Mass kept, above 0 and at most 1, or (B,) float32; 1 keeps all."""

    @classmethod
    def of(cls, given: Sampled | float) -> Sampled:
        """What was given; a number is a temperature at which nothing is cut off."""
        return given if isinstance(given, Sampled) else cls(given)

    def rows(self, where: Tensor | slice) -> Sampled:
        """The description of some rows.

        Args:
            where: rows as a slice, (M,) int64 or (B,) bool; or (B, T) bool, for one row a true position, row by row.
        """

        def chosen(value: Tensor) -> Tensor:
            if isinstance(where, slice):
                return value[where]
            index = where.to(value.device)
            return value.unsqueeze(1).expand(index.shape)[index] if index.ndim == 2 else value[index]

        parts = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return Sampled(**{k: chosen(value) if isinstance(value, Tensor) else value for k, value in parts.items()})

    def alike(self) -> Sampled:
        """The same, with a number in place of values a row that are all equal; a temperature of 0 stays a row's."""
        parts = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        spread = {name: value for name, value in parts.items() if isinstance(value, Tensor) and value.numel()}
        if not spread:
            return self
        device = next(iter(spread.values())).device
        ends = [end.double().to(device) for value in spread.values() for end in value.aminmax()]
        for name, (least, most) in zip(spread, torch.stack(ends).view(-1, 2).tolist(), strict=True):
            if least == most and (least > 0 or name != "temperature"):
                parts[name] = int(least) if name == "top_k" else least
        return Sampled(**parts)

    def kinds(self, shape: torch.Size) -> list[Kind]:
        """The rows of each setting, once they are laid out in one line.

        Args:
            shape: of the rows; values a row must have it.

        Raises:
            DataError: a value a row has another shape.
            ConfigError: a value that no distribution has.
        """
        parts = (self.temperature, self.top_k, self.top_p)
        spread = [part for part in parts if isinstance(part, Tensor)]
        if bad := [tuple(part.shape) for part in spread if part.shape != shape]:
            raise DataError(f"settings of the sampler have shape {bad[0]}; expected one a row, {tuple(shape)}")
        if not spread:
            temperature, top_k, top_p = (float(part) for part in parts)
            return [_kind(None, temperature, top_k, top_p, least_temperature=None)]
        device = spread[0].device
        code, tables = torch.zeros(shape.numel(), dtype=torch.int64, device=device), []
        for part in parts:
            line = torch.as_tensor(part, dtype=torch.float64, device=device).expand(shape).reshape(-1)
            values, place = torch.unique(line, return_inverse=True)
            tables.append(values.tolist())
            code = code * len(values) + place
        codes, kind_of = torch.unique(code, return_inverse=True)
        found = []
        for number, left in enumerate(codes.tolist()):
            left, third = divmod(left, len(tables[2]))
            first, second = divmod(left, len(tables[1]))
            rows = None if len(codes) == 1 else (kind_of == number).nonzero().squeeze(1)
            setting = tables[0][first], tables[1][second], tables[2][third]
            found.append(_kind(rows, *setting, least_temperature=0.0))
        return found


def _kind(rows: Tensor | None, temperature: float, top_k: float, top_p: float, least_temperature: float | None) -> Kind:
    if not temperature > 0 and temperature != least_temperature:
        raise ConfigError(f"temperature must be above 0, given {temperature!r}")
    if top_k < 0:
        raise ConfigError(f"top_k must be 0 (all tokens) or a number of tokens, given {top_k!r}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1 (all tokens), given {top_p!r}")
    return Kind(rows, temperature, int(top_k), top_p)


def _single(value: float) -> float:
    """Rounded to float32, as values a row are stored."""
    return torch.tensor(value, dtype=torch.float32).item()
