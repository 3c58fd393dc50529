"""Repairs of the megatron-core wheel that training needs on every device, GPUs included.

Each states the defect and where it is in megatron-core 0.19.2; that the code is the code that is known is checked
by `seams.check`. Nothing on disk is touched.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_magi.mcore import seams

_HELPERS = "core.datasets.utils:compile_helpers"
_NORM = "core.transformer.torch_norm:WrappedTorchNorm.__new__"
_YARN = "core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache"
_OPTIMIZER = "core.optimizer.distrib_optimizer:DistributedOptimizer"
_LATENT = "core.transformer.multi_latent_attention"
_ABSORBED = "core.transformer.experimental_attention_variant.absorbed_mla:AbsorbedMLASelfAttention.__init__"
_LAYERS = "core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules"
_INFERENCE = "core.transformer.multi_token_prediction:is_inference_column_parallel_linear"
_REPLAYS = "core.rerun_state_machine:RerunDataIterator.__next__"
_MEGATRONS_SCALE = 8.0
"""Of rotary angles, with ``--use-rope-scaling``."""
_GPT_CONFIG = "training.argument_utils:gpt_config_from_args"
_SET = "_set_main_param_and_optimizer_states"


def install() -> None:
    """Repairs what this process has imported, or will import, of megatron. Idempotent.

    To be called after `cpu_device.install`, as it imports megatron.
    """
    _repair_compile_helpers()
    _repair_torch_norm()
    _repair_layer_spec()
    _repair_yarn()
    _repair_latent_attention()
    _repair_distributed_optimizer()
    _repair_inference_layers()
    _repair_replays()
    _repair_rope_scaling()


def _repair_compile_helpers() -> None:
    """The wheel has the compiled dataset helper but not its Makefile: `make` fails, the trainer exits.

    training/initialize.py:178, core/datasets/utils.py:20.
    """
    import megatron.core.datasets.utils as dataset_utils

    original = seams.original(_HELPERS)

    @functools.wraps(original)
    def compile_helpers() -> None:
        if (Path(dataset_utils.__file__).parent / "Makefile").exists():
            original()
            return
        import megatron.core.datasets.helpers_cpp  # noqa: F401  (fails where the wheel lacks the helper, too)

    seams.put(_HELPERS, compile_helpers)


def _repair_torch_norm() -> None:
    """The norms of torch work with sequence parallelism once their parameters say so, but are refused.

    core/transformer/torch_norm.py:50. The mark makes Megatron add up their gradients over the
    tensor-parallel group: distributed/finalize_model_grads.py.
    """
    original = seams.original(_NORM)

    @functools.wraps(original)
    def make_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = original(cls, accepted, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    seams.put(_NORM, make_norm)


def _repair_layer_spec() -> None:
    """Layers of Transformer Engine where it is not installed are a TypeError: 'NoneType' object is not callable.

    core/models/gpt/gpt_layer_specs.py:233.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        return
    original = seams.original(_LAYERS)

    @functools.wraps(original)
    def submodules(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "transformer_impl: transformer_engine, which is Megatron's default, but there is no Transformer Engine, or "
            "no GPU, which it needs; pip install '.[te]' in a checkout, or give --transformer-impl local"
        )

    seams.put(_LAYERS, submodules)


