"""What the rest of the package knows of an implementation of attention: a `Backend`.

A backend computes passes over bands on one device. Distributed attention merges such passes over the keys of several
stages by their log-sum-exp, so `why_not`, `forward` and `backward` are all that a backend must have. It may offer more:

- `HostTables`: tables of a mask, made on the host, so that workers of a data loader prepare batches;
- `Programs`: both passes over a mask prepared once, for calls that differ in addresses alone, possibly over keys that
  other ranks send while the kernels run (`KeyTransfer`);
- `Capture`: tables of a mask at fixed addresses, for launches that a CUDA graph captures;
- `Sparse`: attention over lists of keys;
- `Latent`: the same over keys whose first elements are the values.

Nothing outside the folder of a backend imports it, except `megatron_magi.backends.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from megatron_magi.operands.merge import row_products
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.graph_capture import is_capturing

if TYPE_CHECKING:
    from megatron_magi.cuda.arriving import Arriving, StepRows
    from megatron_magi.cuda.launch_list import LaunchList, Step
    from megatron_magi.cuda.layout import Like
    from megatron_magi.operands.sparse_pattern import SparsePattern
    from megatron_magi.runtime.lru import LruCache

Kernels = list[tuple[str, tuple[str, ...]]]
"""Kernels to compile: source, relative to the folder of CUDA sources, and macros of each."""

WhyNot = Callable[[torch.device, torch.dtype, tuple[int, int]], str | None]
"""Why kernels do not take tensors of a device, dtype and head dims, as `Backend.why_not` says; None if they do."""


class ModelKind(NamedTuple):
    """What of a model's attention kernels are compiled for.

    Attributes:
        dtype: of q, k and v.
        dims: head dims of q and k, and of v.
        group: query heads of a key head.
        deterministic: bitwise repeatable results.
    """

    dtype: torch.dtype
    dims: tuple[int, int]
    group: int
    deterministic: bool


class Backend(ABC):
    """An implementation of attention over bands.

    Attributes:
        name: value of ``impl`` that selects it.
        title: its kernels in words, for logs.
        takes_out: the backward takes the output of the forward over all keys and sinks, in the dtype of q, as ``out``,
            and then needs no delta.
        tables, programs, capture, sparse, latent: what else it offers, see the module.
        latent_part: `Latent` without what another backend then computes.
    """

    name: ClassVar[str]
    title: ClassVar[str] = "kernels"
    takes_out: ClassVar[bool] = False
    tables: ClassVar[HostTables | None] = None
    programs: ClassVar[Programs | None] = None
    capture: ClassVar[Capture | None] = None
    sparse: ClassVar[Sparse | None] = None
    latent: ClassVar[Latent | None] = None
    latent_part: ClassVar[LatentPart | None] = None

    @abstractmethod
    def why_not(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'"
    ) -> str | None:
        """The reason why it does not take such tensors; None if it does.

        Args:
            device, dtype: of q, k and v.
            dims: head dims of q and k, and of v.
            instead: what the message recommends.
        """

    def why_not_call(
        self, options: AttnOptions, bands: np.ndarray | None = None, instead: str = "'torch'"
    ) -> str | None:
        """The reason why it does not compute such a call of tensors that it takes (`why_not`); None if it does.

        Args:
            options: of the call.
            bands: the mask; None where it is not known yet.
            instead: what the message recommends.
        """
        del options, bands, instead
        return None

    @staticmethod
    @abstractmethod
    def forward(
        inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput, **hints: Any
    ) -> None:
        """Writes attention over ``bands`` to ``output``, or merges it into that; arguments are already checked.

        Args:
            inputs: q, k, v, and the log-sum-exp of sinks, or None.
            bands: int64 ``[n, 6]`` (`megatron_magi.mask.bands`), no two of which overlap.
            options: of the call.
            output: out, lse, whether they hold a result over other keys into which this one is merged, and where the
                largest logits are written.
            hints: ``program``, of this mask, if it has `programs`.

        Raises:
            ValueError: it does not take such tensors, or such a mask.
        """

    @staticmethod
    @abstractmethod
    def backward(
        inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients, **hints: Any
    ) -> None:
        """Writes dq, dk and dv to ``grads``, or adds to them; arguments are already checked.

        With p = exp(s - lse): dv = p^T dout, dp = dout v^T, ds = p * (dp - delta), dq = ds k, dk = ds^T q. ``lse`` and
        ``delta`` may belong to more keys than are given here; the formulas hold for each part.

        Args:
            inputs: q, k, v, dout, and lse and delta over all keys and sinks of a row.
            bands, options: as in `forward`.
            grads: dq, dk, dv, and which of them are added to.
            hints: ``program``, as in `forward`; ``shared``, if `sums_meet` holds; ``out``, if `takes_out`; ``read``,
                of changing masks, see `Program.backward`.

        Raises:
            ValueError: as `forward`.
        """

    @staticmethod
    def row_delta(dout: Tensor, out: Tensor) -> Tensor:
        """``rowsum(dout * out)``, ``[num_rows, num_heads_q]``, as `megatron_magi.operands.merge.row_products`."""
        return row_products(dout, out)

    def takes(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> bool:
        """Whether it takes such tensors, see `why_not`."""
        return self.why_not(device, dtype, dims) is None

    @staticmethod
    def sums_meet(
        q: Like, k: Like, v: Like, bands: Sequence[np.ndarray], num_keys: Sequence[int], options: AttnOptions
    ) -> bool:
        """Whether the backward passes of several stages share their sums of dq (`shared_sums`).

        Args:
            q, k, v: tensors or layouts of the first stage.
            bands, num_keys: of each stage.
            options: of the backward.
        """
        del q, k, v, bands, num_keys, options
        return False

    @staticmethod
    def shared_sums(count: int) -> Any:
        """The sums of ``count`` backward passes, to pass to each as ``shared``; the last pass writes dq."""
        raise NotImplementedError

    @staticmethod
    def kernels(model: ModelKind, *, fused: bool = False, captured: bool = False) -> Kernels:
        """Kernels that attention can use under any mask, to be compiled ahead.

        Args:
            model: whose attention it is.
            fused: only those that wait for fetched keys.
            captured: only those that read a mask's numbers from memory.
        """
        del model, fused, captured
        return []

    @staticmethod
    def common_kernels() -> Kernels:
        """Kernels that are compiled into the package, and by `python -m megatron_magi build`."""
        return []


class KeyTransfer(Protocol):
    """Communication of keys and values with other ranks while kernels run. All methods are collective."""

    @property
    def num_recv(self) -> int:
        """Rows that arrive."""

    def forward_pays(self, k: Tensor, v: Tensor) -> bool:
        """Whether the forward is one launch where the backward is; the same on all ranks."""

    def published(self, x: Tensor) -> Tensor:
        """The tensor, or a copy whose rows other ranks can read."""

    def get_step(self, rows: StepRows) -> tuple[StepMover, Arriving] | None:
        """The kernel that publishes keys and values and fetches those of other ranks; None, on all ranks, if rows of
        this layout must be transferred otherwise.
        """

    def put_step(self, rows: StepRows) -> Step | None:
        """The kernel that sends gradients of fetched keys back and adds received ones to ``into``; None likewise."""

    def give_back(self, tensors: list[Tensor], into: list[Tensor]) -> None:
        """The same as a call, if there is no such kernel."""


class StepMover(Protocol):
    """Launches lists of calls that contain its kernels, which transfer rows between ranks, and orders these."""

    def version(self) -> tuple:
        """Changes when steps become invalid."""

    def queue(self, calls: LaunchList, raw: int, *addresses: int) -> None:
        """Launches a list on the current stream, whose handle is ``raw``."""


class Program(Protocol):
    """Both passes over one mask, prepared for calls that differ in addresses and strides."""

    @property
    def num_keys(self) -> int:
        """Own keys, or those of a stage."""

    @property
    def makers(self) -> LruCache[tuple, Any]:
        """What prepares launches of a layout for a mask, by layout; the first entry of a layout is its stream."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        options: AttnOptions,
        return_max_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Output, lse and largest logits; None, on all ranks, if the pass must run in stages."""

    def prepare_forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, return_max_logits: bool) -> None:
        """Prepares the launch of `forward` with such tensors, where that of another mask can be copied."""

    def backward(
        self,
        dout: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        options: AttnOptions,
        partial: torch.dtype,
        wants_delta: bool,
        read: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """Gradients of q, in its dtype, and of k and v, in dtype ``partial``, and delta; None as in `forward`.

        Args:
            dout: of any float dtype.
            qkv: q, k and v.
            out, lse: of the forward, ``lse`` fp32 ``[num_rows, num_heads]``.
            options: of the call.
            partial: dtype of each rank's partial gradients of k and v, both those that are sent and this rank's own;
                parts are summed in fp32 and rounded once.
            wants_delta: also return ``rowsum(dout * out)``, fp32 ``[num_rows, num_heads]``.
            read: `ChangingMask.content` of the forward, int64 ``[1]``: if another mask is loaded when kernels run,
                gradients are NaN (`ChangingMemory.take_failure`).
        """

    def make(self, layout: tuple, maker: Any) -> Any:
        """Prepares the launches of a layout by one of `makers`, of another mask."""


class Ready(NamedTuple):
    """Completion of a copy of tables to the device.

    Attributes:
        event: recorded on the stream after the copy.
        stream: raw handle; work on this stream needs no event, and stream order keeps the memory valid for it.
    """

    event: torch.cuda.Event
    stream: int


class MaskTables(Protocol):
    """The tables of a mask, without their arrays, which are copied to the device."""

    @property
    def num_arrays(self) -> int:
        """Number of arrays that are copied to the device."""

    @property
    def num_plans(self) -> int:
        """Number of objects that each keep the copied memory alive."""

    def keep(
        self, bands: np.ndarray, tensors: Sequence[Tensor], ready: Ready | None, plan_bytes: int
    ) -> Sequence[object]:
        """Registers the tables for calls; they are found as long as the caller keeps the returned objects.

        Args:
            bands: the mask; immutable.
            tensors: the arrays on the device.
            ready: completion of their copy; None if complete.
            plan_bytes: device memory that each of the `num_plans` objects keeps alive.
        """


class StageMasks(NamedTuple):
    """The masks of a rank's plan, for which tables are made.

    Attributes:
        bands: of each stage; stage 0 is that of own keys.
        num_rows: queries.
        num_keys: of each stage.
        first_backward: the stage that the backward computes first.
        facts: by which kernels are chosen (`ChangingMask.facts`), one for each stage; of the masks themselves when
            None.
        is_fused: passes are one launch over own keys and those of all stages (`KeyTransfer`).
        is_alone: passes are one launch, as no rank fetches anything.
        joined: if `is_fused`: bands over own keys and those of all stages, from `Programs.first_fetched` on.
        num_fetched: keys of all stages.
        joined_facts: as ``facts``, for `joined`; None without.
    """

    bands: tuple[np.ndarray, ...]
    num_rows: int
    num_keys: tuple[int, ...]
    first_backward: int
    facts: Sequence[Any] | None
    is_fused: bool
    is_alone: bool
    joined: np.ndarray | None
    num_fetched: int
    joined_facts: Any = None


class TableUse(NamedTuple):
    """How the passes over `StageMasks` will be called.

    Attributes:
        num_heads: of queries, and of keys and values.
        dims: head dims of q and k, and of v.
        dtype: of q, k and v.
        num_sms: streaming multiprocessors of the GPU.
        sm_margins: those that the forward and the backward leave free.
        deterministic: bitwise repeatable results.
        needs_backward: gradients are needed.
        accumulates: results of several stages are merged in fp32.
        planner: as `DispatchConfig.planner`.
        kind: `HostTables.kind` of the GPU.
    """

    num_heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    num_sms: int
    sm_margins: tuple[int, int]
    deterministic: bool
    needs_backward: bool
    accumulates: bool
    planner: str
    kind: Any = None


class StageTables(NamedTuple):
    """What `HostTables.make` returns.

    Attributes:
        tables: of each stage, and where `StageMasks.is_fused`, of the joined mask at the end; of the joined mask alone
            if there is ``seldom``.
        arrays: those of ``tables``, then those of ``seldom``.
        seldom: tables of the stages, if passes are one launch; needed only where a call cannot be.
        numbers: for `Programs.of_plan`; can be sent to another process.
    """

    tables: tuple[MaskTables, ...]
    arrays: list[np.ndarray]
    seldom: tuple[MaskTables, ...] | None
    numbers: Any


class MaskSize(NamedTuple):
    """One of the masks that a `ChangingMask` can be.

    Attributes:
        bands: int64 ``[n, 6]``; immutable.
        num_keys: its keys.
        num_rows: its rows.
    """

    bands: np.ndarray
    num_keys: int
    num_rows: int


class ChangingMask(Protocol):
    """A mask that changes while its tables stay at fixed addresses in device memory, for captured launches.

    Attributes:
        backend: name of the backend that made it.
        facts: by which kernels were chosen; for `StageMasks`.
        content: a number that identifies the mask that was loaded last, and what travels with it; 63 bits.
        readings: of forwards, for `megatron_magi.backends.readings`.
        device: of the tables.
    """

    backend: str
    facts: Any
    content: int
    readings: Any
    device: torch.device

    @property
    def is_read(self) -> bool:
        """Whether calls have read its tables."""

    def as_bands(self) -> ChangingBands:
        """The bands that represent this mask in calls; they keep it alive."""

    def shortage(self, mask: MaskSize) -> tuple[str, float] | None:
        """Why a mask does not fit, and the headroom (`Capture.mask`) with which it would; None if it fits."""

    def take(self, mask: MaskSize, content: int) -> list[tuple[Tensor, Tensor]]:
        """Sets the numbers of a mask that fits; returns the tables to copy: source and target of each."""

    def capture(self) -> int:
        """Number of the CUDA graph that captures a call now; 0 if none does."""

    def reading(self) -> Any:
        """The `megatron_magi.backends.readings.Reading` of a forward that is called now."""


class ChangingMemory(Protocol):
    """Numbers of changing masks on a device, which captured launches read. These must not overlap."""

    def take_failure(self) -> bool:
        """Whether a backward since the last call found another mask than its forward read; does not wait for it."""

    def send(self) -> None:
        """Queues the copy of all numbers on the current stream."""


class ChangingBands(np.ndarray):
    """Represents the bands of a `ChangingMask`; as an array it is one band over all rows and keys.

    Attributes:
        mask: the mask whose tables are read; None in arrays derived from this one.
    """

    mask: Any = None


def is_changing(bands: np.ndarray) -> TypeGuard[ChangingBands]:
    """Whether ``bands`` represents a mask that changes."""
    return isinstance(bands, ChangingBands) and bands.mask is not None


def refuse_tables_in_graph(device: torch.device, impl: str) -> None:
    """Raises RuntimeError while a graph is captured that would read tables which are kept for a mask.

    Args:
        device: of the tables.
        impl: the backend that reads them.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"attention: a CUDA graph keeps no mask, and would read the tables of impl {impl!r} after they are "
            "dropped; capture calc_attn with a static key (megatron_magi.api.make_static_key) and impl 'ffa'"
        )


