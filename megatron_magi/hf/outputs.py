"""What a context-parallel model returns: the whole batch's where it has no gradient, else that of a rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

if TYPE_CHECKING:
    from megatron_magi.hf.shard import Shard

VECTORS = ("logits", "hidden_states")
"""Outputs of transformers with a vector for each row, ``[1, num_rows, width]``, or tuples of them."""

NUMBERS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""Outputs of TRL's models with a number for each prediction, ``[1, num_rows]``."""

_aten = torch.ops.aten
_OF_ROWS = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}
_OF_LAST_DIM = {_aten.argmax.default, _aten.max.dim, _aten._softmax.default, _aten._log_softmax.default}
_OF_MEMORY = {getattr(Tensor, f"__{name}__") for name in ("array", "deepcopy", "dlpack", "reduce_ex", "repr")}
_OF_MEMORY |= {Tensor.numpy, Tensor.tolist}


class BatchRows(Tensor):
    """This rank's rows of ``[batch_size, seqlen, ...]``, gathered from all ranks when they are first used. Collective.

    Copies, and what looks along the last dimension alone (softmax, log_softmax, argmax, max), are made of a rank's
    rows and are gathered later, so that predicted tokens are sent and not their logits.
    """

    @staticmethod
    def __new__(cls, rows: Tensor, shard: Shard) -> BatchRows:
        shape = (shard.batch_size, shard.seqlen, *rows.shape[2:])
        out = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)
        out._rows, out._shard, out._whole = rows, shard, None
        return out

    def whole(self) -> Tensor:
        """All rows, in the order of the batch. Collective when first called."""
        if self._whole is None:
            self._whole, self._rows = self._shard.undispatch(self._rows), None
        return self._whole

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
        if isinstance(x, BatchRows) and x._whole is None and x._is_of_rows(function, args, kwargs):
            return tree_map(lambda y: BatchRows(y, x._shard), function(x._rows, *args[1:], **kwargs))
        args, kwargs = tree_map_only(BatchRows, BatchRows.whole, (args, kwargs))
        return function(*args, **kwargs)

    def _is_of_rows(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        if function in _OF_LAST_DIM:
            return self.ndim > 2 and len(args) > 1 and args[1] in (-1, self.ndim - 1)
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


def gathered(output: Any, shard: Shard, num_rows: int, has_loss: bool) -> Any:
    """A model's output, in which what has no gradient is the batch's: numbers now, vectors when they are used.

    Numbers with a gradient stay those of this rank's rows, without the shape of a batch; so do logits, with it.
    """

    def vectors(x: Any) -> Any:
        is_of_rows = isinstance(x, Tensor) and x.shape[:2] == (1, num_rows) and not x.requires_grad
        return BatchRows(x, shard) if is_of_rows and x.ndim == 3 else x

    if isinstance(output, tuple):
        return (*output[:has_loss], *map(vectors, output[has_loss : has_loss + 1]), *output[has_loss + 1 :])
    for name in VECTORS:
        if output.get(name) is not None:
            output[name] = tree_map(vectors, output[name])
    for name in NUMBERS:
        x = output.get(name)
        if isinstance(x, Tensor) and x.shape == (1, num_rows):
            output[name] = RankNumbers.of(x.flatten(), shard) if x.requires_grad else _of_batch(x, shard)
    return output


def whole(x: Any) -> Any:
    """The tensor with all rows of the batch; of anything else itself."""
    return x.whole() if isinstance(x, BatchRows) else x
