"""The committed front-end. That it is what the sources give is checked by `npm run check`, which `make test` runs."""

import json
import re
from pathlib import Path

import rlkit_widgets

STATIC = Path(rlkit_widgets.__file__).parent / "static"
JS = Path(__file__).parents[2] / "widgets" / "js"


def test_the_bundle_loads_nothing_from_elsewhere() -> None:
    script = (STATIC / "dashboard.js").read_text(encoding="utf-8")
    style = (STATIC / "dashboard.css").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`)]+", script + style)) == set()
    assert not re.search(
        r"\bimport\s*\(|\bimport\s*[{*\"']|\bfetch\s*\(|XMLHttpRequest|new WebSocket|importScripts", script
    )
    assert "url(" not in style
    assert "@import" not in style


def test_the_bundle_is_small_and_carries_the_licence_of_what_it_holds() -> None:
    assert (STATIC / "dashboard.js").stat().st_size < 120_000
    assert (STATIC / "dashboard.css").stat().st_size < 20_000
    licences = (STATIC / "THIRD_PARTY_LICENSES.txt").read_text(encoding="utf-8")
    for name in json.loads((JS / "package.json").read_text(encoding="utf-8"))["dependencies"]:
        assert name.lower() in licences.lower()


def test_versions_are_pinned_exactly() -> None:
    package = json.loads((JS / "package.json").read_text(encoding="utf-8"))
    versions = {**package["dependencies"], **package["devDependencies"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values()), versions
    lock = json.loads((JS / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name, version in versions.items():
        assert lock[f"node_modules/{name}"]["version"] == version


def test_colours_follow_the_notebook_and_suit_every_eye() -> None:
    script = (STATIC / "dashboard.js").read_text(encoding="utf-8").upper()
    style = (STATIC / "dashboard.css").read_text(encoding="utf-8")
    for colour in ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"):
        assert colour in script
    assert "data-jp-theme-light" in style
    assert "--jp-layout-color1" in style
    assert "JPTHEMELIGHT" in script
    assert "prefers-reduced-motion" in style
