"""Defects of the megatron-core wheel, repaired."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from megatron_magi.mcore import arguments, seams, wheel_repairs
from megatron_magi.testing.megatron_launch import launch, tiny_gpt_args

STATE_DICT = "core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict"


@pytest.fixture(autouse=True)
def _repaired() -> None:
    wheel_repairs.install()


def _config(**options: object) -> object:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, persist_layer_norm=False, **options)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_with_sequence_parallelism_marks_its_parameters(normalization: str) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = _config(tensor_model_parallel_size=2, sequence_parallel=True, normalization=normalization)
    norm = WrappedTorchNorm(config, 8, eps=1e-3)
    assert isinstance(norm, getattr(torch.nn, normalization))
    assert norm.eps == 1e-3
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert config.sequence_parallel


def test_norm_without_sequence_parallelism_is_unmarked() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = WrappedTorchNorm(_config(normalization="RMSNorm"), 8)
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in norm.parameters())


def test_help_is_printed_and_a_backend_that_nobody_knows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments.install()
    parser = seams.find("training.arguments:add_megatron_arguments")(ArgumentParser(prog="train", allow_abbrev=False))
    assert "use 90% of data" in " ".join(parser.format_help().split())
    with pytest.raises(SystemExit):
        parser.parse_args(["--attention-backend", "magic"])
    assert "expected magi or one of flash, fused, unfused, local, auto, got 'magic'" in capsys.readouterr().err
    assert parser.parse_args(["--attention-backend", "flash"]).attention_backend.name == "flash"


class Ranks:
    """As much of a process group as a rotary embedding asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_yarn_is_made_for_any_number_of_ranks(cp_size: int) -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    rotary = YarnRotaryEmbedding(
        16, original_max_position_embeddings=64, use_cpu_initialization=True, cp_group=Ranks(cp_size)
    )
    assert len(rotary.cos_cached) == (32 if cp_size == 2 else 64)
    cos, _ = rotary.get_cached_cos_sin(48)
    assert len(cos) == (32 if cp_size == 2 else 48 // cp_size)
    whole, _ = rotary.get_cached_cos_sin(48, packed_seq=True)
    assert len(whole) == 48


def test_dataset_helper_of_the_wheel_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import utils

    if Path(utils.__file__).with_name("Makefile").exists():
        pytest.skip("a source tree, whose helper is compiled")
    monkeypatch.setenv("PATH", "")
    utils.compile_helpers()


@pytest.mark.parametrize("experts", [None, 2], ids=["dense", "experts"])
def test_layers_of_transformer_engine_are_refused_by_name_where_it_is_missing(experts: int | None) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import gpt_layer_specs

    if HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    with pytest.raises(ValueError, match=r"^transformer_impl: .* --transformer-impl local"):
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=experts)


def test_repairing_twice_changes_nothing() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock = seams.original(STATE_DICT)
    wheel_repairs.install()
    assert seams.original(STATE_DICT) is stock
    assert DistributedOptimizer.state_dict.__wrapped__ is stock


@pytest.mark.parametrize("layout", [[], ["--dist-ckpt-optim-fully-reshardable"]], ids=["by-rank", "by-parameter"])
def test_resuming_a_distributed_optimizer_is_exact(layout: list[str], tmp_path: Path) -> None:
    saved = ["--use-distributed-optimizer", *layout, "--save-interval", "2", "--lr", "1e-2"]
    whole = launch(tiny_gpt_args("mock", *saved, "--save", str(tmp_path), train_iters=4), num_ranks=2)
    resumed = launch(
        tiny_gpt_args("mock", *saved, "--load", str(tmp_path), "--ckpt-step", "2", train_iters=4), num_ranks=2
    )
    assert list(resumed.losses) == [3, 4]
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
