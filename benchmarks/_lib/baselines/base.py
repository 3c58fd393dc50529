"""What the baselines share: who holds which tokens, and attention of some of them over others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._lib.cases import Case
from megatron_magi.backends.base import Program
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.options import make_options
from megatron_magi.operands.passes import BackwardInputs
from megatron_magi.ops.slice_passes import backward_pass, forward_pass, resolve_impl
from megatron_magi.plan.partition import shift


class Unsupported(Exception):
    """This way cannot do this mask, or not on so many ranks; the text says why."""


class Cluster:
    """The ranks of the default group, and groups of them, each made when it is first asked for, by all ranks."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._groups: dict[tuple, dist.ProcessGroup] = {}

    def table(self, num_columns: int) -> np.ndarray:
        """All ranks in rows of ``num_columns`` neighbours."""
        return np.arange(self.num_ranks).reshape(-1, num_columns)

    def group(self, table: np.ndarray, copy: int = 0) -> dist.ProcessGroup:
        """The ranks of this one's row of ``table``; those of another ``copy`` need not wait for each other."""
        key = table.tobytes(), table.shape, copy
        if key not in self._groups:
            options = None
            if dist.get_backend() == "nccl":  # what is fetched ahead is not to wait for kernels that fill the GPU
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            made = [dist.new_group(row.tolist(), pg_options=options) for row in table]
            self._groups[key] = next(group for group, row in zip(made, table, strict=True) if self.rank in row)
        return self._groups[key]

    @property
    def num_rows(self) -> int:
        """Rows of the table that is nearest to a square and not higher than wide."""
        return max(n for n in range(1, int(self.num_ranks**0.5) + 1) if self.num_ranks % n == 0)


class Baseline:
    """A way, ready for one mask on one rank.

    Args:
        case: the mask, over the whole sequence.
        cluster: the ranks.
        num_heads_kv: of the tensors that will come.
        impl: of `slice_attention`.

    Attributes:
        runs: tokens that this rank holds, int64 ``[n, 2]``, in the order of its rows, disjoint.
        note: next to its times.

    Raises:
        Unsupported: it cannot.
    """

    runs: np.ndarray
    note: str = ""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's tokens, ``[num_tokens, num_heads, head_dim]`` each; differentiable."""
        raise NotImplementedError


def zigzag(case: Case, num_parts: int) -> list[np.ndarray]:
    """Tokens of each part, ``[n, 2]`` each: every document in 2 * num_parts pieces, part i has pieces i and -1 - i.

    Raises:
        Unsupported: the mask is not full or causal in each document.
    """
    if not case.plain or case.window is not None:
        raise Unsupported("zigzag is for full and causal masks and documents")
    return zigzag_of(document_bounds(case), num_parts)


def document_bounds(case: Case) -> np.ndarray:
    """First token of each document and the one after its last, ``[n, 2]``; the whole where there are none."""
    ends = np.cumsum(case.doc_lengths or (case.length,))
    return np.stack([np.append(0, ends[:-1]), ends], axis=1)


