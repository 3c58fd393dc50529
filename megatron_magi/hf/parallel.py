"""Context parallelism for models of transformers: in a loop of one's own, in accelerate, and in the Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType, recursively_apply
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from megatron_magi.api.make_key import made_on_all_ranks
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.hf.attention import CP_GROUP, check_implementation
from megatron_magi.hf.layer_kinds import check_kinds
from megatron_magi.hf.loaders import prepare_by_batch
from megatron_magi.hf.media import decoder_of, embedded, give_to_decoder
from megatron_magi.hf.numbering import check_ropes
from megatron_magi.hf.outputs import gathered, whole
from megatron_magi.hf.planning_collator import PlanAhead
from megatron_magi.hf.router_losses import wrap_balance
from megatron_magi.hf.schedulers import prepare_schedulers
from megatron_magi.hf.shard import Shard, asks_routers, sharded
from megatron_magi.runtime.no_compile import outside_graphs

_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def context_parallel(
    model: PreTrainedModel,
    cp_group_or_mesh: Group,
    config: MagiConfig | None = None,
) -> PreTrainedModel:
    """Makes a model take whole batches, the same on all ranks, and compute this rank's part of them.

    Its forward shards the batch (`shard_batch`), computes, and returns the whole batch's loss, and logits: this rank's
    rows ``[1, num_rows, vocab_size]``, but where they have no gradient the whole batch's, gathered when first used.
    The gradients of a rank are those of its rows, times the number of ranks: they are averaged over ranks as those of
    data parallelism are, which FSDP over the joint mesh and DDP do. With ``num_items_in_batch`` a rank's sum of losses
    is divided by that number alone, as under data parallelism: loss and averaged gradients are to be multiplied by the
    number of ranks, which the Trainer does. On one rank the model stays as it is.

    Args:
        model: with ``attn_implementation="magi"``; before it is wrapped.
        cp_group_or_mesh: the ranks.
        config: how masks are planned and attention runs; None for the defaults.

    Returns:
        ``model``, with hooks.

    Raises:
        ValueError: the model is over another group already, attends otherwise, has layers that look at other tokens in
            another way (Mamba, indexed attention that `hf.indexed` does not know), has one output for a sequence, or
            computes another loss than that of a causal language model. In forward: as `shard_batch`, except that
            images, videos and audio are embedded by the model if it gives its language model nothing but embeddings
            and positions; no labels in training or with ``num_items_in_batch``.
    """
    group = group_of(cp_group_or_mesh, "cp_group_or_mesh")
    if group is None or group.size() == 1:
        return model
    over = getattr(model, CP_GROUP, None)
    if over is not None:
        if over != group.group_name:
            raise ValueError("cp_group_or_mesh: the model is context-parallel over another group already")
        return model
    _check_model(model)
    own_numbers, has_own_loss = _own_numbers(model), _has_own_loss(model)

    @outside_graphs
    def shard(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        batch = {**dict(zip(names, args, strict=False)), **kwargs, "use_cache": False}
        with made_on_all_ranks(group, config):
            _check_call(module, batch, own_numbers, has_own_loss)
        if hasattr(batch.get("attention_mask"), "magi_shard"):
            return (), batch
        return (), _rows_of(module, batch, group, config)

    @outside_graphs
    def whole_loss(_module: PreTrainedModel, _args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if not kwargs["attention_mask"].magi_shard.num_calls:
            raise RuntimeError("attention_mask: no layer attended by it; the model's attention is not transformers'")
        of_batch, has_loss = kwargs["attention_mask"].magi_shard, kwargs.get("labels") is not None
        if of_batch.is_of_model:  # else the caller knows of rows, and undispatches them
            output = gathered(output, of_batch, kwargs["attention_mask"].shape[1], has_loss)
        _return_router_loss(output, of_batch)
        if has_loss:
            loss = output["loss"] if isinstance(output, dict) else output[0]
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            mean /= group.size()
            # Without a gradient bitwise the same on all ranks, which may choose the best model by it.
            loss = loss + (mean - loss.detach()) if loss.requires_grad else mean
            if isinstance(output, tuple):
                return loss, *output[1:]
            output["loss"] = loss
        return output

    model.register_forward_pre_hook(shard, with_kwargs=True)
    model.register_forward_hook(whole_loss, with_kwargs=True)
    give_to_decoder(model)
    setattr(model, CP_GROUP, group.group_name)
    for module in (decoder_of(model) or model).modules():  # vision encoders attend over what all ranks have
        setattr(module, CP_GROUP, group.group_name)
    return model


def _rows_of(
    model: PreTrainedModel, batch: dict[str, Any], group: dist.ProcessGroup, config: MagiConfig | None
) -> dict[str, Any]:
    """The model's arguments for this rank's rows of a batch, whose images are embedded first. Collective."""
    with made_on_all_ranks(group, config):
        _check_training(model, batch)
        media = embedded(model, batch)
    local, made = sharded(media.batch, group, model.config, config, media.compared)
    made.is_of_model = True
    media.attach(made, local)
    return local


@dataclass
class MagiParallelismConfig(ParallelismConfig):
    """accelerate's configuration with this package's context parallelism, for `Accelerator` and ``TrainingArguments``.

    The Trainer and training scripts stay as they are; the model has ``attn_implementation="magi"``. Ranks of a
    context-parallel group read the same batches. Parameters are sharded over ``dp_shard`` and ``cp`` together where
    FSDP2 is used; without it DDP averages gradients over all ranks.

    Args (in addition to those of `ParallelismConfig`):
        magi_config: how masks are planned and attention runs; None for the defaults.
    """

    magi_config: MagiConfig | None = None

    @property
    def cp_enabled(self) -> bool:
        """False: it stands for the implementation of accelerate, which drops masks and takes SDPA alone."""
        return False

    @property
    def _cp_dims(self) -> list[str]:
        return ["cp"] if self.cp_size > 1 else []

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions whose ranks read the same batch."""
        return super().non_dp_dim_names + self._cp_dims

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which FSDP shards parameters."""
        return super().dp_shard_cp_dim_names + self._cp_dims

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which the loss is averaged."""
        return super().dp_cp_dim_names + self._cp_dims

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Called by an accelerator when it is made: models that it prepares from here on are context-parallel."""
        if self.total_size != accelerator.num_processes:
            hint = "; on CPUs pass cpu=True to the accelerator" if accelerator.num_processes == 1 else ""
            raise ValueError(
                f"cp_size: all sizes together are {self.total_size} ranks, there are {accelerator.num_processes}{hint}"
            )
        if self.cp_size == 1:
            return
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError("parallelism_config: cp_size above 1 works with FSDP2 or DDP, not with DeepSpeed")
        group, ahead = self.get_device_mesh()["cp"].get_group(), PlanAhead()

        def sharded(prepare: Callable) -> Callable:
            def prepare_context_parallel(*args: Any, **kwargs: Any) -> Any:
                for model in args:
                    if not isinstance(model, torch.nn.Module):
                        continue
                    if not getattr(model, "_is_accelerate_prepared", False):
                        context_parallel(_pretrained(model), group, self.magi_config)
                        dtype = dtype_of_attention(accelerator, model)
                        ahead.set_model(_pretrained(model), dtype, self.magi_config, group.size(), group.rank())
                    elif accelerator.distributed_type in _DDP and not isinstance(model, DistributedDataParallel):
                        _refuse_training_after_evaluation(args)
                return prepare(*args, **kwargs)

            return prepare_context_parallel

        # The Trainer calls the second one where it evaluates alone.
        accelerator.prepare, accelerator.prepare_model = map(sharded, (accelerator.prepare, accelerator.prepare_model))
        prepare_by_batch(accelerator, self, ahead)
        prepare_schedulers(accelerator, self.dp_replicate_size * self.dp_shard_size)
        accelerator.gather_for_metrics = _OncePerBatch(accelerator, self).gather_for_metrics


def _refuse_training_after_evaluation(prepared: tuple) -> None:
    """Refuses to prepare an optimizer with a model that was prepared for evaluation, so without DDP."""
    if any(isinstance(x, torch.optim.Optimizer) for x in prepared):
        raise ValueError(
            "model: the Trainer has evaluated it before training, after which accelerate does not wrap it in DDP, so "
            "that gradients would not be averaged over ranks; make a new Trainer for training, or use FSDP2"
        )


def dtype_of_attention(accelerator: Accelerator, model: torch.nn.Module) -> torch.dtype:
    """What queries and keys of a model will be in: autocast's dtype, FSDP's, or that of the parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if dtype == torch.float64:
        return dtype
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    policy = getattr(getattr(accelerator.state, "fsdp_plugin", None), "mixed_precision_policy", None)
    return getattr(policy, "param_dtype", None) or dtype


