"""Masks by a line of text: a name or a user's function, with arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.mask.named import NAMED
from megatron_magi.mask.slices import AttnMask

_ONE_TOKEN = Microbatch(np.zeros((1, 1), np.int64), np.array([0, 1]))


@dataclass(frozen=True)
class MaskSource:
    """Makes the mask of a microbatch. Made by `parse`; equal where the text is.

    Attributes:
        text: what it was made from.
        option: what messages call it.
    """

    text: str
    option: str = field(default="mask", compare=False)
    function: Callable[..., AttnMask] = field(default=NAMED["documents"], compare=False, repr=False)
    arguments: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, option: str = "mask") -> MaskSource:
        """From ``NAME``, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, each with ``:KEY=VALUE,...`` if it has arguments.

        Names are those of `megatron_magi.mask.named`. Values are integers, ``true``, ``false``, or text. The function
        is called with a `Microbatch` and the arguments and returns an `AttnMask`.

        Raises:
            ValueError: the text is none of these, the function cannot be imported or does not take the arguments,
                or those of a name have values that it refuses.
        """
        parts = text.split(":")
        if parts[0] in NAMED:
            function, rest = NAMED[parts[0]], parts[1:]
        else:
            if len(parts) < 2 or not parts[1].isidentifier():
                known = ", ".join(sorted(NAMED))
                raise ValueError(f"{option}: {text!r} is none of {known}, nor MODULE:FUNCTION or FILE.py:FUNCTION")
            function, rest = load_function(":".join(parts[:2]), option), parts[2:]
        arguments = _arguments(rest, text, option)
        try:
            inspect.signature(function).bind(None, **arguments)
        except TypeError as error:
            takes = inspect.signature(function)
            if parts[0] in NAMED:
                names = ", ".join(str(p).replace("'", "") for p in list(takes.parameters.values())[1:])
                raise ValueError(
                    f"{option}: {text!r}: {error}; {parts[0]} takes {names or 'no arguments'}"
                    + (f", as in {parts[0]}:{names.partition(':')[0]}=VALUE" if names else "")
                ) from None
            raise ValueError(
                f"{option}: {text!r}: {error}; it is called with a batch and {arguments or 'nothing else'}, "
                f"and takes {takes.replace(return_annotation=takes.empty)}"
            ) from None
        source = cls(text, option, function, tuple(arguments.items()))
        if arguments and parts[0] in NAMED:
            source(_ONE_TOKEN)  # refuses values now and not when the first batch is planned
        return source

    @property
    def is_named(self) -> bool:
        """It is one of `megatron_magi.mask.named`, not a function of the user's."""
        return self.function in NAMED.values()

    def __reduce__(self) -> tuple:
        # By its text: a function of a file is in no module that another process could import.
        return MaskSource.parse, (self.text, self.option)

    def __call__(self, batch: Microbatch) -> AttnMask:
        """The mask of ``batch``.

        Raises:
            ValueError: the function raised, returned something else, or a mask of another number of tokens.
        """
        try:
            mask = self.function(batch, **dict(self.arguments))
        except Exception as error:
            raise ValueError(f"{self.option}: {self.text!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(mask, AttnMask):
            raise ValueError(f"{self.option}: {self.text!r} returned a {type(mask).__name__}, expected an AttnMask")
        sizes = (mask.total_seqlen_q, mask.total_seqlen_k)
        if sizes != (batch.total_seqlen, batch.total_seqlen):
            raise ValueError(
                f"{self.option}: {self.text!r} returned a mask of {sizes[0]} queries and {sizes[1]} keys, the "
                f"microbatch has {batch.batch_size} sequences of {batch.seqlen} tokens, one after another"
            )
        return mask


class LayerMasks:
    """Which layer attends by which mask, all over one dispatch of the tokens.

    Args:
        default: the mask of layers that have no other.
        layers: for each layer its mask, None for the default.
        windows: for each layer a window (left, right) inside documents, which takes the place of its mask, or None.
    """

    def __init__(
        self,
        default: MaskSource | None = None,
        layers: Sequence[MaskSource | None] = (),
        windows: Sequence[tuple[int, int] | None] = (),
    ) -> None:
        self._default = MaskSource("documents") if default is None else default
        self._layers = tuple(layers)
        windows = tuple(windows)
        count = max(len(self._layers), len(windows), 1)
        of_layers = [self.of(i + 1, windows[i] if i < len(windows) else None) for i in range(count)]
        self._primary = self._default if self._default in of_layers else of_layers[0]
        self._sources = tuple(dict.fromkeys([self._primary, *of_layers]))

    @property
    def primary(self) -> MaskSource:
        """The mask for which tokens are balanced: the default one if a layer has it, else that of the first layer."""
        return self._primary

    @property
    def sources(self) -> tuple[MaskSource, ...]:
        """All masks of the layers, without repetition, the primary one first."""
        return self._sources

    def of(self, layer_number: int, window: tuple[int, int] | None = None) -> MaskSource:
        """The mask of a layer, counted from 1, that has a window or none."""
        if window is not None:
            return window_source(*window)
        own = self._layers[layer_number - 1] if layer_number <= len(self._layers) else None
        return self._default if own is None else own


def window_source(left: int, right: int) -> MaskSource:
    """A window inside documents; -1 is unlimited."""
    arguments = (("left", left), ("right", right))
    return MaskSource(f"sliding_window:left={left},right={right}", "window_size", NAMED["sliding_window"], arguments)


def load_function(text: str, option: str) -> Callable:
    """The function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names.

    Raises:
        ValueError: there is none. An error in the module itself is passed on.
    """
    place, _, name = text.partition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"{option}: {text!r}: there is no file {place}")
        spec = importlib.util.spec_from_file_location(f"_magi_{Path(place).stem}", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"{option}: {text!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{option}: {text!r}: {place} has no function {name!r}")
    return function


def _arguments(rest: Sequence[str], text: str, option: str) -> dict[str, Any]:
    if not rest:
        return {}
    out: dict[str, Any] = {}
    for item in ":".join(rest).split(","):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier() or name in out:
            raise ValueError(f"{option}: {text!r}: expected KEY=VALUE once for each KEY, got {item!r}")
        if re.search(r":\w+=", value):
            raise ValueError(f"{option}: {text!r}: arguments are separated by commas, got {item!r}")
        out[name] = _value(value)
    return out


def _value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
