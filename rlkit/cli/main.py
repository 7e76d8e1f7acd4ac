"""The command `rlkit`: one function a command; each loads what it needs when it is called."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlkit.errors import ConfigError, RlkitError

SINKS = ("tensorboard", "csv")

app = typer.Typer(
    name="rlkit",
    help="Reinforcement-learning post-training of language models: start, watch and steer runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder, such as runs/exp.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for the run's answer.")]


@app.command(context_settings={"allow_extra_args": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="The file that makes a trainer.")],
    trainer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The trainer, or the function that makes it, in the file.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the new run; runs/<script> when left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; the trainer's own when left out.")] = None,
    track_metrics: Annotated[
        str,
        typer.Option(
            "--track_metrics",
            "--track-metrics",
            help="Also write metrics to tensorboard, csv or both (tensorboard,csv; the flag alone means both).",
        ),
    ] = "",
    background: Annotated[
        bool, typer.Option("--background/--foreground", help="In a process of its own, or in this one.")
    ] = True,
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop an earlier run in that folder and keep it aside as DIR.1.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the live dashboard once the run is up.")] = False,
) -> None:
    """Start the trainer that a Python file makes. Arguments after -- go to the file."""
    from rlkit.cli.start import start

    start(
        script,
        context.args,
        trainer=trainer,
        directory=directory,
        steps=steps,
        track_metrics=parse_sinks(track_metrics),
        background=background,
        replace=replace,
        watch=watch,
    )


@app.command("ls")
def list_(root: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs")) -> None:
    """List the runs below a folder."""
    from rlkit.cli.listing import show_runs

    show_runs(root)


@app.command()
def watch(
    directory: RunDir,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    metrics: Annotated[
        str, typer.Option(help="What to plot: patterns with commas, such as 'reward/*,kl/*'; the key metrics if empty.")
    ] = "",
) -> None:
    """Show a live dashboard of a run in the terminal. q or Ctrl-C leaves; the run goes on."""
    from rlkit.cli.watch import watch as show

    show(directory, once=once, metrics=[part.strip() for part in metrics.split(",") if part.strip()])


@app.command()
def attach(
    directory: RunDir,
    summary: Annotated[bool, typer.Option("--summary", help="Only say where the run stands.")] = False,
) -> None:
    """Say where a run stands, then print its events as they come. Ctrl-C leaves; the run goes on."""
    from rlkit.cli.follow import follow

    follow(directory, summary_only=summary)


@app.command("set")
def set_(
    directory: RunDir,
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as lr=1e-6 reward_weights.brevity=0.5.")
    ],
    timeout: Timeout = 600.0,
) -> None:
    """Change live settings; waits until the run has applied or refused them (all or none)."""
    from rlkit.cli.steer import parse_changes

    _ask(directory, "set", parse_changes(changes), timeout)


@app.command()
def pause(directory: RunDir, timeout: Timeout = 600.0) -> None:
    """Let the run finish its step and wait there."""
    _ask(directory, "pause", {}, timeout)


@app.command()
def resume(directory: RunDir, timeout: Timeout = 600.0) -> None:
    """Let a paused run go on."""
    _ask(directory, "resume", {}, timeout)


@app.command()
def step(
    directory: RunDir,
    count: Annotated[int, typer.Argument(min=1, metavar="[N]", help="Steps to take.")] = 1,
    timeout: Timeout = 600.0,
) -> None:
    """Let a paused run take N steps and pause again."""
    _ask(directory, "step", {"n": count}, timeout)


@app.command()
def checkpoint(directory: RunDir, timeout: Timeout = 600.0) -> None:
    """Write a checkpoint at the next step boundary."""
    _ask(directory, "checkpoint", {}, timeout)


@app.command()
def stop(directory: RunDir, timeout: Timeout = 600.0) -> None:
    """Let the run finish its step, write a checkpoint and end; waits until it has."""
    from rlkit.cli.steer import wait_until_over

    _ask(directory, "stop", {}, timeout)
    typer.echo(wait_until_over(directory, timeout_s=timeout))


@app.command()
def doctor() -> None:
    """Say what is installed here, what is missing and what to do about it."""
    from rlkit.cli.doctor import doctor as examine

    raise typer.Exit(0 if examine() else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    path: Annotated[Path | None, typer.Argument(help="Notebook or folder; the examples when left out.")] = None,
) -> None:
    """Open JupyterLab on the example notebooks. Further arguments go to JupyterLab."""
    from rlkit.cli.lab import open_lab

    open_lab(path, context.args)


def _ask(directory: Path, kind: str, args: dict[str, object], timeout_s: float) -> None:
    from rlkit.cli.steer import request

    typer.echo(request(directory, kind, args, timeout_s=timeout_s))


def parse_sinks(text: str) -> tuple[str, ...]:
    """`"tensorboard,csv"` as a tuple. Raises ConfigError for a name that is none of `SINKS`."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"--track_metrics takes {' or '.join(SINKS)}, got {name!r}")
    return names


def fill_track_metrics(arguments: Sequence[str]) -> list[str]:
    """Give a `--track_metrics` that stands alone its meaning: both sinks."""
    out: list[str] = []
    for index, argument in enumerate(arguments):
        out.append(argument)
        if argument in ("--track_metrics", "--track-metrics"):
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            if following.startswith("-") or following.endswith(".py"):
                out.append(",".join(SINKS))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Errors of rlkit are one line on standard error and exit code 1."""
    try:
        app(args=fill_track_metrics(sys.argv[1:] if arguments is None else arguments))
    except RlkitError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
