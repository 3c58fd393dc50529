"""The command line of the script, parsed and validated."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.training import argument_utils, arguments

from megatron_magi.mcore import entry, install, model_provider
from megatron_magi.mcore.settings import buffer_length
from megatron_magi.mcore.validate import check_padding
from megatron_magi.testing.megatron_launch import tiny_gpt_args

TOKENIZER = ("--tokenizer-type", "NullTokenizer")


def _parse(
    monkeypatch: pytest.MonkeyPatch,
    *extra: str,
    cp_size: int = 2,
    without: tuple[str, ...] = (),
    seq_length: int = 128,
    connections: str | None = "1",
) -> Namespace:
    monkeypatch.setenv("WORLD_SIZE", str(cp_size))
    # As the launcher's ranks have it; needed with several devices.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections or "")
    if connections is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(arguments, "set_global_variables", lambda args: None)
    argv = tiny_gpt_args("mock", *extra, context_parallel_size=cp_size, seq_length=seq_length)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *(a for a in argv if a not in without)])
    install()
    return entry._parse()


@pytest.mark.parametrize("cp_size", [1, 2], ids=["stock", "magi"])
def test_tokenizer_type_may_be_left_out_as_with_megatrons_script(monkeypatch: pytest.MonkeyPatch, cp_size: int) -> None:
    assert _parse(monkeypatch, cp_size=cp_size, without=TOKENIZER).tokenizer_type == "GPT2BPETokenizer"
    assert _parse(monkeypatch, cp_size=cp_size).tokenizer_type == "NullTokenizer"


@pytest.mark.parametrize("cp_size", [1, 2], ids=["stock", "magi"])
def test_arguments_of_a_checkpoint_need_a_checkpoint(monkeypatch: pytest.MonkeyPatch, cp_size: int) -> None:
    with pytest.raises(AssertionError, match="--use-checkpoint-args requires --load"):
        _parse(monkeypatch, "--use-checkpoint-args", cp_size=cp_size)


@pytest.mark.parametrize("cp_size", [1, 2], ids=["stock", "magi"])
def test_yaml_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, cp_size: int) -> None:
    with pytest.raises(ValueError, match=r"^yaml_cfg: "):
        _parse(monkeypatch, "--yaml-cfg", "a.yaml", cp_size=cp_size)


def test_yaml_is_refused_in_a_users_script_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--attention-backend", "magi", "--yaml-cfg=a.yaml"])
    with pytest.raises(ValueError, match=r"^yaml_cfg: "):
        install()


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("hybrid_layer_pattern", ("--hybrid-layer-pattern", "M*")),
        ("position_embedding_type", ("--position-embedding-type", "mrope", "--mrope-section", "4", "2", "2")),
    ],
    ids=["hybrid", "mrope"],
)
def test_models_that_the_script_would_not_build_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: tuple[str, ...]
) -> None:
    for more in ((), ("--attention-backend", "magi")):
        with pytest.raises(ValueError, match=f"^{name}: "):
            _parse(monkeypatch, *extra, *more, cp_size=1)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    "extra",
    [
        ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights", "--ckpt-format", "torch_dist"),
        ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"),
    ],
    ids=["torch", "megatron"],
)
def test_fsdp_has_more_than_one_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: tuple[str, ...], cp_size: int
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"{extra[0].removeprefix('--')}: true\n")
    for given in (extra, ("--config", str(file), *extra[1:])):
        args = _parse(monkeypatch, *given, cp_size=cp_size, connections=None, without=("--use-distributed-optimizer",))
        assert args.use_torch_fsdp2 or args.use_megatron_fsdp
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    _parse(monkeypatch, cp_size=cp_size, connections=None)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize("cp_size", [1, 2], ids=["stock", "magi"])
def test_rotary_angles_are_scaled_by_the_factor_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, cp_size: int
) -> None:
    """Megatron does not read it, and scales by 8 (Llama 3.1) where 32 is asked for (Llama 3.2)."""
    args = _parse(monkeypatch, "--use-rope-scaling", "--rope-scaling-factor", "32", cp_size=cp_size)
    args.padded_vocab_size = 288
    built: dict = {}
    monkeypatch.setattr(model_provider.gpt, "GPTModel", lambda **options: built.update(options))
    notice = r"^rope_scaling_factor: .* scaled by 32; Megatron itself .* by 8"
    with pytest.warns(UserWarning, match=notice):
        provider = model_provider.GPTProvider(args, None, [])
    monkeypatch.setattr(provider, "_layer_spec", lambda *_: None)
    provider(True, True, config=SimpleNamespace())
    assert built["rope_scaling"] and built["rope_scaling_factor"] == 32
    if not hasattr(argument_utils, "gpt_config_from_args"):
        return  # the provider builds all GPTs
    with pytest.warns(UserWarning, match=notice):
        config = argument_utils.gpt_config_from_args(args)
    assert config.rope_scaling and config.rope_scaling_factor == 32
    args.rope_scaling_factor = 8.0
    assert argument_utils.gpt_config_from_args(args).rope_scaling_factor == 8
    del args.rope_scaling_factor  # a YAML file need not name it
    assert argument_utils.gpt_config_from_args(args).rope_scaling_factor == 8
    args.use_rope_scaling, args.rope_scaling_factor = False, 32.0
    assert argument_utils.gpt_config_from_args(args).rope_scaling_factor == 8


def test_chunks_longer_than_the_share_of_a_rank_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(arguments, "warn_rank_0", lambda text, *rest: notices.append(text))
    _parse(monkeypatch, "--magi-chunk-size", "64")
    assert not any("magi_chunk_size" in text for text in notices)
    _parse(monkeypatch, "--magi-chunk-size", "96")
    assert [text for text in notices if "magi_chunk_size" in text] == [
        "magi_chunk_size: 96 tokens are more than a rank's share of 64, so sequences of 128 tokens are padded to 192"
    ]


def test_arguments_keep_the_length_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _parse(monkeypatch, seq_length=125)
    assert (args.seq_length, args.encoder_seq_length) == (125, 125)
    assert buffer_length(args) == 126


@pytest.mark.parametrize(
    ("name", "value"), [("tp_comm_overlap", True), ("cuda_graph_impl", "transformer_engine")], ids=str
)
def test_buffers_that_do_not_know_the_padding_are_refused_by_name(name: str, value: object) -> None:
    args = SimpleNamespace(seq_length=125, tp_comm_overlap=False, cuda_graph_impl="none", num_experts=None)
    check_padding(args, 126)
    setattr(args, name, value)
    check_padding(args, 125)
    with pytest.raises(ValueError, match=f"^{name}: .* give --seq-length 126"):
        check_padding(args, 126)


FULL_VALIDATION = ("--full-validation", "--multiple-validation-sets", "--micro-batch-size", "2")


def test_validation_of_whole_sets_may_take_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _parse(monkeypatch, *FULL_VALIDATION)
    _parse(monkeypatch, *FULL_VALIDATION, "--micro-batch-size", "1", seq_length=125)
    with pytest.raises(ValueError, match=r"^full_validation: .* from 125 to 128 tokens, in training to 126; give"):
        _parse(monkeypatch, *FULL_VALIDATION, seq_length=125)
    pipeline = ("--pipeline-model-parallel-size", "2", "--attention-backend", "magi", "--context-parallel-size", "1")
    with pytest.raises(ValueError, match=r"^full_validation: .* expect micro_batch_size=2; give"):
        _parse(monkeypatch, *FULL_VALIDATION, *pipeline)


def test_several_validation_sets_are_not_taken_for_the_data_of_interleaved_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = ("--num-layers", "4", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1")
    given = (*FULL_VALIDATION, *stages, "--attention-backend", "magi", "--context-parallel-size", "1")
    _parse(monkeypatch, *given)
    with pytest.raises(ValueError, match=r"^multiple_validation_sets: .* interleaved"):
        _parse(monkeypatch, *given, "--num-virtual-stages-per-pipeline-rank", "2")


def _with_experts(**given: object) -> SimpleNamespace:
    """Arguments of a model with experts whose sequences are padded from 125 to 126; ``given`` in place of defaults."""
    usual = {
        "seq_length": 125, "tp_comm_overlap": False, "cuda_graph_impl": "none", "num_experts": 4,
        "moe_router_load_balancing_type": "aux_loss", "moe_expert_capacity_factor": None, "moe_z_loss_coeff": None,
        "calculate_per_token_loss": False, "overlap_moe_expert_parallel_comm": False, "mlp_chunks_for_training": 1,
    }  # fmt: skip
    return SimpleNamespace(**usual | given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["quantile_balancing"]),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("overlap_moe_expert_parallel_comm", True),
        ("mlp_chunks_for_training", 2),
    ],
    ids=str,
)
def test_padding_that_would_take_the_place_of_tokens_at_experts_is_refused_by_name(name: str, value: object) -> None:
    losses = {"moe_aux_loss_coeff": [0.0, 1e-2], "moe_z_loss_coeff": 1e-3}
    args = _with_experts(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], **losses)
    check_padding(args, 126)
    setattr(args, name, value)
    check_padding(args, 125)
    with pytest.raises(ValueError, match=f"^{name}: .* padded from 125 to 126; give --seq-length 126"):
        check_padding(args, 126)


@pytest.mark.parametrize(
    ("option", "given"), [("overlap_moe_expert_parallel_comm", True), ("mlp_chunks_for_training", 2)]
)
def test_padding_that_no_loss_and_no_bias_of_experts_counts_may_be_routed(option: str, given: object) -> None:
    args = _with_experts(
        calculate_per_token_loss=True, moe_aux_loss_coeff=0.0, moe_router_enable_expert_bias=False, **{option: given}
    )
    check_padding(args, 126)
    for name, value in (
        ("moe_aux_loss_coeff", 1e-2),
        ("moe_z_loss_coeff", 1e-3),
        ("moe_router_enable_expert_bias", True),
    ):
        with pytest.raises(ValueError, match=f"^{option}: "):
            check_padding(SimpleNamespace(**{**vars(args), name: value}), 126)


def test_model_initialised_on_the_cpu_moves_to_the_gpu_it_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chunk(torch.nn.Module):
        def cuda(self, device: int) -> Chunk:
            self.device = device
            return self

    args = SimpleNamespace(use_cpu_initialization=True, use_torch_fsdp2=False, init_model_with_meta_device=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert entry._device_hooks(args) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    (hook,) = entry._device_hooks(args)
    assert [chunk.device for chunk in hook([Chunk(), Chunk()])] == [3, 3]
    for name, value in (("use_cpu_initialization", False), ("init_model_with_meta_device", True)):
        assert entry._device_hooks(SimpleNamespace(**{**vars(args), name: value})) == []


@pytest.mark.parametrize(("is_untied", "expected"), [(True, [4]), (False, [4, 10])], ids=["untied", "tied"])
def test_embedding_ranks_are_the_ends_that_hold_one(is_untied: bool, expected: list[int]) -> None:
    args = SimpleNamespace(untie_embeddings_and_output_weights=is_untied)
    config = SimpleNamespace(mtp_num_layers=None)
    assert entry._embedding_ranks(args, config, [4, 6, 8, 10]) == expected
    assert entry._embedding_ranks(args, config, [4]) == [4]
    config = SimpleNamespace(mtp_num_layers=1, pipeline_model_parallel_layout=None)
    assert entry._embedding_ranks(args, config, [4, 6, 8, 10]) == [4, 10]
