"""A rank that runs a script; this module imports nothing of the package."""

import sys


def execute(rank: int, num_ranks: int, script: str) -> None:
    """``script`` as a program, which may use ``sys``."""
    exec(script, {"__name__": "__main__", "sys": sys})
