"""Ranges, mask types and configuration objects with the names and arguments of MagiAttention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from megatron_magi.checks import flag, instance, int_array, int_at_least, integer
from megatron_magi.compat.algorithms import (
    ALGORITHM_OF,
    DispatchAlg,
    OverlapAlg,
    OverlapAlgType,
    UniformOverlapAlg,
)
from megatron_magi.compat.cost_factors import cost_factors, with_cost_factors
from megatron_magi.compat.ranges import AttnRanges
from megatron_magi.config import CostModel, MagiConfig
from megatron_magi.mask import AttnRange, MaskType


class AttnMaskType(Enum):
    """The four mask types by name; see `megatron_magi.mask.MaskType` for what they mean."""

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    def to_int_type(self) -> int:
        """The number that kernels and ``attn_type_map`` use."""
        return int(_NUMBER_OF[self])

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """The type of a number that kernels and ``attn_type_map`` use.

        Raises:
            ValueError: not 0, 1, 2 or 3.
        """
        known = integer(int_type, "int_type")
        if not 0 <= known <= 3:
            raise ValueError(f"int_type: expected 0, 1, 2 or 3, got {known}")
        return _NAME_OF[MaskType(known)]


_NUMBER_OF = {
    AttnMaskType.FULL: MaskType.FULL,
    AttnMaskType.CAUSAL: MaskType.CAUSAL,
    AttnMaskType.INVCAUSAL: MaskType.INV_CAUSAL,
    AttnMaskType.BICAUSAL: MaskType.BI_CAUSAL,
}

_NAME_OF = {number: name for name, number in _NUMBER_OF.items()}

_NUMBER_BY_NAME = {key: int(number) for name, number in _NUMBER_OF.items() for key in (name, name.value)}

AnyMaskType = str | int | AttnMaskType | MaskType
GeneralAttnMaskType = AnyMaskType | Sequence[AnyMaskType]
HeadShape = tuple[int | None, int | None, int | None]
"""num_heads_q, num_heads_kv and head_dim of a tensor-parallel rank; None where unknown."""

_SHAPE_NAMES = ("num_heads_q", "num_heads_kv", "head_dim")


def mask_types(attn_mask_type: GeneralAttnMaskType, num_slices: int) -> list[int]:
    """Numbers of the mask types, one a slice; a single type stands for all slices.

    Raises:
        ValueError: an unknown type, or another number of types than slices.
    """
    if hasattr(attn_mask_type, "tolist"):
        attn_mask_type = int_array(attn_mask_type, "attn_mask_type", ndim=attn_mask_type.ndim).tolist()
    if isinstance(attn_mask_type, str | int | AttnMaskType):
        return [_mask_type(attn_mask_type)] * num_slices
    if not isinstance(attn_mask_type, Sequence):
        raise ValueError(f"attn_mask_type: expected a type or a list of types, got {attn_mask_type!r}")
    if len(attn_mask_type) != num_slices:
        raise ValueError(f"attn_mask_type: {len(attn_mask_type)} types for {num_slices} ranges")
    return [_mask_type(t) for t in attn_mask_type]


def _mask_type(name: AnyMaskType) -> int:
    try:
        if isinstance(name, str | AttnMaskType):
            return _NUMBER_BY_NAME[name]
        return int(MaskType(integer(name, "attn_mask_type")))
    except (KeyError, ValueError):
        known = ", ".join(t.value for t in AttnMaskType)
        raise ValueError(f"attn_mask_type: expected one of {known}, got {name!r}") from None


def as_ranges(ranges: Iterable, name: str) -> AttnRanges:
    """``ranges`` as `AttnRanges`: an instance, pairs, or an ``[n, 2]`` tensor.

    Raises:
        ValueError: anything else, called ``name`` in the message.
    """
    if isinstance(ranges, AttnRanges) and all(isinstance(r, AttnRange) for r in ranges):
        return ranges
    if isinstance(ranges, str | bytes | Mapping | Set):
        raise ValueError(f"{name}: expected pairs (start, end), got {ranges!r}")
    return AttnRanges.from_ranges(ranges, name=name)


class AttnOverlapMode(Enum):
    """``STATIC``: the degree is given; ``DYNAMIC``: it is chosen by a cost model."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens are spread over ranks.

    Attributes:
        alg: the algorithm; the default of `MagiConfig` when None.
        chunk_size: tokens a chunk; chosen when None and not an argument of the key either.
        uneven_shard: shards may differ in length and nothing is padded.
    """

    alg: DispatchAlg | None = None
    chunk_size: int | None = None
    uneven_shard: bool = False

    def __post_init__(self) -> None:
        if self.alg is not None and type(self.alg) not in ALGORITHM_OF:
            known = ", ".join(c.__name__ for c in ALGORITHM_OF)
            raise ValueError(f"alg: expected an instance of one of {known}, got {self.alg!r}")
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", int_at_least(self.chunk_size, "chunk_size", 1))
        flag(self.uneven_shard, "uneven_shard")


@dataclass(frozen=True)
class OverlapConfig:
    """How communication hides behind compute.

    Attributes:
        enable: False fetches everything before any compute.
        mode: see `AttnOverlapMode`.
        degree: number of remote stages, with ``STATIC`` only; 0 is the same as ``enable=False``.
        dynamic_max_degree: the most that ``DYNAMIC`` may choose; no bound of its own when None.
        min_chunk_size, max_num_chunks, alg: no effect, rows are dealt to stages one by one.
        calc_cost_factor: microseconds that a rank computes on one (query, key) pair in the forward, over all
            heads; 1 leaves the rate of `CostModel`. Only ``DYNAMIC`` looks at it. See `get_calc_cost_factor`.
        comm_cost_factor: microseconds that receiving one row of k and v takes, likewise. See `get_comm_cost_factor`.
    """

    enable: bool = True
    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    dynamic_max_degree: int | None = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg | OverlapAlgType = field(default_factory=UniformOverlapAlg)
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    def __post_init__(self) -> None:
        flag(self.enable, "enable")
        instance(self.mode, "mode", AttnOverlapMode)
        if self.enable and (self.mode is AttnOverlapMode.STATIC) != (self.degree is not None):
            raise ValueError(
                f"degree: a number with mode STATIC, None with DYNAMIC, got {self.degree} with {self.mode}"
            )
        if self.degree is not None:
            int_at_least(self.degree, "degree", 0)
        if self.dynamic_max_degree is not None:
            int_at_least(self.dynamic_max_degree, "dynamic_max_degree", 1)
        for name in ("min_chunk_size", "max_num_chunks"):
            int_at_least(getattr(self, name), name, 1)
        for name in ("calc_cost_factor", "comm_cost_factor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected a positive number of microseconds, got {getattr(self, name)}")
        if not isinstance(self.alg, UniformOverlapAlg) and self.alg is not OverlapAlgType.UNIFORM:
            raise ValueError(f"alg: expected UniformOverlapAlg(), got {self.alg!r}")


def _chosen_overlap() -> OverlapConfig:
    return OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=None)


@dataclass(frozen=True)
class GrpCollConfig:
    """Sizes of the buffers of native communication kernels: no effect, as ours grow with need."""

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            int_at_least(getattr(self, f.name), f.name, 0, most=1 << 62)


@dataclass(frozen=True)
class DistAttnConfig:
    """Everything that a key is configured with. What is not given is chosen, not left simple:
    the overlap degree, for one, comes from a cost model."""

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=_chosen_overlap)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)

    def __post_init__(self) -> None:
        instance(self.dispatch_config, "dispatch_config", DispatchConfig)
        instance(self.overlap_config, "overlap_config", OverlapConfig)
        instance(self.grpcoll_config, "grpcoll_config", GrpCollConfig)


def magi_config(
    given: DistAttnConfig | MagiConfig | None,
    default: MagiConfig,
    chunk_size: int | None,
    pad_size: int | None,
    head_shape: HeadShape,
) -> MagiConfig:
    """The configuration that ``given`` stands for.

    Args:
        given: a `MagiConfig` is used as it is, but for chunk size and padding.
        default: what fields have that ``given`` does not know.
        chunk_size: tokens a chunk, the argument of a key.
        pad_size: tokens of padding, the argument of a key.
        head_shape: query heads, key heads and head dimension, for the cost model; None is unknown.

    Raises:
        ValueError: ``chunk_size`` or ``pad_size`` was given twice, differently.
    """
    given = DistAttnConfig() if given is None else given
    if isinstance(given, MagiConfig):
        config = given
    elif isinstance(given, DistAttnConfig):
        config = _from_compat(given, default, head_shape)
    else:
        raise ValueError(f"dist_attn_config: expected DistAttnConfig or MagiConfig, got {type(given).__name__}")
    for name, value, least in (("chunk_size", chunk_size, 1), ("pad_size", pad_size, 0)):
        if value is None:
            continue
        value = int_at_least(value, name, least)
        if getattr(config.dispatch, name) not in (None, value):
            raise ValueError(f"{name}: {value}, but the configuration says {getattr(config.dispatch, name)}")
        config = replace(config, dispatch=replace(config.dispatch, **{name: value}))
    return config


def _from_compat(given: DistAttnConfig, default: MagiConfig, head_shape: HeadShape) -> MagiConfig:
    tokens, stages = given.dispatch_config, given.overlap_config
    dispatch = replace(default.dispatch, chunk_size=tokens.chunk_size, uneven_shard=tokens.uneven_shard)
    if tokens.alg is not None:
        dispatch = replace(dispatch, algorithm=ALGORITHM_OF[type(tokens.alg)])
    overlap = replace(default.overlap, degree=stages.degree if stages.enable else 0)
    if stages.dynamic_max_degree is not None:
        overlap = replace(overlap, max_degree=stages.dynamic_max_degree)
    config = with_head_shape(replace(default, dispatch=dispatch, overlap=overlap), head_shape)
    # Factors are times of the whole shape, so they become rates after it is known.
    cost = with_cost_factors(config.overlap.cost, stages.calc_cost_factor, stages.comm_cost_factor)
    return replace(config, overlap=replace(config.overlap, cost=cost))


def dist_attn_config_of(config: MagiConfig) -> DistAttnConfig:
    """The part of ``config`` that a `DistAttnConfig` can express; `magi_config` is its inverse."""
    alg = next((alg() for alg, name in ALGORITHM_OF.items() if name == config.dispatch.algorithm), None)
    tokens = DispatchConfig(alg, config.dispatch.chunk_size, config.dispatch.uneven_shard)
    degree, max_degree = config.overlap.degree, config.overlap.max_degree
    calc_cost_factor, comm_cost_factor = cost_factors(config.overlap.cost)
    stages = OverlapConfig(
        enable=degree != 0,
        mode=AttnOverlapMode.DYNAMIC if degree is None else AttnOverlapMode.STATIC,
        degree=degree,
        dynamic_max_degree=max_degree,
        calc_cost_factor=calc_cost_factor,
        comm_cost_factor=comm_cost_factor,
    )
    return DistAttnConfig(tokens, stages)


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
