"""Other ways of context parallelism, over the attention kernels of this project and torch's collectives.

Each gives every rank some tokens of the sequence and computes their attention, forward and backward, exactly. They are
written as their papers describe them, so that what differs from `distributed_attention` in a measurement is the way
and not the kernel:

- ``ring``: keys and values go round all ranks, one rank at a time, behind the attention of those that are there;
  each document is cut into 2 * ranks pieces of which a rank takes two that mirror each other (zigzag).
- ``double_ring`` (LoongTrain): rings of neighbours inside a ring of such groups, whose transfer is hidden behind a
  whole turn of the inner rings.
- ``all_gather``: every rank gets all keys and values, then computes (Llama 3, Transformer Engine); zigzag.
- ``ulysses``: all-to-all to the whole sequence for some heads, and back (DeepSpeed).
- ``usp``: Ulysses between neighbours, a zigzag ring of these groups.
- ``subgroups``: each document on as many ranks as its work asks for, 1, 2, 4 ..., in a zigzag ring there (Megatron's
  dynamic context parallelism).

``torch_ring`` and ``torch_all_gather`` are PyTorch's own `context_parallel`, over PyTorch's own kernels; accelerate's
context parallelism calls the same (by default the second), for causal masks alone. ``torch_flex``,
``torch_flex_head_tail`` and ``torch_flex_blocks`` are PyTorch's FlexAttention under context parallelism, without and
with its load balancers. ``te_p2p`` and ``te_all_gather`` are Transformer Engine's own.

Unlike in other implementations documents need no padding: pieces and shards may differ in length.
"""

from __future__ import annotations

from benchmarks._lib.baselines.base import Baseline, Cluster, Unsupported
from benchmarks._lib.baselines.gather import AllGather
from benchmarks._lib.baselines.ring import DoubleRing, Ring
from benchmarks._lib.baselines.subgroups import Subgroups
from benchmarks._lib.baselines.te import TeAllGather, TeP2P
from benchmarks._lib.baselines.torch_flex import TorchFlex, TorchFlexBlocks, TorchFlexHeadTail
from benchmarks._lib.baselines.torch_native import TorchAllGather, TorchRing
from benchmarks._lib.baselines.ulysses import USP, Ulysses

BASELINES: dict[str, type[Baseline]] = {
    "ring": Ring,
    "double_ring": DoubleRing,
    "all_gather": AllGather,
    "ulysses": Ulysses,
    "usp": USP,
    "subgroups": Subgroups,
    "torch_ring": TorchRing,
    "torch_all_gather": TorchAllGather,
    "torch_flex": TorchFlex,
    "torch_flex_head_tail": TorchFlexHeadTail,
    "torch_flex_blocks": TorchFlexBlocks,
    "te_p2p": TeP2P,
    "te_all_gather": TeAllGather,
}
"""By name, in the order of tables and charts."""

__all__ = ["BASELINES", "Baseline", "Cluster", "Unsupported"]
