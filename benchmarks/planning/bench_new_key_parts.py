"""What the host computes for a new key, by parts, without a GPU: this rank's part of a plan over several ranks.

    python -m benchmarks.planning.bench_new_key_parts [--ranks N] [--csv FILE] [--cases NAME ...]

CPU time of one thread in microseconds, for keys of packed documents with 32:8 heads of 128: the median over masks of
the shortest of some runs, so that other load on the machine matters little. ``tables`` are those of collectives and of
the tiles of both passes; of these a step makes the backward's after the forward is launched. What a GPU does, and
waiting for other ranks (`benchmarks.distributed.bench_new_keys` with ``--cpu``), is not in it.
"""

from __future__ import annotations

import gc
import itertools
import time

import numpy as np
import torch

from benchmarks._lib.batches import make_mask
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi import envs
from megatron_magi.api.configuration import magi_config
from megatron_magi.api.masks import mask_of_key
from megatron_magi.attention import AttnShape, prepare_batch
from megatron_magi.backends.sm90 import plan as tile_plans
from megatron_magi.calibration import with_present_rates
from megatron_magi.plan import make_plan
from megatron_magi.runtime.lru import LruCache

HEADS = (32, 8, 128)
SHAPE = AttnShape(*HEADS, 128, torch.bfloat16, num_sms=132, backend="ffa")
HEADER = ["documents", "tokens_a_gpu", "ranks", "mask_us", "configuration_us", "plan_us", "part_us", "tables_us"]


def parts_us(lengths: torch.Tensor, num_ranks: int) -> list[float]:
    """Microseconds of each part, in the order of `HEADER`."""
    tile_plans._facts = LruCache(0, 1)  # of masks that were seen before
    at = [time.thread_time()]

    def lap() -> None:
        at.append(time.thread_time())

    mask = mask_of_key(lengths, lengths, True, (-1, -1))
    assert len(mask.bands)
    lap()
    config = with_present_rates(magi_config(None, envs.load().default_config(), None, None, HEADS))
    lap()
    plan = make_plan(mask, config, num_ranks)
    lap()
    of_rank = plan.for_rank(0)
    lap()
    prepare_batch({0: of_rank}, SHAPE, config)
    lap()
    return [1e6 * (end - begin) for begin, end in itertools.pairwise(at)]


def measure(name: str, tokens: int, num_ranks: int, num_masks: int, num_runs: int) -> list:
    """The row of one kind of mask."""
    total, found = tokens * num_ranks, []
    for seed in range(num_masks):
        starts = make_mask(name, total, num_ranks, seed).table[:, 0]
        lengths = torch.tensor(np.unique(np.append(starts, total)), device="cpu")
        found.append(np.min([parts_us(lengths, num_ranks) for _ in range(num_runs)], axis=0))
    return [name, tokens, num_ranks, *(f"{us:.0f}" for us in np.median(found, axis=0))]


def main() -> None:
    """Measures and prints."""
    parser = table_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    cases = [f"{name}:{tokens}" for tokens in (8192, 32768) for name in ("8", "64", "short")]
    parser.add_argument("--cases", nargs="*", default=cases, help="documents (a number, short):tokens a GPU")
    parser.add_argument("--masks", type=int, default=12)
    parser.add_argument("--runs", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    rows = []
    for case in options.cases:
        name, tokens = case.split(":")
        rows.append(measure(name, int(tokens), options.ranks, options.masks, options.runs))
        print_row(HEADER, rows[-1])
    write_csv(options.csv, HEADER, rows)


if __name__ == "__main__":
    main()
