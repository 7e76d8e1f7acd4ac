"""Reward terms: Python functions called with what their parameters ask for, and their answers checked."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import math
import numbers
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from rlkit.errors import RewardError
from rlkit.rewards.calls import Call

__all__ = ["RewardFunction"]

_PLURAL = ("prompts", "responses", "response_lengths", "finish_reasons")
_SINGULAR = ("prompt", "response", "response_length", "finish_reason")
_ACCEPTED = (
    "Accepted are f(responses, ...) or f(prompts, responses, ...), called once with lists; f(response, ...) or "
    "f(prompt, response, ...), called per sample; and f(x) with one parameter, called per sample with the response. "
    "In place of ... may stand names of dataset columns and **columns, and response_length(s) or finish_reason(s)"
)
_LARGEST = 3.4028234663852886e38
"""Rewards are stored as float32, in which anything larger is infinite."""


class RewardFunction:
    """A Python callable as a reward term: called with what its parameters name, and its answer checked.

    Parameter names decide. `prompts` and `responses` (lists) make it batched: called once, it returns one number per
    sample. `prompt` and `response` (text) make it per-sample: called for each, it returns one number. Further
    parameters are columns of the dataset (lists when batched); one with a default may be missing there. `**columns`
    takes all columns that are left. A single required parameter of any other name receives the response, per sample.
    `response_length` (tokens, int) and `finish_reason` ("stop" or "length") may be asked for per sample, and
    `response_lengths` and `finish_reasons` batched.

    A number is a bool, int, float, numpy scalar or 0-d tensor, finite. None means that the function abstains from the
    sample: the term has no part in it and the sample none in the term's statistics.

    Args:
        fn: a function, method, partial, or object with `__call__`, also an `async` one.
        name: of the term; the function's own name when left out ("reward" for a lambda).

    Raises:
        RewardError: the parameters are none of the above, or the name is empty or holds a slash.
    """

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        if not callable(fn):
            raise RewardError(f"a reward function must be callable, given {type(fn).__name__} {fn!r:.80}")
        self.fn = fn
        self.name = _name_of(fn) if name is None else name
        if not self.name or "/" in self.name:
            raise RewardError(f"a reward term needs a name without '/', given {self.name!r}")
        self.is_async = any(map(inspect.iscoroutinefunction, (fn, getattr(fn, "__call__", None))))  # noqa: B004
        """True when calls are to be awaited."""
        self.source_hash = _source_hash(fn)
        """16 hex digits that change with the function's source."""
        self._read_parameters()

    def _read_parameters(self) -> None:
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError(f"cannot read the parameters of reward {self.name!r}. {_ACCEPTED}") from error
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in named]
        required = [p.name for p in named if p.default is p.empty]
        plural, singular = ([n for n in names if n in known] for known in (_PLURAL, _SINGULAR))
        shown = ", ".join(str(p) for p in parameters)
        self._lone = ""
        if plural and singular:
            raise RewardError(f"reward {self.name!r}({shown}) mixes lists {plural} and single {singular}. {_ACCEPTED}")
        if not plural and not singular:
            if len(required) != 1:
                near = [m for n in names for m in difflib.get_close_matches(n, (*_PLURAL, *_SINGULAR), n=1)]
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RewardError(
                    f"reward {self.name!r}({shown}) takes neither responses nor response.{hint} {_ACCEPTED}"
                )
            self._lone = required[0]
        positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY and p.name != self._lone]
        if any(name in required for name in positional) or (self._lone and positional):
            raise RewardError(f"reward {self.name!r}({shown}) has positional-only parameters {positional}. {_ACCEPTED}")
        self._positional = any(p.name == self._lone and p.kind is p.POSITIONAL_ONLY for p in named)
        self.batched = bool(plural)
        """True when the function is called once with lists."""
        self._parameters = {n: n in required for n in names if n != self._lone}
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.needs = frozenset(_SINGULAR[_PLURAL.index(n)] if self.batched else n for n in (*plural, *singular))
        """Which of "prompt", "response", "response_length" and "finish_reason" the function asks for."""

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        response_lengths: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> list[float]:
        """The reward of each sample, NaN where the function abstained. Args and errors: see `RewardCaller.score`."""
        from rlkit.rewards.caller import RewardCaller

        with RewardCaller(self) as caller:
            return caller.score(prompts, responses, columns, response_lengths, finish_reasons)

    def calls(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        response_lengths: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> list[Call]:
        """The calls to make: one a sample, or when batched one for every `batch_size` samples.

        Raises:
            RewardError: the arguments differ in length, or the function asks for something that is not there.
        """
        given = {"prompts": prompts, "responses": responses, "response_lengths": response_lengths}
        texts = {name: list(v) for name, v in (given | {"finish_reasons": finish_reasons}).items() if v is not None}
        count = len(responses)
        if odd := {
            name: len(values) for name, values in (*texts.items(), ("columns", columns)) if len(values) != count
        }:
            raise RewardError(
                f"reward {self.name!r} needs one entry per sample of everything, given {count} responses and {odd}"
            )
        if not count:
            return []
        known = texts if self.batched else {_SINGULAR[_PLURAL.index(name)]: v for name, v in texts.items()}
        arguments = self._arguments(known, columns)
        if self.batched:
            size = batch_size or count
            return [self._batch_call(arguments, range(i, min(i + size, count)), count) for i in range(0, count, size)]
        calls = []
        for index, response in enumerate(responses):
            named = {name: values[index] for name, values in arguments.items()}
            if self._lone and not self._positional:
                named = {self._lone: response} | named
            positional = (response,) if self._positional else ()
            calls.append(Call(range(index, index + 1), named, positional, f" on sample {index}"))
        return calls

    def _batch_call(self, arguments: Mapping[str, list[Any]], rows: range, count: int) -> Call:
        named = {name: values[rows.start : rows.stop] for name, values in arguments.items()}
        return Call(rows, named, where="" if len(rows) == count else f" on samples {rows[0]} to {rows[-1]}")

    def _arguments(self, texts: Mapping[str, list[Any]], columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """List of values per parameter name."""
        own = _PLURAL if self.batched else _SINGULAR
        present = {name: None for row in columns for name in row if name not in own}
        wanted = [n for n in self._parameters if n not in texts and (n in present or self._parameters[n])]
        for name in wanted:
            if name in own:
                raise RewardError(
                    f"reward {self.name!r} asks for {name!r}, which was not given with these responses; pass it along, "
                    "or give the parameter a default"
                )
            if name not in present:
                known = ", ".join(map(repr, present)) or "none"
                raise RewardError(
                    f"reward {self.name!r} asks for a column {name!r} that the data lacks (columns: {known}). Rename "
                    f"the parameter, give it a default, or add the column. {_ACCEPTED}"
                )
        if self._takes_rest:
            wanted += [n for n in present if n not in (*wanted, *_PLURAL, *_SINGULAR, self._lone)]
        given = {name: values for name, values in texts.items() if name in self._parameters}
        return given | {name: [row.get(name) for row in columns] for name in wanted}

    def numbers(self, call: Call, answer: Any) -> list[float | RewardError]:
        """The rewards in the answer to a call, NaN where it abstains; an error for a sample whose entry is no reward.

        Raises:
            RewardError: the answer as a whole has the wrong type or length.
        """
        if not self.batched:
            return [self._number(answer, call.rows[0])]
        listed = answer.tolist() if hasattr(answer, "tolist") else answer
        count = len(call.rows)
        if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
            raise RewardError(
                f"reward {self.name!r} returned {type(answer).__name__} {answer!r:.80}; expected a list of {count}"
            )
        if len(listed) != count:
            raise RewardError(
                f"reward {self.name!r} returned {len(listed)} rewards for {count} samples; expected one per sample, "
                "None where it abstains"
            )
        return [self._number(value, index) for index, value in zip(call.rows, listed, strict=True)]

    def _number(self, value: Any, index: int) -> float | RewardError:
        if value is None:
            return math.nan
        plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        try:
            number = float(plain) if isinstance(plain, numbers.Real) else None
        except OverflowError:
            number = math.inf
        if number is None or not abs(number) <= _LARGEST:
            kind = "" if isinstance(plain, numbers.Real) else f"{type(value).__name__} "
            return RewardError(
                f"reward {self.name!r} returned {kind}{value!r:.80} for sample {index}; expected a finite number, or "
                "None to abstain"
            )
        return number

    def __repr__(self) -> str:
        return f"RewardFunction({self.name!r}, batched={self.batched}, source_hash={self.source_hash!r})"


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = str(getattr(fn, "__name__", type(fn).__name__))
    return "reward" if name == "<lambda>" else name


def _source_hash(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    try:
        text = textwrap.dedent(inspect.getsource(target))
    except (OSError, TypeError):
        code = getattr(fn, "__code__", None)
        text = _code_text(code) if code is not None else f"{target.__module__}.{target.__qualname__}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_text(code: CodeType) -> str:
    """What a code object does, without memory addresses, for functions whose source cannot be found."""
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
