"""The command line."""

from wflmc.cli.app import main

__all__ = ["main"]
