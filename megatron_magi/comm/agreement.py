"""A check that all ranks mean the same: a disagreement becomes a message, not a hang."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist


class Agreement:
    """A comparison under way; made by `start_agreement`."""

    def __init__(
        self,
        work: dist.Work | None,
        mine: torch.Tensor,
        gathered: torch.Tensor,
        group: dist.ProcessGroup | None,
        what: str,
    ) -> None:
        self._work = work
        self._mine = mine  # must live until the work is done
        self._gathered = gathered
        self._group = group
        self._what = what

    def wait(self) -> None:
        """Waits for all ranks' values; blocks the host, also on GPUs.

        Raises:
            RuntimeError: the values differ. All ranks raise, with the same message.
        """
        if self._work is not None:
            self._work.wait()
        values = self._gathered.tolist()
        if len(set(values)) > 1:
            raise RuntimeError(_message(values, self._group, self._what))


def start_agreement(value: int, group: dist.ProcessGroup | None, what: str) -> Agreement:
    """Starts comparing ``value`` over the group: one all-gather of 8 bytes a rank.

    Every rank of the group must call it, in the same order among its collectives.

    Args:
        value: 0 <= value < 2**63, for example a hash.
        group: the ranks; the default group when None. Without any, a single rank agrees with itself.
        what: what is compared, for the message, for example ``plan``.

    Raises:
        ValueError: ``value`` is out of bounds.
    """
    if not 0 <= value < 1 << 63:
        raise ValueError(f"value: expected 63 bits, got {value}")
    if group is None and not dist.is_initialized():
        alone = torch.tensor([value])
        return Agreement(None, alone, alone, group, what)
    device = torch.device("cuda", torch.cuda.current_device()) if _needs_gpu(group) else torch.device("cpu")
    gathered = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    work = dist.all_gather_into_tensor(gathered, mine, group=group, async_op=True)
    return Agreement(work, mine, gathered, group, what)


def check_agreement(value: int, group: dist.ProcessGroup | None, what: str) -> None:
    """Compares ``value`` over the group and waits; see `start_agreement`.

    Raises:
        RuntimeError: the values differ. All ranks raise, with the same message.
        ValueError: ``value`` is out of bounds.
    """
    start_agreement(value, group, what).wait()


def _needs_gpu(group: dist.ProcessGroup | None) -> bool:
    return "cpu" not in {entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")}


def _message(values: list[int], group: dist.ProcessGroup | None, what: str) -> str:
    """Names the ranks that differ from the most common value; from that of the lowest rank in a tie."""
    counts = Counter(values)
    # max keeps the first of equals, and values are in the order of ranks.
    expected = max(values, key=lambda value: counts[value])
    world_ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    differ = ", ".join(
        f"rank {rank} of the group (global rank {world_ranks[rank]}) has {value:#018x}"
        for rank, value in enumerate(values)
        if value != expected
    )
    agree = [rank for rank, value in enumerate(values) if value == expected]
    return f"{what}: ranks disagree: {differ}; expected {expected:#018x}, as ranks {agree} of the group have"
