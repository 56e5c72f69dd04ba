"""Run the command line as `python -m penstock`."""

from penstock.cli.entry import run

run()
