"""What a context-parallel model returns: the whole batch's where it has no gradient, else that of a rank's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from megatron_magi.comm.agreement import start_agreement

if TYPE_CHECKING:
    from megatron_magi.hf.shard import Shard

VECTORS = ("logits", "last_hidden_state", "hidden_states")
"""Outputs of transformers with a vector for each row, ``[1, num_rows, width]``, or tuples of them."""

ROUTERS = "router_logits"
"""Output of models with experts: of each layer ``[num_rows, num_experts]``."""

NUMBERS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""Outputs of TRL's models with a number for each prediction, ``[1, num_rows]``."""

_OF_WHOLE = ("rope_deltas", *(f"{name}_hidden_states" for name in ("image", "vision", "video", "audio")))
"""Outputs of models with images, videos or audio that every rank has of the whole batch."""

_POOLED = "pooler_output"
"""Made of the first token of a sequence, which is on one rank."""

_aten = torch.ops.aten
_OF_ROWS = {_aten.clone.default, _aten._to_copy.default}
_OF_LAST_DIM = {_aten.argmax.default, _aten.max.dim, _aten._softmax.default, _aten._log_softmax.default}
_OF_SAME_ROWS = {_aten.detach.default, _aten.alias.default}
_OF_SHAPE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
             "new_ones", "new_full", "new_empty_strided")  # fmt: skip
_OF_MEMORY = {getattr(Tensor, f"__{name}__") for name in ("array", "deepcopy", "dlpack", "reduce_ex")}
_OF_MEMORY |= {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.share_memory_}

_created: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Numbers for the next `BatchRows` of each group, which all ranks make in the same order."""


class _Rows:
    """A rank's rows, and all of them once they are gathered; ``number`` tells them from other rows of the group.

    Those of the batch are flat if models return them so.
    """

    def __init__(self, rows: Tensor, number: int, is_flat: bool = False) -> None:
        self.own, self.number, self.is_flat, self.whole = rows, number, is_flat, None

    def gather(self, shard: Shard) -> Tensor:
        if self.whole is None:
            what = "logits of a context-parallel model (all ranks use them in the same order)"
            start_agreement(self.number, shard.group, what).wait()
            whole = shard.undispatch(self.own)
            self.whole, self.own = whole.flatten(0, 1) if self.is_flat else whole, None
        return self.whole

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """Of all rows."""
        if self.whole is not None:
            return tuple(self.whole.shape)
        before = (shard.batch_size * shard.seqlen,) if self.is_flat else (shard.batch_size, shard.seqlen)
        return (*before, *self.own.shape[2:])


class BatchRows(Tensor):
    """This rank's rows of ``[batch_size, seqlen, ...]``, gathered from all ranks when they are first used. Collective.

    Or of ``[batch_size * seqlen, ...]``, if they are flat.

    Copies, and operations along the last dimension (softmax, log_softmax, argmax, max), are computed from a rank's rows
    and gathered later, so that predicted tokens are sent and not their logits. Reading the shape, dtype or device,
    printing, and `torch.zeros_like` and alike gather nothing.
    """

    @staticmethod
    def __new__(cls, rows: _Rows, shard: Shard) -> BatchRows:
        own = rows.own if rows.whole is None else rows.whole
        out = Tensor._make_wrapper_subclass(cls, rows.shape(shard), dtype=own.dtype, device=own.device)
        torch._C._set_throw_on_mutable_data_ptr(out)  # there is no memory; kernels that ask for it get an error
        out._rows, out._shard = rows, shard
        return out

    @classmethod
    def of(cls, rows: Tensor, shard: Shard, is_flat: bool = False) -> BatchRows:
        """Of rows ``[1, num_rows, ...]``."""
        number = 0 if shard.group is None else next(_created.setdefault(shard.group, itertools.count()))
        return cls(_Rows(rows, number, is_flat), shard)

    def __repr__(self, **_: Any) -> str:
        if self._rows.whole is not None:
            return repr(self._rows.whole)
        return f"BatchRows(shape={tuple(self.shape)}, dtype={self.dtype}, not gathered)"

    def whole(self) -> Tensor:
        """All rows, in the order of the batch. Collective when first called."""
        return self._rows.gather(self._shard)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function in _OF_MEMORY:
            args = (args[0].whole(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0]
        if isinstance(x, BatchRows):
            if function in _OF_SAME_ROWS:
                return BatchRows(x._rows, x._shard)
            if function.overloadpacket.__name__ in _OF_SHAPE:
                return function(torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape), *args[1:], **kwargs)
            if x._rows.whole is None and x._is_of_rows(function, args, kwargs):
                made = function(x._rows.own, *args[1:], **kwargs)
                return tree_map(lambda y: BatchRows(_Rows(y, x._rows.number, x._rows.is_flat), x._shard), made)
        args, kwargs = tree_map_only(BatchRows, BatchRows.whole, (args, kwargs))
        return function(*args, **kwargs)

    def _is_of_rows(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        if function in _OF_LAST_DIM:
            return self.ndim > 2 and not self._rows.is_flat and len(args) > 1 and args[1] in (-1, self.ndim - 1)
        return function in _OF_ROWS and kwargs.get("device") in (None, self.device)


class RankNumbers(Tensor):
    """One number for each of this rank's rows, with a gradient: what adds them up is right, what takes sequences apart
    is not. Detached they are the batch's."""

    @classmethod
    def of(cls, rows: Tensor, shard: Shard) -> RankNumbers:
        """Of numbers ``[num_rows]``."""
        out = rows.as_subclass(cls)
        out._shard = shard
        return out

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        if function is Tensor.detach:
            return _of_batch(out[None], args[0]._shard)
        # DDP clones what a model returns, accelerate makes it wider.
        return cls.of(out, args[0]._shard) if function in (Tensor.clone, Tensor.float) else out

    def __getitem__(self, index: Any) -> Tensor:
        raise ValueError(
            "log_probs: a context-parallel model has those of this rank's rows; trainers that need whole sequences "
            "(TRL's, except SFTTrainer) cannot use it: train without context parallelism, or with "
            "megatron_magi.hf.log_probs in a loop of your own"
        )


