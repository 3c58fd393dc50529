"""Attention implementations behind one interface, so that they can be measured side by side.

A provider takes q, k and v as ``[num_tokens, num_heads, head_dim]`` and calls its library as a user of it would.
One that cannot do a mask, or is not installed, says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._lib.cases import Case, Shape
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func


class Unavailable(Exception):
    """This provider cannot do this; the text says why."""


@dataclass(frozen=True)
class Problem:
    """A mask and the tensors that every provider gets.

    Attributes:
        q, dout: ``[num_tokens, num_heads_q, head_dim]`` and ``[..., head_dim_v]``.
        k, v: ``[num_tokens, num_heads_kv, head_dim]`` and ``[..., head_dim_v]``.
    """

    case: Case
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_problem(case: Case, shape: Shape, dtype: torch.dtype, device: str = "cuda") -> Problem:
    """Random inputs, the same for the same length and shape."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(num_heads: int, dim: int) -> Tensor:
        return torch.randn(case.length, num_heads, dim, generator=generator, device=device, dtype=dtype)

    kv, hq = shape.num_heads_kv, shape.num_heads_q
    k, v = draw(kv, shape.head_dim), draw(kv, shape.head_dim_v)
    return Problem(case, shape, draw(hq, shape.head_dim), k, v, draw(hq, shape.head_dim_v))


class Provider:
    """One implementation, ready to run one problem.

    Raises:
        Unavailable: it cannot.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prepare(problem.case)
        inputs = (problem.q, problem.k, problem.v)
        self._leaves = tuple(self._arrange(t).detach().requires_grad_() for t in inputs)
        self._dout = self._arrange(problem.dout)
        self._out: Tensor | None = None

    def _prepare(self, case: Case) -> None:
        """Makes whatever a user makes once a mask."""

    def _arrange(self, t: Tensor) -> Tensor:
        """A view of ``[num_tokens, num_heads, dim]`` in the layout of the library."""
        return t

    def _restore(self, t: Tensor) -> Tensor:
        """The inverse of `_arrange`."""
        return t

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self) -> None:
        """A forward pass, nothing kept for a backward."""
        with torch.no_grad():
            self._attend(*self._leaves)

    def backward(self) -> tuple[Tensor, ...]:
        """A backward pass of a forward that is run when this is first called."""
        if self._out is None:
            self._out = self._attend(*self._leaves)
        return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def results(self) -> tuple[Tensor, ...]:
        """``(out, dq, dk, dv)``, each ``[num_tokens, num_heads, dim]``."""
        grads = self.backward()
        assert self._out is not None
        return tuple(self._restore(t.detach()) for t in (self._out, *grads))


class _HeadsFirst(Provider):
    """torch's layout: ``[1, num_heads, num_tokens, dim]``."""

    def _arrange(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1)[None]

    def _restore(self, t: Tensor) -> Tensor:
        return t[0].transpose(0, 1)


class CuDNN(_HeadsFirst):
    """cuDNN through torch: full and causal."""

    def _prepare(self, case: Case) -> None:
        if case.name not in ("full", "causal"):
            raise Unavailable("no such mask")
        self._gqa = self.problem.shape.num_heads_q != self.problem.shape.num_heads_kv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.problem.case.causal, enable_gqa=self._gqa
            )


