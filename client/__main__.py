"""The command line: `python -m client --help`."""

from client.cli import app

app(prog_name="python -m client")
