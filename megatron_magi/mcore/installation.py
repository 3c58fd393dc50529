"""One call that makes the Megatron of this process take `--attention-backend magi`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from megatron_magi import cpu_device
from megatron_magi.mcore.argv import rewrite_argv
from megatron_magi.mcore.validate import check_argv
from megatron_magi.mcore.versions import check_version


def install(expand: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
    """Lets the Megatron of this process take ``--attention-backend magi``; everything else stays as it is.

    To be called at the top of a training script, before it imports anything of megatron: names that were imported
    before still mean Megatron's own functions. Nothing on disk is touched, and without the option nothing changes
    but that defects of the wheel are repaired. Idempotent.

    It rewrites ``sys.argv`` and puts in what `megatron_magi.mcore.seams` lists. The script then calls Megatron's
    ``pretrain`` with its own forward step and data sets: the forward step finds this rank's shard of the dispatched
    microbatch in its data iterator, and its loss becomes the mean over the microbatch. It may use the stock
    ``get_batch_on_this_tp_rank`` and ``get_batch_on_this_cp_rank``, which leave a shard alone.

    Args:
        expand: applied to the arguments of ``sys.argv`` before they are rewritten.

    Raises:
        ValueError: the version of megatron-core, or what was found of it, is not what this package knows; or the
            command line asks for what is not supported.
        RuntimeError: megatron was imported before, on a machine without GPUs.
    """
    check_version()
    on_cpu = cpu_device.install()
    sys.argv = [sys.argv[0], *rewrite_argv(expand(sys.argv[1:]))]
    check_argv()
    from megatron_magi.mcore import arguments, seams, wheel_repairs

    seams.check(on_cpu=on_cpu)
    if on_cpu:
        from megatron_magi.mcore import without_gpu

        without_gpu.install()
    wheel_repairs.install()
    from megatron_magi.mcore import cuda_graph, experts, hybrid, linear_layers, model, mtp, rotary, trainer, user_step

    for part in (arguments, trainer, mtp, rotary, experts, model, hybrid, linear_layers, user_step, cuda_graph):
        part.install()
