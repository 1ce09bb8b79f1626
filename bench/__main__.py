"""`python -m bench`: every measurement is a subcommand."""

from __future__ import annotations

import typer

from bench.doctor.cli import doctor
from bench.load.cli import load
from bench.modes.cli import modes
from bench.tune import tune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,  # they hold API keys
    help="Measure a Tidegate deployment.",
)
app.command()(load)
app.command()(modes)
app.command()(doctor)
app.command()(tune)


@app.callback()
def _bench() -> None:
    """Keeps the name of a subcommand necessary, however few there are."""


if __name__ == "__main__":
    app()
