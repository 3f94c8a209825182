"""`megatrain bench --calibrate`: this machine's rates, shown and kept."""

from pathlib import Path

import typer

from megatrain.errors import UserError
from megatrain.preflight import check_scratch

TAKEN = {"calibrate", "disk_path"}


def check_calibrate(context: typer.Context) -> None:
    """Either a model is given, or --calibrate, and with that nothing that it would not use.

    Raises:
        UserError: otherwise.
    """
    asked = "bench --calibrate" if context.params["calibrate"] else "bench"
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    if not context.params["calibrate"]:
        if "model" not in given:
            change = "give a model's directory, or --calibrate to measure this machine"
            raise UserError(asked=asked, found="no model", change=change)
        return
    if "model" in given:
        found, change = f"a model too ({context.params['model']})", "give one of them"
        raise UserError(asked=asked, found=found, change=change)
    if unused := sorted(given - TAKEN):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        change = "leave them out; --disk-path is all that it takes"
        raise UserError(
            asked=asked, found=f"options that it would not use ({names})", change=change
        )


def calibrate_here(disk_path: str | None) -> None:
    """Measure, print, keep."""
    folder = Path(disk_path or ".")
    check_scratch(folder)
    typer.echo("measuring this machine, for up to two minutes; nothing else should run", err=True)
    from megatrain.engine.calibration import calibrate, in_lines
    from megatrain.engine.kept_rates import store

    found = calibrate(folder, lambda words: typer.echo(words, err=True))
    for line in in_lines(found):
        typer.echo(line)
    typer.echo(f"(the disk is that of {found.disk.path})")
    typer.echo(f"kept in {store(found)}; to forget them delete it")
