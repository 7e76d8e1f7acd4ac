"""Recipes: a trainer without the memory that its state brings back, and never garbage in its place."""

import copy
import io
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.errors import CheckpointError, RunError
from rlkit.runs.recipe import dump_recipe, load_recipe, read_header


class Model:
    """Tied weights, buffers saved and not saved, an optimizer with moments, views, a generator."""

    def __init__(self) -> None:
        self.embed = torch.nn.Embedding(1000, 64)
        self.head = torch.nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(64)
        self.norm.register_buffer("frequencies", torch.linspace(0, 1, 8), persistent=False)
        self.optimizer = torch.optim.AdamW(self.embed.parameters(), lr=0.1)
        self.row = self.embed.weight.data[3]
        self.table = torch.randn(100, 1000)
        self.generator = torch.Generator().manual_seed(7)
        self.empty = torch.empty(0, 3)

    def learn(self) -> None:
        self.optimizer.zero_grad()
        self.head(self.embed(torch.arange(5))).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        parts = {"embed": self.embed, "head": self.head, "norm": self.norm, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("embed", "head", "norm", "optimizer"):
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))


def write(tmp_path: Path, trainer: Any, *states: Any) -> Path:
    path = tmp_path / "recipe.pkl"
    path.write_bytes(dump_recipe(trainer, *states))
    return path


def test_a_model_comes_back_and_learns_on_as_before(tmp_path: Path):
    model = Model()
    model.learn()
    state = copy.deepcopy(model.state())
    path = write(tmp_path, model, model.state())
    recipe = load_recipe(path)
    back = recipe.trainer
    back.load(state)
    recipe.check_filled()
    for one in (model, back):
        one.learn()
    assert torch.equal(back.embed.weight, model.embed.weight)
    assert torch.equal(back.table, model.table)
    assert torch.equal(back.norm.frequencies, model.norm.frequencies)
    assert torch.equal(torch.rand(3, generator=back.generator), torch.rand(3, generator=model.generator))
    assert back.empty.shape == (0, 3)


def test_ties_and_views_stay(tmp_path: Path):
    model = Model()
    recipe = load_recipe(write(tmp_path, model, model.state()))
    back = recipe.trainer
    assert back.head.weight is back.embed.weight
    assert back.optimizer.param_groups[0]["params"][0] is back.embed.weight
    back.load(model.state())
    assert torch.equal(back.row, model.row)
    with torch.no_grad():
        back.embed.weight[3] = 5.0
    assert back.row.tolist() == [5.0] * 64
    assert isinstance(back.head.weight, torch.nn.Parameter)


def test_weights_are_left_out_and_what_no_state_holds_travels(tmp_path: Path):
    model = Model()
    model.learn()
    weights = 3 * model.embed.weight.nbytes  # and two moments
    small = len(dump_recipe(model, model.state()))
    whole = len(dump_recipe(model))
    assert small < model.table.nbytes + 20_000
    assert whole - small > 0.99 * weights


def test_a_recipe_without_its_state_is_an_error(tmp_path: Path):
    model = Model()
    path = write(tmp_path, model, model.state())
    with pytest.raises(CheckpointError, match=r"shape \(.*\) and type torch.* was not restored"):
        load_recipe(path).check_filled()
    recipe = load_recipe(path)
    recipe.trainer.embed.load_state_dict(model.embed.state_dict())
    with pytest.raises(CheckpointError, match=r"\(64,\)"):  # the norm was forgotten
        recipe.check_filled()


def test_a_tensor_restored_in_part_is_an_error(tmp_path: Path):
    trainer = SimpleNamespace(weight=torch.ones(100))
    recipe = load_recipe(write(tmp_path, trainer, {"weight": trainer.weight}))
    recipe.trainer.weight[:90] = 1.0
    with pytest.raises(CheckpointError, match="not restored"):
        recipe.check_filled()
    recipe.trainer.weight[90:] = 1.0
    recipe.check_filled()


def test_a_big_tensor_restored_in_part_is_an_error(tmp_path: Path):
    trainer = SimpleNamespace(weight=torch.ones(3000, 1000))
    recipe = load_recipe(write(tmp_path, trainer, {"weight": trainer.weight}))
    recipe.trainer.weight[:2999] = 1.0
    with pytest.raises(CheckpointError, match="not restored"):
        recipe.check_filled()
    recipe.trainer.weight[2999] = 1.0
    recipe.check_filled()


def test_what_the_trainer_dropped_need_not_be_restored(tmp_path: Path):
    trainer = SimpleNamespace(weight=torch.ones(100))
    recipe = load_recipe(write(tmp_path, trainer, {"weight": trainer.weight}))
    recipe.trainer.weight = torch.zeros(3)
    recipe.check_filled()


def test_memory_that_a_state_holds_in_part_travels_whole(tmp_path: Path):
    base = torch.arange(10.0)
    trainer = SimpleNamespace(base=base, column=torch.arange(6.0).reshape(3, 2))
    recipe = load_recipe(write(tmp_path, trainer, {"base": base[:9], "column": trainer.column[:, 0]}))
    recipe.check_filled()
    assert torch.equal(recipe.trainer.base, base)
    assert torch.equal(recipe.trainer.column, trainer.column)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_tensors_travel_bit_by_bit(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype).T
    trainer = SimpleNamespace(tensor=tensor, leaf=torch.ones(2, requires_grad=True))
    back = load_recipe(write(tmp_path, trainer)).trainer
    assert torch.equal(back.tensor, tensor)
    assert back.tensor.stride() == tensor.stride()
    assert back.leaf.requires_grad


def test_attributes_of_parameters_travel(tmp_path: Path):
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    weight.role = "embedding"  # type: ignore[attr-defined]
    back = load_recipe(write(tmp_path, SimpleNamespace(weight=weight), {"weight": weight})).trainer
    assert back.weight.role == "embedding"
    assert not back.weight.requires_grad


def test_functions_of_a_cell_travel_by_value(tmp_path: Path):
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("factor = 3\ndef reward(response):\n    return factor * len(response)", scope)
    path = write(tmp_path, SimpleNamespace(reward=scope["reward"]))
    scope["factor"] = 100
    assert load_recipe(path).trainer.reward("ab") == 6


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def reward(response: str) -> float:
        with lock:
            return len(response)

    trainer = SimpleNamespace(rewards=[{"brevity": reward}], note="fine")
    with pytest.raises(RunError, match=r"'lock', which reward\(\) uses, .*cannot be sent to a background process"):
        dump_recipe(trainer)
    with pytest.raises(RunError, match=r"trainer\.deep\['log'\]"):
        dump_recipe(SimpleNamespace(deep={"log": io.TextIOWrapper(io.BytesIO())}))


def test_the_header_is_read_without_running_anything(tmp_path: Path):
    path = write(tmp_path, SimpleNamespace())
    assert set(read_header(path)) == {"python", "sys_path", "cwd"}
    with pytest.raises(RunError, match="is missing"):
        read_header(tmp_path / "gone.pkl")
    path.write_bytes(pickle.dumps(SimpleNamespace()))
    with pytest.raises(RunError, match="is damaged: unexpected"):
        read_header(path)
    path.write_bytes(b"")
    with pytest.raises(RunError, match="is damaged"):
        read_header(path)


def test_another_python_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, SimpleNamespace())
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    with pytest.raises(RunError, match=r"cannot be read by Python 3\.99; use Python 3\.\d+"):
        load_recipe(path)


def test_a_damaged_recipe_is_an_error(tmp_path: Path):
    path = write(tmp_path, SimpleNamespace(table=list(range(100))))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RunError, match="cannot be put together"):
        load_recipe(path)
