"""Configuration objects with the names and arguments of MagiAttention."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum

from megatron_magi.api.configuration import HeadShape, KeyConfig, with_head_shape
from megatron_magi.checks import flag, instance, int_at_least
from megatron_magi.compat.algorithms import (
    ALGORITHM_OF,
    DispatchAlg,
    OverlapAlg,
    OverlapAlgType,
    UniformOverlapAlg,
)
from megatron_magi.compat.cost_factors import cost_factors, with_cost_factors
from megatron_magi.config import MagiConfig


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
class DistAttnConfig(KeyConfig):
    """Everything that a key is configured with. What is not given is chosen, not left simple:
    the overlap degree, for one, comes from a cost model."""

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=_chosen_overlap)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)

    def __post_init__(self) -> None:
        instance(self.dispatch_config, "dispatch_config", DispatchConfig)
        instance(self.overlap_config, "overlap_config", OverlapConfig)
        instance(self.grpcoll_config, "grpcoll_config", GrpCollConfig)

    def to_magi_config(self, default: MagiConfig, head_shape: HeadShape) -> MagiConfig:
        """See `KeyConfig.to_magi_config`."""
        tokens, stages = self.dispatch_config, self.overlap_config
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

    @classmethod
    def from_magi_config(cls, config: MagiConfig) -> DistAttnConfig:
        """The part of ``config`` that a `DistAttnConfig` can express; the inverse of `to_magi_config`."""
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
        return cls(tokens, stages)
