"""The configuration of a key, from what users give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache

from megatron_magi.checks import int_at_least
from megatron_magi.config import CostModel, MagiConfig

HeadShape = tuple[int | None, int | None, int | None]
"""num_heads_q, num_heads_kv and head_dim of a tensor-parallel rank; None where unknown."""

_SHAPE_NAMES = ("num_heads_q", "num_heads_kv", "head_dim")


class KeyConfig(ABC):
    """What a key can be configured with besides a `MagiConfig`: `DistAttnConfig` is one."""

    @abstractmethod
    def to_magi_config(self, default: MagiConfig, head_shape: HeadShape) -> MagiConfig:
        """The configuration that this stands for.

        Args:
            default: what fields have that this does not know.
            head_shape: query heads, key heads and head dimension, for the cost model; None is unknown.
        """


def magi_config(
    given: KeyConfig | MagiConfig | None,
    default: MagiConfig,
    chunk_size: int | None,
    pad_size: int | None,
    head_shape: HeadShape,
) -> MagiConfig:
    """The configuration that ``given`` stands for.

    Args:
        given: a `MagiConfig` is used as it is, but for chunk size and padding; None is ``default``.
        default: what fields have that ``given`` does not know.
        chunk_size: tokens a chunk, the argument of a key.
        pad_size: tokens of padding, the argument of a key.
        head_shape: query heads, key heads and head dimension, for the cost model; None is unknown.

    Raises:
        ValueError: ``chunk_size`` or ``pad_size`` was given twice, differently.
    """
    if given is None:
        config = with_head_shape(default, head_shape)
    elif isinstance(given, MagiConfig):
        config = given
    elif isinstance(given, KeyConfig):
        config = given.to_magi_config(default, head_shape)
    else:
        raise ValueError(f"dist_attn_config: expected DistAttnConfig or MagiConfig, got {type(given).__name__}")
    if chunk_size is None and pad_size is None:
        return config
    for name, value, least in (("chunk_size", chunk_size, 1), ("pad_size", pad_size, 0)):
        if value is None:
            continue
        value = int_at_least(value, name, least)
        if getattr(config.dispatch, name) not in (None, value):
            raise ValueError(f"{name}: {value}, but the configuration says {getattr(config.dispatch, name)}")
        config = replace(config, dispatch=replace(config.dispatch, **{name: value}))
    return config


@lru_cache(maxsize=64)  # keys of one model have one
def with_head_shape(config: MagiConfig, head_shape: HeadShape) -> MagiConfig:
    """``config`` with the numbers of ``head_shape`` that are not None in its cost model."""
    given = {name: n for name, n in zip(_SHAPE_NAMES, head_shape, strict=True) if n is not None}
    cost: CostModel = replace(config.overlap.cost, **given)
    return replace(config, overlap=replace(config.overlap, cost=cost))


def head_shape_of(num_heads_q: int | None, num_heads_kv: int | None, head_dim: int | None) -> HeadShape:
    """The three numbers as int; None is unknown.

    Raises:
        ValueError: one is no positive integer, or ``num_heads_kv`` does not divide ``num_heads_q``.
    """
    given = zip(_SHAPE_NAMES, (num_heads_q, num_heads_kv, head_dim), strict=True)
    shape = tuple(None if n is None else int_at_least(n, name, 1) for name, n in given)
    if shape[0] is not None and shape[1] is not None and shape[0] % shape[1]:
        raise ValueError(f"num_heads_q: expected a multiple of num_heads_kv, {shape[1]}, got {shape[0]}")
    return shape
