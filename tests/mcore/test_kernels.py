"""Kernels before the first step."""

from __future__ import annotations

import pytest

from megatron_magi.cuda import build
from megatron_magi.mcore.kernels import compile_ahead

KERNELS = [("attention/sm90/preprocess.cu", ())]


def _compile(rank: int, num_ranks: int, breaks: bool) -> tuple[list, str]:
    """Two nodes of two ranks; what this one compiles, and how it ends."""
    done: list = []

    def build_all(kernels: list, jobs: int, target: str) -> None:
        assert target == "sm_100"
        done.extend(kernels)
        if breaks and rank == 2:
            raise OSError("no compiler")

    original, build.build_all = build.build_all, build_all
    try:
        compile_ahead(KERNELS, rank % 2, "sm_100")
    except RuntimeError as error:
        return done, str(error)
    finally:
        build.build_all = original
    return done, ""


@pytest.mark.parametrize("breaks", [False, True])
def test_one_rank_of_each_node_compiles_and_all_are_told_of_errors(ranks, breaks: bool) -> None:
    error = "kernels could not be compiled on global rank 2: OSError: no compiler" if breaks else ""
    assert ranks(4, _compile, breaks) == [(KERNELS, error), ([], error), (KERNELS, error), ([], error)]
