"""The `replayssm` command and what stands behind its subcommands."""

from replayssm.cli.app import main, run

__all__ = ["main", "run"]