class _OncePerBatch:
    """An accelerator that gathers from one rank of each batch, so that a metric counts no sample several times."""

    def __init__(self, accelerator: Accelerator, parallel: MagiParallelismConfig) -> None:
        mesh = parallel.get_device_mesh()
        self._accelerator = accelerator
        self._of_one_batch = [mesh[name].get_group() for name in parallel.non_dp_dim_names]
        self._of_batches = mesh["dp"].get_group() if parallel.dp_dim_names else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensors: Any) -> Any:
        return recursively_apply(self._gather, tensors)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Of the first rank of each batch. Memory for one copy of each batch is enough: they may be logits."""
        x = x.detach().clone(memory_format=torch.contiguous_format).view(x.shape or (1,))
        for group in self._of_one_batch:
            dist.broadcast(x, group=group, group_src=0)
        if self._of_batches is None:
            return x
        out = x.new_empty((self._of_batches.size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, self._of_batches)
        return out

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's, which gathers tensors by `gather`, and lists of anything else by a function of its own."""
        input_data = recursively_apply(whole, input_data)
        use_gather_object = use_gather_object or not _has_tensors_alone(input_data)
        if use_gather_object and any(group.rank() for group in self._of_one_batch):
            input_data = []
        return type(self._accelerator).gather_for_metrics(self, input_data, use_gather_object)


