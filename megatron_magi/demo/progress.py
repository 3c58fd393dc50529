"""One line that tells how far a run is: rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

_BAR_WIDTH = 24


class Progress:
    """Shows the steps of a run.

    Args:
        title: what is running.
        num_steps: steps in all.
        stream: where to write; standard output when None.
    """

    def __init__(self, title: str, num_steps: int, stream: TextIO | None = None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        self._write(f"{self._title:>12}  starting ...", last=not self._live)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._stream.write("\n")

    def step(self, record: dict[str, Any], tokens_per_s: float) -> None:
        """Show the step of ``record``, which has its ``iteration`` and ``lm loss``."""
        done = record["iteration"]
        if not self._live and done not in (1, self._num_steps) and done % 10:
            return
        filled = round(_BAR_WIDTH * done / self._num_steps)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        rate = f"{tokens_per_s:>9,.0f} tokens/s" if tokens_per_s else ""
        elapsed = time.monotonic() - self._begin
        text = f"{self._title:>12}  [{bar}] {done:>4}/{self._num_steps}  loss {record['lm loss']:.4f}"
        self._write(f"{text}  {elapsed:>4.0f} s{rate:>20}", last=not self._live)

    def _write(self, text: str, *, last: bool) -> None:
        self._stream.write(f"{text}\n" if last else f"\r\x1b[K{text}")
        self._stream.flush()
