"""Every file of configs/ is a run that can be started: parsed, validated, built and planned at its own world size."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_magi
from megatron_magi.testing.megatron_launch import launch

ROOT = Path(megatron_magi.__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
CONVERGENCE = ROOT / "pretrain_scripts" / "convergence"
BYTES = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
TINY = ROOT / "configs" / "tiny_gpt_256_2cpu.yaml"
DEVICE_BYTES = 80e9
USABLE = 0.9  # the rest is NCCL's, the allocator's and fragments

# Published numbers of parameters; that of the tiny one follows from its file.
PARAMETERS = {
    "llama3_2_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "qwen3_30b_a3b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
    "tiny_gpt": 158_016,
}


def parts_of_name(path: Path) -> tuple[str, int, int]:
    """Model, tokens a sequence and number of ranks, from MODEL_LENGTH_HARDWARE.yaml."""
    match = re.fullmatch(r"(.+)_(\d+)(k?)_(?:(\d+)x)?(\d+)(?:h100|cpu)", path.stem)
    assert match, path.name
    model, length, is_kilo, nodes, devices = match.groups()
    return model, int(length) * (1024 if is_kilo else 1), int(nodes or 1) * int(devices)


def documented_command() -> list[str]:
    """Arguments of the training command under "A large run"."""
    section = (ROOT / "docs/megatron.md").read_text().split("## A large run")[1]
    command = re.search(r"torchrun --nproc-per-node 8 pretrain_scripts/pretrain_gpt.py(( .*\\\n)+.*)", section)[1]
    return shlex.split(command.replace("\\\n", " "))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `fake_world` says of each file, made in one process of its own: process groups are global."""
    runs = {path.stem: [parts_of_name(path)[2], ["--config", str(path)]] for path in FILES}
    for name, ranks, data in (
        ("gpt_114m_2k", 2, BYTES),
        ("gpt_103m_4k", 2, BYTES),
        ("llama_1b_8k", 8, ["--padded-vocab-size", "128256"]),
    ):
        stock = ["--config", str(CONVERGENCE / f"{name}.yaml"), *data]
        magi = ["--attention-backend", "magi", "--context-parallel-size", str(ranks)]
        runs |= {f"{name}_stock": [ranks, stock], f"{name}_magi": [ranks, [*stock, *magi]]}
    # `fake_world` unsets flags, which needs a configuration file.
    nothing = tmp_path_factory.mktemp("documented") / "nothing.yaml"
    nothing.write_text("num-workers: 2\n")
    runs["documented"] = [8, ["--config", str(nothing), *documented_command(), "--padded-vocab-size", "32000"]]
    command = [sys.executable, "-m", "tests.configs.fake_world", json.dumps(list(runs.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_the_command_of_the_page_of_megatron_is_valid(described: dict) -> None:
    found = described["documented"]
    assert (found["magi"], found["seq_length"], found["world_size"]) == (True, 131072, 8)


def test_length_ranks_and_backend_are_those_of_the_name(path: Path, described: dict) -> None:
    _, length, world_size = parts_of_name(path)
    found = described[path.stem]
    assert found["magi"]
    assert (found["seq_length"], found["world_size"]) == (length, world_size)
    assert found["max_position_embeddings"] >= length
    assert found["global_batch_size"] % (found["data_parallel_size"] * found["micro_batch_size"]) == 0
    assert found["num_samples"] == [found["train_iters"] * found["global_batch_size"], 0, 0]


def test_model_has_the_published_number_of_parameters(path: Path, described: dict) -> None:
    found = described[path.stem]
    counts = found["parameters"]
    whole_model = (
        counts["experts"] * found["expert_model_parallel_size"]
        + counts["cut"] * found["tensor_model_parallel_size"]
        + counts["whole"]
    )
    assert whole_model == PARAMETERS[parts_of_name(path)[0]]


def test_packed_batch_is_balanced_and_every_rank_has_its_rows(path: Path, described: dict) -> None:
    found = described[path.stem]
    plan = found["plan"]["full"]
    assert plan["balance"] <= 1.02
    assert (
        plan["rows"]
        == [found["seq_length"] * found["micro_batch_size"] // found["context_parallel_size"]]
        * (found["context_parallel_size"])
    )


def test_windows_fetch_less_than_full_layers_do(described: dict) -> None:
    plan = described["gpt_oss_20b_128k_2x8h100"]["plan"]
    assert plan["primary"] == "documents"  # balanced for the layers that see all
    assert 0 < sum(plan["window"]["received_rows"]) < sum(plan["full"]["received_rows"]) / 10


def test_training_fits_into_80_gb(path: Path, described: dict) -> None:
    assert sum(memory(described[path.stem]).values()) <= USABLE * DEVICE_BYTES, memory(described[path.stem])


def memory(found: dict[str, Any]) -> dict[str, float]:
    """Estimate of the bytes of rank 0 in bf16 with the distributed optimizer, at the peak of a step.

    Weights and gradients are 2 and 4 bytes a parameter; 12 of the optimizer are spread over the data-parallel
    (and context-parallel) ranks. Activations are the inputs of norms and products, in bf16, without those that are
    recomputed but for one layer.
    """
    tp, cp, ep = (found[f"{kind}_parallel_size"] for kind in ("tensor_model", "context", "expert_model"))
    dense, experts = found["parameters"]["cut"] + found["parameters"]["whole"], found["parameters"]["experts"]
    expert_replicas = found["world_size"] // ep  # experts are not cut over tensor-parallel ranks
    tokens = found["seq_length"] * found["micro_batch_size"] / cp
    hidden, head = found["hidden_size"], found["kv_channels"]
    q, kv = found["num_attention_heads"] * head, 2 * found["num_query_groups"] * head
    attention = 4 * hidden + q + kv + q
    if found["num_experts"] is None:
        mlp = 3 * found["ffn_hidden_size"]
    else:
        mlp = found["moe_router_topk"] * (2 * hidden + 3 * found["moe_ffn_hidden_size"])
    is_recomputed = bool({"mlp", "moe"} & set(found["recompute_modules"] or []))
    kept = found["num_layers"] * attention + (1 if is_recomputed else found["num_layers"]) * mlp
    fetched = max(found["plan"]["full"]["received_rows"]) * kv / tp
    return {
        "dense": dense * (6 + 12 / (found["data_parallel_size"] * cp)),
        "experts": experts * (6 + 12 / expert_replicas),
        "activations": 2 * tokens * kept / tp,
        # bf16 logits and their gradient, fp32 logits and softmax
        "logits": (2 + 2 + 4 + 4) * tokens * (found["padded_vocab_size"] or found["vocab_size"]) / tp,
        # bf16 keys and values, and their fp32 gradients
        "fetched": (2 + 4) * fetched,
    }


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt_114m_2k", 113_861_376), ("gpt_103m_4k", 103_564_288), ("llama_1b_8k", 1_235_814_400)]
)
def test_convergence_runs_share_model_and_batch(name: str, parameters: int, described: dict) -> None:
    stock, magi = described[f"{name}_stock"], described[f"{name}_magi"]
    assert (stock["magi"], magi["magi"]) == (False, True)
    assert sum(stock["parameters"].values()) == sum(magi["parameters"].values()) == parameters
    assert stock["global_batch_size"] == magi["global_batch_size"] >= 4
    assert stock["train_iters"] == magi["train_iters"] >= 300
    assert stock["context_parallel_size"] == magi["data_parallel_size"] == 1


def test_tiny_one_trains(tmp_path: Path) -> None:
    on_gpus = ["--distributed-backend", "nccl"] if torch.cuda.is_available() else []
    done = launch(["--config", str(TINY), "--train-iters", "6", *on_gpus], 2, workdir=tmp_path)
    losses = [done.losses[iteration] for iteration in range(1, 7)]
    assert losses[0] == pytest.approx(math.log(512), abs=0.5)
    assert losses[-1] < losses[0] - 0.1