def _has_tensors_alone(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _pretrained(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, or the one inside an adapter."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inside, PreTrainedModel):
        raise ValueError(f"model: expected a PreTrainedModel under context parallelism, got {type(model).__name__}")
    return inside


def _own_numbers(model: PreTrainedModel) -> str:
    """The module by which positions that are not given depend on tokens, padding or an offset; empty if there is none.

    Of transformers' tables of positions only a plain one counts from 0 in the order of the sequence.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("embed_positions", "position_embeddings"):
            is_plain = type(module) is torch.nn.Embedding and module.padding_idx is None
            if not is_plain:
                return name
    return ""


def _has_own_loss(model: PreTrainedModel) -> bool:
    """Whether no forward in the model calls transformers' loss function, which takes successors from shift_labels."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    forwards = (vars(one).get("forward") for module in models for one in type(module).__mro__)
    return not any("loss_function" in inspect.unwrap(forward).__code__.co_names for forward in forwards if forward)


def _is_replaced(model: PreTrainedModel) -> bool:
    """Whether the model object was given a forward that takes labels, and not successors from shift_labels.

    Forwards of its classes, which accelerate puts there too, are `_has_own_loss`'s.
    """
    if (forward := vars(model).get("forward")) is None:
        return False
    of_classes = [inspect.unwrap(vars(one)["forward"]) for one in type(model).__mro__ if "forward" in vars(one)]
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if function in of_classes:
            return False
        code = getattr(function, "__code__", None)
        if code is not None and "labels" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            known = {*code.co_names, *code.co_varnames, *(name for name in code.co_consts if isinstance(name, str))}
            return known.isdisjoint(("loss_function", "shift_labels"))
        forward = getattr(function, "__wrapped__", None)  # of autocast, and of others that pass on what they are given
    return False


def _check_model(model: PreTrainedModel) -> None:
    check_implementation(model.config)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model: {type(model).__name__} takes no position_ids, by which the tokens of a rank have their places"
        )
    check_kinds(model.config, model)
    if getattr(model, "loss_type", None) in ("ForSequenceClassification", "ForQuestionAnswering"):
        raise ValueError(
            f"model: {type(model).__name__} looks for a token in the whole sequence, of which a rank has its rows; "
            "use it without context parallelism"
        )
    check_ropes(model.config)


def _check_call(model: PreTrainedModel, batch: dict[str, Any], own_numbers: str, has_own_loss: bool) -> None:
    if own_numbers and batch.get("position_ids") is None:
        raise ValueError(
            f"position_ids: {type(model).__name__} numbers tokens in a way of its own ({own_numbers}), which a rank "
            "cannot do for its part; give them"
        )
    # Of PEFT's adapters, which a model may get at any time.
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        raise ValueError(
            "alora_invocation_tokens: activated LoRA changes the last rows of a sequence, and a rank's last rows are "
            "others; use LoRA, or one rank"
        )
    if asks_routers(model.config, batch):
        _check_routers(model, batch)
    if batch.get("labels") is not None and model.loss_function is not ForCausalLMLoss:
        raise ValueError(f"labels: expected the loss of a causal language model, {type(model).__name__} has another")
    if batch.get("labels") is not None and (has_own_loss or _is_replaced(model)):
        raise ValueError(
            f"labels: {type(model).__name__} computes its loss by code of its own, which takes a row for the successor "
            "of the one before it; call shard_batch before the model, and compute the loss from shift_labels"
        )
    keep = batch.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep:
        raise ValueError(
            "logits_to_keep: tokens are not in order under context parallelism; keep all logits. To generate, save the "
            "model and load it again: it is then on one rank"
        )


def _check_routers(model: PreTrainedModel, batch: dict[str, Any]) -> None:
    if not wrap_balance(one for one in model.modules() if isinstance(one, PreTrainedModel)):
        raise ValueError(
            f"output_router_logits: {type(model).__name__} has no router loss that is known here, and a rank does not "
            "know the balance of experts over a whole sequence; set it to False"
        )
    returns = batch.get("return_dict")
    if not (model.config.return_dict if returns is None else returns):
        raise ValueError("return_dict: expected True with output_router_logits")


def _return_router_loss(output: Any, shard: Shard) -> None:
    """The batch's, which is not divided by the number of ranks, as its part of the loss may be."""
    if isinstance(output, dict) and isinstance(output.get("aux_loss"), torch.Tensor):
        if shard.router_loss is None:
            raise RuntimeError("output_router_logits: the model has computed a router loss by code of its own")
        output["aux_loss"], shard.router_loss = shard.router_loss, None


def _check_training(model: PreTrainedModel, batch: dict[str, Any]) -> None:
    has_labels = batch.get("labels") is not None or batch.get("shift_labels") is not None
    if batch.get("num_items_in_batch") is not None and not has_labels:
        # The Trainer then computes the loss from logits and multiplies it by the number of ranks, in evaluation too.
        raise ValueError(
            "labels: none were given with num_items_in_batch; the Trainer takes them away for label_smoothing_factor "
            "and compute_loss_func, which cannot be used under context parallelism"
        )
    embeds = batch.get("inputs_embeds")
    has_gradient = any(p.requires_grad for p in model.parameters()) or (embeds is not None and embeds.requires_grad)
    if not (model.training and torch.is_grad_enabled() and has_gradient):
        return
    if not has_labels:
        raise ValueError(
            "labels: none were given in training, and the logits of a context-parallel model are those of this rank's "
            "rows, from which label_smoothing_factor, compute_loss_func and other losses cannot be computed; give "
            "labels, or for a loss of your own call shard_batch before the model; without gradients (torch.no_grad) "
            "none are needed"
        )
    if hasattr(model.get_input_embeddings(), "neftune_noise_alpha"):
        raise ValueError(
            "neftune_noise_alpha: its noise depends on the length of the sequence, of which a rank has its rows; it "
            "cannot be used under context parallelism"
        )