def check_support(why_not: WhyNot, q: Tensor, v: Tensor) -> None:
    """Raises ValueError for tensors that kernels do not take; ``why_not``: of them, see `Backend.why_not`."""
    if (reason := why_not(q.device, q.dtype, (q.shape[2], v.shape[2]))) is not None:
        raise ValueError(reason)


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while a graph is captured."""
    if is_capturing(device):
        raise RuntimeError("tables of a mask are set before a graph is captured: run the same calls once before")


def copy_tables(tables: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each table to a buffer that may be longer, on the current stream, in one or two launches for each dtype.

    Args:
        tables: source and target of each.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in tables:
        if length := source.shape[0]:
            targets, sources = by_dtype.setdefault(source.dtype, ([], []))
            targets.append(target[:length])
            sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


class HostTables(Protocol):
    """Makes tables of masks on the host."""

    def sm_count(self, device: torch.device) -> int:
        """Streaming multiprocessors of a device, on which tables depend."""

    def kind(self, device: torch.device) -> Any:
        """What else of a device they depend on: a constant that can be sent to another process."""

    def make(self, masks: StageMasks, use: TableUse) -> StageTables:
        """Makes the tables of a plan's masks, without a GPU; they serve calls described by ``use``."""


class Programs(Protocol):
    """Makes `Program` objects."""

    def reads_in_place(self, dims: tuple[int, int]) -> bool:
        """Whether programs serve these head dims, of q and k, and of v; else passes run in stages."""

    def fuses_backward(self, dims: tuple[int, int]) -> bool:
        """Whether the backward is one launch over fetched keys too where the forward is."""

    def first_fetched(self, num_keys: int) -> int:
        """Index of the first fetched key in `StageMasks.joined`, on a rank with ``num_keys`` own keys."""

    def new_makers(self) -> LruCache[tuple, Any]:
        """A cache for `Program.makers`."""

    def of_tensors(self, q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray, options: AttnOptions) -> Program | None:
        """The program of calls on one device like this one; None if there is none for such tensors."""

    def of_plan(
        self,
        bands: np.ndarray,
        num_keys: int,
        makers: LruCache[tuple, Any],
        transfer: KeyTransfer | None,
        is_prepared: bool,
        numbers: Any,
    ) -> Program:
        """The program of a plan's masks, or of one of its stages.

        Args:
            bands: over own keys and those of all stages, see `StageMasks.joined`; or of one stage; immutable.
            num_keys: own keys, or those of the stage.
            makers: shared by masks whose calls are otherwise equal (`new_makers`).
            transfer: fetches keys; None if no rank fetches any, and for a stage.
            is_prepared: the tables of the mask belong to a prepared plan.
            numbers: `StageTables.numbers`; None if they were not prepared.
        """


