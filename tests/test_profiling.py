"""Profile mode: what it records, and that there is nothing of it when it is off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_magi import envs, profiling
from megatron_magi.comm import group_collective
from megatron_magi.ops import slice_passes
from tests.profiled_steps import steps

NAME = "MAGI_ATTENTION_PROFILE_MODE"
_ALONE = """
import torch
from megatron_magi.mask.builders import causal
from megatron_magi.ops.slice_attention import slice_attention
q = torch.randn(16, 2, 8)
slice_attention(q, q, q, causal(16))
"""
_GPU = """
import torch
from megatron_magi import profiling
from megatron_magi.mask.builders import causal
from megatron_magi.ops.slice_attention import slice_attention
q, k, v = (torch.randn(8192, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (32, 8, 8))
for i in range(6):
    if i == 3:
        profiling.reset()
    slice_attention(q, k, v, causal(8192))[0].sum().backward()
found = {(row.kind, row.name): row for row in profiling.rows()}
forward, backward = found["kernel", "ffa_forward"], found["kernel", "ffa_backward"]
assert forward.calls == backward.calls == 3
assert 200 < forward.tflops < 1000 and 200 < backward.tflops < 1000, profiling.summary()
assert forward.ms <= found["pass", "attention forward"].ms
assert 0.2 < forward.share + backward.share <= 1
print(profiling.summary())
"""

_ONE_LAUNCH = """
import torch
from megatron_magi.testing.spawn import run_ranks
from tests.profiled_steps import steps

def run(rank, num_ranks):
    return steps(rank, num_ranks, 8192, 3, (8, 2, 2), 128, device="cuda", dtype=torch.bfloat16)

if __name__ == "__main__":
    for rows, area in run_ranks(run, 2, backend="nccl"):
        found = {(kind, name): (calls, ms, tflops) for kind, name, calls, ms, tflops, *_ in rows}
        for name, products in (("forward", 4), ("backward", 10)):
            calls, ms, tflops = found["pass", f"attention {name}"]
            assert calls == found["kernel", f"ffa_{name}"][0] == 3, rows
            assert abs(tflops * ms * 1e9 / (products * 3 * area * 8 * 128) - 1) < 1e-6, (rows, area)
        assert found["kernel", "magi_get_rows"][0] == 6 and ("collective", "group_cast") not in found, rows
    print("as expected")
"""


def run(text: str, tmp_path) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    environ = {**os.environ, NAME: "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_wrapped_when_it_is_off():
    assert not profiling.ON
    functions = (slice_passes.forward_pass, slice_passes.backward_pass, group_collective.group_cast)
    assert [f.__code__.co_filename.endswith("profiling.py") for f in functions] == [False] * 3
    kernel = object()
    assert profiling.profiled_kernel("name", kernel, torch.device("cuda", 0), lambda config: None) is kernel


def test_passes_and_collectives_of_two_ranks_are_counted_and_timed(ranks):
    (rows, area), _ = ranks(2, steps, 64, 2, (2, 2, 2), 8)
    found = {(kind, name): (calls, ms, tflops, share) for kind, name, calls, ms, tflops, _, share in rows}
    assert found["pass", "attention forward"][0] == found["pass", "attention backward"][0] == 4, rows
    assert found["collective", "group_cast"][0] == found["wait", "group_cast"][0], rows
    assert found["wait", "group_reduce"][0] == 2, rows
    _, ms, tflops, _ = found["pass", "attention forward"]
    assert abs(tflops * ms * 1e9 - 2 * 4 * area * 2 * 8) < 1, (rows, area)
    assert all(0 < share <= 1 for *_, share in found.values()), rows


def test_the_process_says_at_its_end_what_it_has_recorded(tmp_path):
    said = run(_ALONE, tmp_path)
    assert NAME in said and "attention forward" in said


def test_shares_are_of_the_time_from_the_earliest_begin_whatever_was_noted_first():
    recorder = profiling.Recorder()
    recorder.add("pass", "attention forward", 1.0, 2.0)
    recorder.add("collective", "group_cast", 0.0, 4.0)
    assert {row.name: row.share for row in recorder.rows()} == {"attention forward": 0.25, "group_cast": 1.0}


def test_ranks_that_move_nothing_know_their_number_too(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    recorder = profiling.Recorder()
    recorder.add("pass", "attention forward", 0.0, 1.0)
    assert recorder.rank == 3


def test_a_value_that_is_no_toggle_is_an_error():
    assert envs.profile_mode({NAME: "1"}) and not envs.profile_mode({})
    with pytest.raises(ValueError, match=NAME):
        envs.profile_mode({NAME: "yes"})


@pytest.mark.gpu
@pytest.mark.sm90
def test_kernels_are_timed_with_the_rate_of_visible_pairs(tmp_path):
    assert "ffa_backward" in run(_GPU, tmp_path)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.ranks(2)
def test_passes_of_one_launch_are_counted_and_timed(tmp_path):
    assert run(_ONE_LAUNCH, tmp_path).endswith("as expected\n")
