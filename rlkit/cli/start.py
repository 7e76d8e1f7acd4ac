"""`rlkit run`: starts the trainer that a user's file makes, in the background or here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from rlkit.cli.script import execute, find_trainer
from rlkit.errors import ConfigError


def start(
    script: Path,
    arguments: Sequence[str],
    *,
    trainer: str | None,
    directory: Path | None,
    steps: int | None,
    track_metrics: tuple[str, ...],
    background: bool,
    replace: bool,
    watch: bool,
) -> None:
    """Execute the file, find its trainer, and start it in a run folder.

    Raises:
        ConfigError: the file holds no trainer, or the options exclude each other.
        RunError: the folder already holds a run, or the run did not come up.
    """
    if not background and (watch or replace):
        option = "--watch" if watch else "--replace"
        raise ConfigError(f"{option} is for runs that go on in the background; leave --foreground out")
    found: Any = find_trainer(execute(script, arguments), trainer)
    where = directory or Path("runs") / script.stem
    options: dict[str, Any] = {"track_metrics": track_metrics} if track_metrics else {}
    if not background:
        found.train(steps, str(where), **options)
        return
    if replace:
        options["replace"] = True
    run = found.start(str(where), steps, **options)
    typer.echo(f"started {where} ({run.status.get('state', 'running')}, process {run.status.get('pid', '?')})")
    typer.echo(f"  rlkit watch {where}\n  rlkit set {where} NAME=VALUE\n  rlkit stop {where}")
    if watch:
        from rlkit.cli.watch import watch as show

        show(where)
