"""The examples, at a tiny size: two ranks train as one."""

import contextlib
import errno
import importlib.util
import io
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megatron_magi
from megatron_magi.testing.megatron_launch import launch
from megatron_magi.testing.spawn import run_ranks

pytestmark = pytest.mark.ranks(2)

EXAMPLES = Path(megatron_magi.__file__).parents[1] / "examples"


def load(path):
    """A script as a module, which finds its neighbours."""
    sys.path.insert(0, str(EXAMPLES / Path(path).parent))
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_sgd(main, rate, *arguments):
    """Losses with a plain optimizer: AdamW's steps do not depend on the size of gradients."""
    with patch("torch.optim.AdamW", lambda parameters, lr: torch.optim.SGD(parameters, lr=rate)):
        return main([*arguments, "--cpu"])


def torch_native(_rank, num_ranks, folder):
    main = load("torch_native/train.py").main
    main(["--steps", "2", "--cpu", "--checkpoint", folder])
    out = {"adamw": main(["--steps", "4", "--cpu"]), "sgd": with_sgd(main, 1.0, "--steps", "3")}
    out["resumed"] = main(["--steps", "4", "--cpu", "--checkpoint", folder])
    out["data parallel"] = with_sgd(main, 0.0, "--steps", "2", "--cp", "1")
    for cp in (0, num_ranks + 1):
        with pytest.raises(ValueError, match=f"^cp: expected a divisor of the number of ranks, {num_ranks}, got {cp}"):
            main(["--cp", str(cp), "--cpu"])
    return out


def torch_native_on_one_rank(_rank, _num_ranks):
    example = load("torch_native/train.py")
    counts = [int((example.make_batch(i, 256)[1] != example.IGNORED).sum()) for i in range(4)]
    frozen = with_sgd(example.main, 0.0, "--steps", "4")
    return {
        "adamw": example.main(["--steps", "4", "--cpu"]),
        "sgd": with_sgd(example.main, 1.0, "--steps", "3"),
        # Each rank has its own batch; all tokens weigh alike.
        "data parallel": [np.average(frozen[i : i + 2], weights=counts[i : i + 2]).item() for i in (0, 2)],
    }


def test_torch_native_trains_and_goes_on_from_its_checkpoint(tmp_path):
    results = run_ranks(torch_native, 2, str(tmp_path))
    assert results[0] == results[1]
    (one_rank,) = run_ranks(torch_native_on_one_rank, 1)
    for name, losses in one_rank.items():
        assert results[0][name] == pytest.approx(losses, abs=1e-4), name
    assert results[0]["resumed"] == pytest.approx(results[0]["adamw"][2:], abs=1e-5)


@contextlib.contextmanager
def full_disk(rank):
    """One rank cannot write its part of a checkpoint, after the other has."""

    def write_data(*_):
        dist.barrier()
        raise OSError(errno.ENOSPC, "No space left on device")

    def write_first(self, *args):
        done = write(self, *args)
        dist.barrier()
        return done

    write = dcp.FileSystemWriter.write_data
    own = patch.object(dcp.FileSystemWriter, "write_data", write_data if rank else write_first)
    with own, pytest.raises(CheckpointException, match="No space left"):
        yield


def interrupted_saves(rank, _num_ranks, folder):
    """First steps of runs and what they say, after a save that failed: of the first checkpoint, and of the second."""
    main, first_steps = load("torch_native/train.py").main, []

    def run(steps):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            losses = main(["--steps", str(steps), "--cpu", "--checkpoint", folder])
        first_steps.append(steps - len(losses))
        return said.getvalue()

    with full_disk(rank):
        run(1)
    anew = run(2)
    with full_disk(rank):
        run(3)
    resumed, again, nothing = run(4), run(5), run(3)
    assert not rank or not anew + resumed + again + nothing
    return first_steps, anew, resumed, again, nothing, sorted(path.name for path in Path(folder).iterdir())


def test_torch_native_goes_on_from_the_last_whole_checkpoint(tmp_path):
    steps, anew, resumed, again, nothing, saved = run_ranks(interrupted_saves, 2, str(tmp_path))[0]
    assert steps == [0, 2, 4, 3]
    names = [f"{tmp_path}/step_{n:08d}" for n in range(6)]
    interrupted = "is not whole: its save was interrupted"
    assert anew.startswith(f"{names[1]} {interrupted}\nno whole checkpoint in {tmp_path}, begins anew\nstep 0: ")
    assert resumed.startswith(f"{names[3]} {interrupted}\nresumes from {names[2]}\nstep 2: ")
    assert again.startswith(f"resumes from {names[4]}\nstep 4: ")
    assert nothing == f"resumes from {names[5]}\n", "steps that were trained are not saved as others"
    assert saved == [Path(name).name for name in names[1:]]


def foreign_folder(_rank, _num_ranks, folder):
    with pytest.raises(ValueError, match=r"^checkpoint: .* has no step_N, but \['.metadata'\]"):
        load("torch_native/train.py").main(["--cpu", "--checkpoint", folder])


def test_torch_native_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / ".metadata").touch()
    run_ranks(foreign_folder, 2, str(tmp_path))


def only_what_torchrun_sets(_workdir):
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]


def test_megatron_trains(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron_magi[megatron]")
    script, before = str(EXAMPLES / "megatron/train.py"), f"{__name__}:only_what_torchrun_sets"
    runs = []
    for num_ranks in (2, 1):
        size = ["--context-parallel-size", str(num_ranks)]
        arguments = ["--train-iters", "3", "--save-interval", "1000", *size]
        runs.append(launch(arguments, num_ranks, script=script, before=before, workdir=tmp_path / str(num_ranks)))
        assert re.search(r"> attention by megatron_magi: .*prefix_tree", runs[-1].outputs[0])
    losses, one_rank = (run.losses for run in runs)
    assert losses == pytest.approx(one_rank, rel=1e-5)
    assert len(losses) == 3 and losses[3] < losses[1]


def test_megatrons_rollouts_count_the_tokens_of_answers_alone():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron_magi[megatron]")
    item = load("megatron/train.py").Rollouts(1)[0]
    prompt = item["node_lengths"][0]
    assert item["position_ids"][:prompt].tolist() == list(range(prompt)) and not item["loss_mask"][:prompt].any()
    assert item["loss_mask"].sum() == item["node_lengths"][1:].sum() > 8


def transformers(_rank, num_ranks, folder):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE=str(num_ranks))
    os.chdir(folder)
    return load("transformers/train.py").main(["--steps", "3", "--cpu"])


def test_transformers_trains(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    losses, other = run_ranks(transformers, 2, str(tmp_path))
    assert losses == other == pytest.approx(run_ranks(transformers, 1, str(tmp_path))[0], abs=1e-4)
    assert len(losses) == 3 and losses[-1] < losses[0]