def zigzag_of(documents: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """`zigzag` of documents ``[n, 2]``, in their order."""
    starts, ends = documents.T
    cuts = starts[:, None] + (ends - starts)[:, None] * np.arange(2 * num_parts + 1) // (2 * num_parts)
    pieces = np.stack([cuts[:, :-1], cuts[:, 1:]], axis=2)  # [document, piece, 2]
    return [bd.merge_ranges(pieces[:, [i, -1 - i]].reshape(-1, 2))[0] for i in range(num_parts)]


def split(runs: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Consecutive parts of runs, of equal length but for one token."""
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    cuts = ends[-1] * np.arange(num_parts + 1) // num_parts
    i, part = bd.cut_intervals(ends - (runs[:, 1] - runs[:, 0]), ends, cuts[:-1], cuts[1:])
    offset = (runs[:, 1] - ends)[i]
    low = np.maximum(runs[i, 0], cuts[part] + offset)
    high = np.minimum(runs[i, 1], cuts[part + 1] + offset)
    return [np.stack([low, high], axis=1)[part == p] for p in range(num_parts)]


def num_tokens(runs: np.ndarray) -> int:
    """Tokens of runs."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def bands_between(mask: AttnMask, rows: np.ndarray, keys: np.ndarray, key_place: int = 0) -> np.ndarray:
    """What the tokens of runs ``rows`` see of those of runs ``keys``, in the coordinates of where they are kept.

    Args:
        key_place: where the keys begin.
    """
    bands = mask.bands
    i, row = bd.cut_intervals(bands[:, bd.Q0], bands[:, bd.Q1], rows[:, 0], rows[:, 1])
    bands = bands[i]
    bands[:, bd.Q0] = np.maximum(bands[:, bd.Q0], rows[row, 0])
    bands[:, bd.Q1] = np.minimum(bands[:, bd.Q1], rows[row, 1])
    i, key = bd.cut_intervals(bands[:, bd.K0], bands[:, bd.K1], keys[:, 0], keys[:, 1])
    bands, row = bands[i], row[i]
    bands[:, bd.K0] = np.maximum(bands[:, bd.K0], keys[key, 0])
    bands[:, bd.K1] = np.minimum(bands[:, bd.K1], keys[key, 1])
    by_q, by_k = (np.cumsum(runs[:, 1] - runs[:, 0]) - runs[:, 1] for runs in (rows, keys))
    shift(bands, by_q[row], by_k[key] + key_place)
    return bd.tighten(bands)


class Block:
    """Attention over the keys of one place: the kernels, and what their calls have in common."""

    def __init__(self, bands: np.ndarray, impl: str) -> None:
        self.bands, self._impl = np.array(bands), impl
        self.bands.setflags(write=False)  # so that its digest is remembered
        self._program: Program | None = None

    def _kernels(self, q: Tensor, v: Tensor) -> tuple:
        module = resolve_impl(self._impl, q, v)
        if module.programs is not None and self._program is None:
            makers = module.programs.new_makers()
            self._program = module.programs.of_plan(self.bands, v.shape[0], makers, None, False, None)
        return make_options(q, None, 0.0, False, 0), module, {} if self._program is None else {"program": self._program}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``, merged with those before; a new out has ``dtype``."""
        options, module, hints = self._kernels(q, v)
        return forward_pass((q, k, v), self.bands, options, module, None, False, dtype, into, **hints)[:2]

    def backward(
        self, dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], lse: Tensor, delta: Tensor, dq: Tensor | None, **shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``; dq is added to where it is given, the others are new, in the dtype of q."""
        options, module, hints = self._kernels(qkv[0], qkv[2])
        given, dtype = (dq, None, None), qkv[0].dtype
        inputs = BackwardInputs(*qkv, dout, lse, delta)
        return backward_pass(inputs, self.bands, options, module, given, dtype, **hints, **shared)


def start_dq(
    qkv: tuple[Tensor, Tensor, Tensor], blocks: list[Block], num_keys: list[int], impl: str
) -> tuple[Tensor | None, dict]:
    """dq to be given to the backward of each of these blocks, and what else to give.

    The kernels add up what several blocks give in one place where they can; else it is kept wide.
    """
    q, _, v = qkv
    if len(blocks) == 1:
        return None, {}
    module, options = resolve_impl(impl, q, v), make_options(q, None, 0.0, False, 0)
    if module.sums_meet(*qkv, [b.bands for b in blocks], num_keys, options):
        return torch.empty_like(q, memory_format=torch.contiguous_format), {"shared": module.shared_sums(len(blocks))}
    return torch.zeros_like(q, dtype=accumulate_dtype(q.dtype), memory_format=torch.contiguous_format), {}


def exchange(
    tensors: Sequence[Tensor], rows: int, to: int, source: int, group: dist.ProcessGroup
) -> tuple[list[Tensor], list[dist.Work]]:
    """Starts sending tensors to a rank of the group and receiving the like with ``rows`` rows from another."""
    received = [t.new_empty((rows, *t.shape[1:])) for t in tensors]
    to, source = (dist.get_global_rank(group, r) for r in (to, source))
    calls = [dist.P2POp(dist.isend, t, to, group) for t in tensors]
    calls += [dist.P2POp(dist.irecv, t, source, group) for t in received]
    return received, dist.batch_isend_irecv(calls)