class Capture(Protocol):
    """Makes changing masks."""

    def memory(self, device: torch.device) -> ChangingMemory:
        """Memory for the numbers of changing masks."""

    def mask(
        self,
        samples: Sequence[MaskSize],
        most_rows: int,
        most_keys: int,
        device: torch.device,
        memory: Any,
        headroom: float,
        num_own: int | None = None,
    ) -> ChangingMask:
        """A mask whose tables are at fixed addresses.

        Args:
            samples: masks that must fit. Kernels are chosen for the first with a visible pair.
            most_rows: most rows of a mask; results of rows that a mask does not have are undefined.
            most_keys: most keys of a mask; gradients of keys that a mask does not have are undefined.
            device: of the tables.
            memory: for numbers.
            headroom: capacity as a multiple of the longest tables of these masks, at least 1.
            num_own: own keys of masks over own keys and those of all stages (`StageMasks.joined`), for `Programs`;
                None for the mask of one stage.
        """


def with_output(inputs: ForwardInputs, why_not: WhyNot) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What a forward of kernels over lists reads and writes, in memory of its own. Raises as `check_support`.

    Returns:
        ``(q, k, v, out, lse, sink_lse)``: out ``[num_rows, num_heads_q, head_dim_v]`` in the dtype of q, lse fp32
        ``[num_rows, num_heads_q]``, neither of them set; the sinks of each row, ``[num_rows, num_heads_q]``, None
        without sinks.
    """
    q, k, v, sink_lse = inputs
    check_support(why_not, q, v)
    num_rows, num_heads, _ = q.shape
    out = torch.empty((num_rows, num_heads, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    return q, k, v, out, lse, None if sink_lse is None else sink_lse.expand(num_rows, num_heads)


class Sparse(Protocol):
    """Attention over lists of keys; refuses tensors that it does not take. Only the definition is called without rows
    or keys.
    """

    def why_not(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
        """As `Backend.why_not`."""

    def packed_heads(self, group: int) -> int:
        """Query heads, of a ``group`` that shares a key head, that a tile of rows of a mask's ranges can hold."""

    def forward(
        self, inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(out, lse, max_logits)`` of checked arguments; max_logits is None unless asked for."""

    def backward(
        self, inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; lse and delta of ``inputs`` are those of the forward over the same pattern."""


class _LatentForward(Protocol):
    """Attention over lists of single keys whose first elements are the values: ``v`` of inputs is a slice of ``k``.
    Refuses tensors that it does not take; not called without rows or keys.
    """

    def why_not(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
        """As `Backend.why_not`."""

    def forward(
        self, inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `Sparse.forward`."""


class LatentPart(_LatentForward, Protocol):
    """The same with a backward for some of the calls."""

    def takes_backward(self, dtype: torch.dtype) -> bool:
        """Whether `backward` is for a dtype that the forward takes."""

    def backward(
        self, inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """As `Latent.backward`."""


class Latent(_LatentForward, Protocol):
    """The same with a backward."""

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """As `Backend.row_delta`."""

    def backward(
        self, inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """dq, and the gradient of keys and values together, summed over queries in fp32 or wider.

        What a query gives to a key may be rounded to the dtype of keys before.
        """
