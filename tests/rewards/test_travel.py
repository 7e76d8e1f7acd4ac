"""How reward functions and their callers get into another process, and what cannot."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import cloudpickle
import pytest

from rlkit.errors import RewardError
from tests.rewards.calling import caller, pids, score

FACTOR = 2.0
_UNPICKLABLE = threading.Lock()


def of_this_module(response: str) -> float:
    """Uses a global as it is when called for, and tells whether its process knows this module."""
    return FACTOR + 100 * (__name__ in sys.modules)


def with_a_lock_of_its_module(response: str) -> float:
    with _UNPICKLABLE:
        return 3.0


def test_a_function_of_a_users_module_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    before = set(cloudpickle.list_registry_pickle_by_value())
    with caller(of_this_module, workers=1) as scorer:
        assert score(scorer, 1) == [5.0]
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_a_function_that_uses_what_cannot_be_pickled_of_its_module_travels_by_name() -> None:
    with caller(with_a_lock_of_its_module, workers=1) as scorer:
        assert score(scorer, 1) == [3.0]


def test_a_function_that_cannot_travel_is_refused_by_name() -> None:
    lock = threading.Lock()

    def locked(response: str) -> float:
        with lock:
            return 1.0

    with caller(locked, timeout=1) as scorer, pytest.raises(RewardError, match=r"'locked' cannot be sent.*lock"):
        score(scorer)


def test_a_function_that_cannot_be_loaded_there_is_refused_by_name() -> None:
    class Odd:
        def __call__(self, response: str) -> float:
            return 1.0

        def __reduce__(self) -> Any:
            return _missing, ()

    with caller(Odd(), timeout=1) as scorer, pytest.raises(RewardError, match="'Odd' cannot be loaded .*not there"):
        score(scorer)


def _missing() -> Any:
    raise ImportError("not there")


def test_a_caller_travels_without_its_processes() -> None:
    with caller(lambda response: len(response), workers=1) as scorer:
        assert score(scorer, 2) == [2.0, 2.0]
        data = cloudpickle.dumps(scorer)
        with pickle.loads(data) as copy:
            assert copy._calls is None
            assert score(copy, 2) == [2.0, 2.0]
            assert pids(copy) != pids(scorer)