class FFA(Provider):
    """The kernels here, by the call that users make."""

    impl = "ffa"

    def _prepare(self, case: Case) -> None:
        table = torch.from_numpy(np.array(case.mask.table, dtype=np.int32))
        self._ranges = table[:, :2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_flash_attn_func(q, k, v, *self._ranges, impl=self.impl)[0]


class CuDNNBackend(FFA):
    """cuDNN's flexible attention as a backend here (``impl="cudnn"``), by the same call."""

    impl = "cudnn"

    def _prepare(self, case: Case) -> None:
        if (reason := BACKENDS["cudnn"].why_not(self.problem.q.device, self.problem.q.dtype, self._dims)) is not None:
            raise Unavailable(reason)
        super()._prepare(case)

    @property
    def _dims(self) -> tuple[int, int]:
        return self.problem.shape.head_dim, self.problem.shape.head_dim_v


class Triton(FFA):
    """The kernels in Triton here, likewise."""

    impl = "triton"


class FlashAttention3(Provider):
    """FlashAttention-3: variable lengths for documents, window arguments for a window."""

    modules = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "hopper.flash_attn_interface")

    def _prepare(self, case: Case) -> None:
        module = import_one(self.modules)
        if not case.plain:
            raise Unavailable("no such mask")
        self._options = {"causal": case.causal and case.window is None}
        if case.window is not None:
            self._options["window_size"] = (case.window - 1, 0)
        self._call = module.flash_attn_func
        if case.doc_lengths is not None:
            self._call = module.flash_attn_varlen_func
            self._options |= variable_lengths(case.doc_lengths, self.problem.q.device)

    def _arrange(self, t: Tensor) -> Tensor:
        return t if self.problem.case.doc_lengths is not None else t[None]

    def _restore(self, t: Tensor) -> Tensor:
        return t if self.problem.case.doc_lengths is not None else t[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._call(q, k, v, **self._options)
        return out[0] if isinstance(out, tuple) else out


class FlashAttention4(FlashAttention3):
    """FA4, the kernels in CuTe's Python dialect; compiled when first called."""

    modules = ("flash_attn.cute",)


class MagiAttention(Provider):
    """MagiAttention's own kernels; of its flags the one that its documentation advises for such masks."""

    def _prepare(self, case: Case) -> None:
        self._call = import_one(("magi_attention.functional",)).flex_flash_attn_func
        table = torch.from_numpy(np.array(case.mask.table, dtype=np.int32)).to(self.problem.q.device)
        self._ranges = table[:, :2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()
        rows = case.mask.table[np.argsort(case.mask.table[:, 0], kind="stable"), :2]
        self._once = bool((rows[1:, 0] >= rows[:-1, 1]).all())

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **flags: bool) -> Tensor:
        return self._call(q, k, v, *self._ranges, disable_fwd_atomic_reduction=self._once, **flags)[0]


class MagiAttentionGQA(MagiAttention):
    """The same with its flags for grouped queries, which exclude each other: `pack_gqa` forward, `cat_gqa` backward."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **flags: bool) -> Tensor:
        return super()._attend(q, k, v, **{"cat_gqa" if torch.is_grad_enabled() else "pack_gqa": True})


class CuDNNFlex(Provider):
    """cuDNN frontend's flexible attention: any mask of key intervals, documents as variable lengths; planned once."""

    def _prepare(self, case: Case) -> None:
        module = import_one(("cudnn.flex_attention",))
        self._call = module.flex_attn_func
        q, k, v = (self._arrange(t).contiguous() for t in (self.problem.q, self.problem.k, self.problem.v))
        packed = case.doc_lengths is not None
        ends = torch.from_numpy((document_ends(case) if packed else interval_ends(case.mask))[None]).to(q.device)
        options = variable_lengths(case.doc_lengths, q.device) if packed else {}
        self._plan = module.create_mask_plan(ends, q, k, v, build_backward=True, **options)

    def _arrange(self, t: Tensor) -> Tensor:
        return t if self.problem.case.doc_lengths is not None else t[None]

    def _restore(self, t: Tensor) -> Tensor:
        return t if self.problem.case.doc_lengths is not None else t[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._call(q, k, v, mask_plan=self._plan)


class Flex(_HeadsFirst):
    """FlexAttention, compiled for the length, with a block mask of the same mask."""

    max_length = 32768
    """Making a block mask evaluates all pairs of tokens."""

    def _prepare(self, case: Case) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        if case.length > self.max_length:
            raise Unavailable(f"a block mask of more than {self.max_length} tokens does not fit")
        self._attention = compiled_flex()
        self._block_mask = None
        if case.name != "full":
            n, device = case.length, self.problem.q.device
            self._block_mask = create_block_mask(visibility(case, device), None, None, n, n, device=device)
        self._gqa = self.problem.shape.num_heads_q != self.problem.shape.num_heads_kv

    def forward(self) -> None:
        """A forward pass whose graph is dropped: without gradients it would be compiled once more."""
        self._attend(*self._leaves)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention(q, k, v, block_mask=self._block_mask, enable_gqa=self._gqa)


PROVIDERS: dict[str, type[Provider]] = {
    "cudnn": CuDNN,
    "cudnn_flex": CuDNNFlex,
    "magi_cudnn": CuDNNBackend,
    "flex": Flex,
    "ffa": FFA,
    "triton": Triton,
    "fa3": FlashAttention3,
    "fa4": FlashAttention4,
    "magi": MagiAttention,
    "magi_gqa": MagiAttentionGQA,
}
"""By name, in the order of tables and charts."""


def interval_ends(mask: AttnMask) -> np.ndarray:
    """What each query sees as ends of intervals of keys, ascending, int32 ``[2 * n + 1, num_tokens]``.

    Row q sees ``[0, ends[0, q])``, ``[ends[1, q], ends[2, q])`` and so on.
    """
    bands = mask.bands
    band, row = bd.expand(bands[:, bd.Q0], bands[:, bd.Q1] - bands[:, bd.Q0])
    spans = np.stack(bd.row_bounds(bands[band], row), axis=1)
    spans, row = bd.merge_ranges(spans, row)
    at_zero = spans[:, 0] == 0
    place = np.arange(len(row)) - np.searchsorted(row, row)  # of a span among those of its row
    has_zero = np.zeros(mask.total_seqlen_q, dtype=np.int64)
    has_zero[row[at_zero]] = 1
    place = place + 1 - has_zero[row]
    ends = np.zeros((2 * int(place.max(initial=0)) + 1, mask.total_seqlen_q), dtype=np.int32)
    ends[2 * place, row] = spans[:, 1]
    ends[2 * place[~at_zero] - 1, row[~at_zero]] = spans[~at_zero, 0]
    return np.maximum.accumulate(ends, axis=0)  # intervals that a row does not have are empty


def document_ends(case: Case) -> np.ndarray:
    """The same where queries see their document from its first key on, counted from there, int32 ``[1, n]``."""
    starts = np.cumsum(case.doc_lengths) - case.doc_lengths
    return interval_ends(case.mask)[-1:] - np.repeat(starts, case.doc_lengths).astype(np.int32)


def variable_lengths(doc_lengths: tuple[int, ...], device: torch.device) -> dict[str, Tensor | int]:
    """Arguments by which variable-length interfaces are told of documents."""
    starts = torch.tensor([0, *np.cumsum(doc_lengths)], dtype=torch.int32, device=device)
    longest = max(doc_lengths)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


def visibility(case: Case, device: torch.device | str) -> Callable[..., Tensor]:
    """``visible(batch, head, query, key)``, bool, of a mask, as FlexAttention's users write it."""

    def values(t: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(t)).to(device, torch.int32)

    if case.name == "distant_ranges":
        table = case.mask.table
        group = np.searchsorted(table[::4, 1], np.arange(case.length), side="right")
        return _in_one_of_four(values(group), *(values(table[:, i].reshape(-1, 4)) for i in (2, 3)))
    if case.tree_ends is not None:
        ends = values(case.tree_ends)
        return lambda _batch, _head, q, k: (k <= q) & (q < ends[k])
    if case.doc_lengths is not None:
        document = values(np.repeat(np.arange(len(case.doc_lengths)), case.doc_lengths))
        if not case.plain:
            blocks = case.mask.table[np.argsort(case.mask.table[:, 0])]
            block_end = values(np.repeat(blocks[:, 3], blocks[:, 1] - blocks[:, 0]))
            return lambda _batch, _head, q, k: (document[q] == document[k]) & (k < block_end[q])
        if case.causal:
            return lambda _batch, _head, q, k: (document[q] == document[k]) & (k <= q)
        return lambda _batch, _head, q, k: document[q] == document[k]
    if case.window is not None:
        window = case.window
        return lambda _batch, _head, q, k: (k <= q) & (q - k < window)
    return lambda _batch, _head, q, k: k <= q


def _in_one_of_four(group: Tensor, first: Tensor, last: Tensor) -> Callable[..., Tensor]:
    def visible(_batch, _head, q, k):
        row = group[q]
        seen = (first[row, 0] <= k) & (k < last[row, 0])
        for i in range(1, 4):
            seen = seen | ((first[row, i] <= k) & (k < last[row, i]))
        return seen

    return visible


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled anew for each mask and length."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    # One version for each mask and length; past the limit torch would quietly run it uncompiled.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def backward_of(out: Tensor, leaves: Sequence[Tensor]) -> Callable[[], Tensor]:
    """The backward of an output for a random gradient of it; returns the gradient of the first leaf."""
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)[0]


def import_one(names: tuple[str, ...]) -> ModuleType:
    """The first of these modules that can be imported.

    Raises:
        Unavailable: none can; the text says why.
    """
    module, why = _first_module(names)
    if module is None:
        raise Unavailable(why)
    return module


@cache
def _first_module(names: tuple[str, ...]) -> tuple[ModuleType | None, str]:
    why = "not installed"
    for name in names:
        try:
            return importlib.import_module(name), ""
        except Exception as error:  # noqa: BLE001  (a peer may fail to load in any way; it is then left out)
            missing = isinstance(error, ModuleNotFoundError) and name.startswith(str(error.name))
            if not missing:
                why = f"{name}: {type(error).__name__}: {error}"
    return None, why