def _repair_yarn() -> None:
    """YaRN cannot be made where 2 * CP does not divide the model's original length, as with CP 3.

    core/models/common/embeddings/yarn_rotary_pos_embedding.py:98: a table of that length is cut for the ranks. Kept
    whole, it is made again for each share that is asked for.
    """
    original = seams.original(_YARN)

    @functools.wraps(original)
    def set_cache(
        self: Any, seq_len: int, offset: int, dtype: torch.dtype, packed_seq: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        given = args[0] if args else kwargs.get("cp_group")
        group = given if given is not None else self.cp_group
        cp_size = group.size() if group is not None else 1
        original(self, seq_len, offset, dtype, packed_seq or seq_len % (2 * cp_size) != 0, *args, **kwargs)

    seams.put(_YARN, set_cache)


def _repair_latent_attention() -> None:
    """Two gradients of multi-head latent attention are wrong under tensor parallelism.

    All heads share the rotary key, so its gradient is a sum over ranks. core/transformer/multi_latent_attention.py:754
    adds it up in the gather over the sequence, for a whole projection (Transformer Engine's) under sequence
    parallelism; otherwise the gradients of other ranks' heads are lost. A projection that is split (that of local
    layers) is gathered here and takes the same way; without sequence parallelism the sum is added.

    The norm of low-rank queries, without sequence parallelism, has the same whole gradient on all ranks, but
    distributed/finalize_model_grads.py:452 takes it by its name for a norm of heads and adds it up. Its mark here
    makes that a mean.

    Absorbed latent attention (experimental_attention_variant/absorbed_mla.py:470), which is for sequence parallelism
    alone, loses the gradients of the rotary key in split projections likewise.
    """
    for name in ("MLASelfAttention", "FusedMLASelfAttention"):
        down, init = f"{_LATENT}:{name}._qkv_down_projection", f"{_LATENT}:{name}.__init__"
        seams.put(down, _with_whole_rotary_key(seams.original(down)))
        seams.put(init, _with_marked_norm(seams.original(init)))
    if seams.needed(_ABSORBED):
        seams.put(_ABSORBED, _with_joined_projection(seams.original(_ABSORBED)))


def _with_marked_norm(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        norm = getattr(self, "q_layernorm", None)
        if norm is not None and not self.config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.average_gradients_across_tp_domain = True

    return init


def _with_joined_projection(original: Callable) -> Callable:
    from megatron.core import tensor_parallel

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        group, width = self.pg_collection.tp, self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim

        def join(_module: torch.nn.Module, _args: tuple, out: tuple) -> tuple:
            if group.size() == 1 or out[0].size(-1) == width:
                return out
            latent = tensor_parallel.gather_from_tensor_model_parallel_region(out[0], group=group)
            return tensor_parallel.scatter_to_sequence_parallel_region(latent, group=group), *out[1:]

        self.linear_kv_down_proj.register_forward_hook(join)

    return init


def _with_whole_rotary_key(original: Callable) -> Callable:
    from megatron.core import tensor_parallel

    @functools.wraps(original)
    def project(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, latent = original(self, hidden_states)
        group, config = self.pg_collection.tp, self.config
        if group.size() == 1:
            return queries, latent
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        is_split = latent.size(-1) != sum(widths)
        if is_split:
            latent = tensor_parallel.gather_from_tensor_model_parallel_region(latent, group=group)
        if not config.sequence_parallel:
            compressed, rotary_key = latent.split(widths, dim=-1)
            rotary_key = tensor_parallel.copy_to_tensor_model_parallel_region(rotary_key, group=group)
            latent = torch.cat([compressed, rotary_key], dim=-1)
        elif is_split:
            latent = tensor_parallel.scatter_to_sequence_parallel_region(latent, group=group)
        return queries, latent

    return project


def _repair_distributed_optimizer() -> None:
    """Without Apex and Transformer Engine, a distributed optimizer can be saved but not resumed.

    With torch's AdamW each parameter has its own ``step``, which core/optimizer/distrib_optimizer.py gets
    wrong: saving asserts that there is one before the first iteration (:839, and a resume
    begins with that); loading gives all parameters one shared tensor, which then counts every parameter's
    step, or puts back the tensor of before the load (:1031, :1087); a checkpoint without it is a
    KeyError (:1225). And of the formats, dp_reshardable alone (:2061) writes into fp32 parameters with
    gradients on, which torch refuses.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    names = (f"{_OPTIMIZER}.state_dict", f"{_OPTIMIZER}.load_state_dict", f"{_OPTIMIZER}.{_SET}")
    original_state_dict, original_load, original_set = (seams.original(name) for name in names)

    @functools.wraps(original_state_dict)
    def state_dict(self: Any) -> dict[str, Any]:
        if self.optimizer.state:
            return original_state_dict(self)
        inner = self.optimizer.state_dict()
        groups = [{**{k: v for k, v in g.items() if k != "params"}, "step": 0.0} for g in inner["param_groups"]]
        found = {"optimizer": {**{k: v for k, v in inner.items() if k != "state"}, "param_groups": groups}}
        if self.grad_scaler:
            found["grad_scaler"] = self.grad_scaler.state_dict()
        return found

    @functools.wraps(original_load)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original_load(self, state_dict)
        if self.ddp_config.use_megatron_fsdp:
            return
        step = state_dict["optimizer"]["param_groups"][0]["step"]
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], step)

    @functools.wraps(original_set)
    @torch.no_grad()
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # A value that is no tensor is skipped; `load_state_dict` sets the step for all.
        original_set(self, model_param, {**tensors, "step": None})

    for name, repaired in zip(names, (state_dict, load_state_dict, set_states), strict=True):
        seams.put(name, repaired)


def _repair_inference_layers() -> None:
    """Without Transformer Engine, multi-token prediction cannot be built: a TypeError of isinstance.

    Megatron 0.20, core/tensor_parallel/inference_layers.py:564: the classes are then stand-ins, and no layer is one.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if not HAVE_APEX_OR_TE and seams.needed(_INFERENCE):
        seams.put(_INFERENCE, lambda module: False)


def _repair_replays() -> None:
    """What is kept to replay an iteration is the microbatch itself, which a forward step may change.

    Before 0.19, core/rerun_state_machine.py:1157; later a copy, which `loader.LoadedBatch` relies on.
    """
    if not seams.needed(_REPLAYS):
        return
    original = seams.original(_REPLAYS)

    @functools.wraps(original)
    def following(self: Any) -> Any:
        item = original(self)
        if not self.replaying and self.saved_microbatches and self.saved_microbatches[-1] is item:
            self.saved_microbatches[-1] = copy.copy(item)
        return item

    seams.put(_REPLAYS, following)


def _repair_rope_scaling() -> None:
    """``--rope-scaling-factor`` is parsed and never read: rotary angles are scaled by 8, as Llama 3.1's are.

    training/argument_utils.py:464. Before 0.19 `model_provider.GPTProvider` builds GPTs, which reads it.
    """
    if not seams.needed(_GPT_CONFIG):
        return
    original = seams.original(_GPT_CONFIG)

    @functools.wraps(original)
    def gpt_config_from_args(args: Any, *more: Any, **options: Any) -> Any:
        config = original(args, *more, **options)
        is_read = config.position_embedding_type == "rope" and not config.transformer.multi_latent_attention
        if config.rope_scaling and is_read and notice_rope_scaling(args):
            config.rope_scaling_factor = args.rope_scaling_factor
        return config

    seams.put(_GPT_CONFIG, gpt_config_from_args)


def notice_rope_scaling(args: Any) -> bool:
    """Whether rotary angles are to be scaled by another factor than Megatron's; says so."""
    from megatron.training.utils import warn_rank_0

    factor = getattr(args, "rope_scaling_factor", _MEGATRONS_SCALE)  # a YAML file need not name it
    if factor == _MEGATRONS_SCALE:
        return False
    warn_rank_0(
        f"rope_scaling_factor: rotary angles are scaled by {factor:g}; Megatron itself does not read this option and "
        f"scales by {_MEGATRONS_SCALE:g}"
    )
    return True