def _of_batch(numbers: Tensor, shard: Shard) -> Tensor:
    return shard.undispatch(numbers)[:, : shard.num_predictions]


class _OutputError(ValueError, AttributeError):
    """An AttributeError too, so that who asks whether an output has an attribute hears that it has none."""


class OfNoRows:
    """In the place of an output that is made of no rows of a rank alone: using it raises a ValueError that says so."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __repr__(self) -> str:
        return f"OfNoRows({self._message!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_message":  # what Python looks for, in copies for instance
            raise AttributeError(name)
        raise _OutputError(self._message)

    def _used(self, *_: Any, **__: Any) -> Any:
        raise _OutputError(self._message)

    __getitem__ = __iter__ = __len__ = __bool__ = __array__ = __float__ = __neg__ = __torch_function__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _used


def gathered(output: Any, shard: Shard, num_rows: int, has_loss: bool) -> Any:
    """A model's output, in which what has no gradient is the batch's: known numbers now, others when they are used.

    Numbers with a gradient stay those of this rank's rows, without the shape of a batch; so do logits, with it. What
    does not have something of each of this rank's rows, such as what a model makes of the first token of a sequence,
    becomes an `OfNoRows`.
    """
    values = output if isinstance(output, tuple) else list(output.values())
    # Embeddings ask for a gradient even under no_grad where transformers recomputes layers.
    has_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(values))
    as_whole = not (has_gradient and torch.is_grad_enabled())

    def of_rows(x: Any, name: str, is_named: bool = True) -> Any:
        if not isinstance(x, Tensor) or x.ndim < 2:
            return x
        is_of_rows = name != _POOLED and x.shape[:2] == (1, num_rows)
        if as_whole and is_of_rows and (is_named or x.ndim > 2):
            return BatchRows.of(x.detach(), shard)
        if not as_whole and (is_of_rows or x.ndim > 2):
            return x
        of_what = "is not known under context parallelism; use the model on one rank"
        if is_of_rows:
            of_what = "cannot be told from its place in a tuple under context parallelism; give return_dict=True"
        return OfNoRows(
            f"{name}: a rank has {num_rows} rows, of which the model makes {list(x.shape)}, so what it would make "
            f"of the whole batch {of_what}"
        )

    if isinstance(output, tuple):
        others = enumerate(output[has_loss:], has_loss)
        return (
            *output[:has_loss],
            *(tree_map(partial(of_rows, name=f"output {i}", is_named=False), x) for i, x in others),
        )
    for name, x in list(output.items()):
        if name not in (*NUMBERS, ROUTERS, *_OF_WHOLE):
            output[name] = tree_map(partial(of_rows, name=name), x)
    routers = output.get(ROUTERS)
    if as_whole and isinstance(routers, tuple):
        output[ROUTERS] = tuple(BatchRows.of(x.detach().flatten(0, -2)[None], shard, is_flat=True) for x in routers)
    for name in NUMBERS:
        x = output.get(name)
        if isinstance(x, Tensor) and x.shape == (1, num_rows):
            output[name] = RankNumbers.of(x.flatten(), shard) if x.requires_grad else _of_batch(x, shard)
    return output


def whole(x: Any) -> Any:
    """The tensor with all rows of the batch; of anything else itself."""
    return x.whole() if isinstance(x, BatchRows) else x
