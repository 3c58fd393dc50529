"""`main`: Megatron's own trainer on a GPT, with one more value of `--attention-backend`."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from megatron_magi import envs
from megatron_magi.mcore import cpu_device, wheel_repairs
from megatron_magi.mcore.argv import FLAG, add_arguments, rewrite_argv
from megatron_magi.mcore.config_file import expand_config
from megatron_magi.mcore.trainer import check_padding, dispatched_training
from megatron_magi.mcore.validate import check_unused
from megatron_magi.mcore.versions import check_version

_ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's GPT script takes where the command line says nothing."""


def main(
    argv: Sequence[str] | None = None,
    *,
    pre_wrap_hooks: Sequence[Callable] = (),
    dataset_provider: Callable[[Sequence[int]], Sequence[Any]] | None = None,
) -> None:
    """Trains a GPT as the command line says.

    Args:
        argv: Megatron's arguments, without the program's name; those of the process when None.
        pre_wrap_hooks: called in order with the list of model chunks before they are wrapped for
            data parallelism; each returns the list.
        dataset_provider: called, in place of Megatron's own data sets, with the numbers of training, validation
            and test samples that are needed; returns the three data sets, or None where there is none. An item
            is a dict of tensors of ``--seq-length`` tokens, ``tokens``, ``labels``, ``loss_mask`` and
            ``position_ids``; documents as padded ``cu_seqlens``, if it has any; and whatever a mask
            needs, of one shape for all items.

    Raises:
        ValueError: an argument, or the version of megatron-core, is not supported.
    """
    check_version()
    cpu_device.install()
    wheel_repairs.install()
    # Megatron's trainer parses sys.argv again, without the options of this package.
    sys.argv = [sys.argv[0], *rewrite_argv(expand_config(sys.argv[1:] if argv is None else argv))]

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = _parse()
    loss_log = _install_loss_log(args)
    make_parts = _magi_parts if args.magi_attention else _stock_parts
    parts = make_parts(args, loss_log, dataset_provider)
    model_config, provider, forward_step = parts
    model_config.pre_wrap_hooks += [*pre_wrap_hooks, *_device_hooks(args)]
    config = pretrain_cfg_container_from_args(args, model_cfg=model_config)
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(training.pretrain)
    embedding_ranks = functools.partial(_embedding_ranks, args, model_config.transformer)
    with dispatched_training(_buffer_length(args)) if args.magi_attention else nullcontext():
        pretrain(
            config,
            provider,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=embedding_ranks,
        )


def _parse() -> Namespace:
    """Parses and validates as Megatron's script does, for magi with our checks around its own."""
    from megatron.training import arguments

    if any(argument.partition("=")[0] == "--yaml-cfg" for argument in sys.argv):
        raise ValueError("yaml_cfg: not supported; give the arguments themselves")
    validate = arguments.validate_args
    if FLAG in sys.argv:
        validate = functools.partial(_validate_for_magi, validate)
    with mock.patch.object(arguments, "validate_args", validate):
        args = arguments.parse_and_validate_args(add_arguments, args_defaults=_ARGS_DEFAULTS)
    if FLAG not in sys.argv:
        check_unused(args)
    return args


def _validate_for_magi(stock: Callable, args: Namespace, defaults: Mapping[str, Any]) -> None:
    """Validates in place: with our checks, Megatron's own (``stock``) and those of the result."""
    from megatron.training import arguments

    from megatron_magi.mcore.settings import layer_masks
    from megatron_magi.mcore.validate import settle_arguments, validate_arguments

    validate_arguments(args)
    for notice in settle_arguments(args):
        arguments.warn_rank_0(notice)
    # Megatron wants Transformer Engine for these two; here core attention reports the logits itself.
    wanted = {name: getattr(args, name) for name in ("qk_clip", "log_max_attention_logit")}
    for name in wanted:
        setattr(args, name, False)
    if args.seq_length is not None and args.encoder_seq_length is None:
        # The other name of the same length; given by it, Megatron does not ask for a multiple of 2 * cp.
        args.encoder_seq_length, args.seq_length = args.seq_length, None
    stock(args, defaults)
    for name, value in wanted.items():
        setattr(args, name, value)
    check_padding(args, _buffer_length(args))
    layer_masks(args)
    if getattr(args, "eval_micro_batch_size", args.micro_batch_size) != args.micro_batch_size:
        raise ValueError(
            f"eval_micro_batch_size: must be micro_batch_size={args.micro_batch_size}, got {args.eval_micro_batch_size}"
        )


def _buffer_length(args: Namespace) -> int:
    """Tokens a sequence in Megatron's tensors; the data has ``args.seq_length``."""
    from megatron_magi.mcore.settings import magi_config, padded_seq_length

    return padded_seq_length(args, magi_config(args, envs.load().default_config()).dispatch)


def _embedding_ranks(args: Namespace, config: Any, pp_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline that hold the word embeddings, whose gradients Megatron adds up over them."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    output = set() if args.untie_embeddings_and_output_weights else {pp_ranks[-1]}
    return sorted({pp_ranks[0], *output, *get_mtp_ranks(pp_ranks, config)})


def _device_hooks(args: Namespace) -> list[Callable]:
    """Hooks that put a model initialised on the CPU where it is trained, which Megatron itself does not."""
    if not args.use_cpu_initialization or not torch.cuda.is_available():
        return []
    if args.use_torch_fsdp2 or args.init_model_with_meta_device:
        # These place the model themselves.
        return []

    def to_device(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return [chunk.cuda(torch.cuda.current_device()) for chunk in chunks]

    return [to_device]


def _install_loss_log(args: Namespace) -> Any:
    if args.magi_loss_log is None:
        return None
    from megatron_magi.mcore.loss_log import LossLog

    log = LossLog(args.magi_loss_log)
    log.install()
    return log


def _stock_parts(args: Namespace, _: Any, own_data: Callable | None) -> tuple[Any, Callable, Callable]:
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.stock_step import StockForwardStep, reads_data

    return gpt_config_from_args(args), make_dataset_provider(reads_data, own=own_data), StockForwardStep(args)


def _magi_parts(args: Namespace, loss_log: Any, own_data: Callable | None) -> tuple[Any, Callable, Callable]:
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_magi.mcore import experts, mtp
    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.forward_step import MagiForwardStep
    from megatron_magi.mcore.model import MagiGPTModelConfig

    mtp.install()
    experts.install()
    model_config = gpt_config_from_args(args, model_config_cls=MagiGPTModelConfig)
    forward_step = MagiForwardStep(lambda: _make_dispatcher(args), loss_log)
    # Every rank needs the plan of a batch, so every rank reads it.
    provider = make_dataset_provider(lambda vp_stage: True, forward_step.prepare, own_data)
    return model_config, provider, forward_step


def _make_dispatcher(args: Namespace) -> Any:
    from megatron.core.parallel_state import get_context_parallel_group, get_tensor_and_context_parallel_group
    from megatron.training import get_tokenizer

    from megatron_magi.mcore.batch import BatchDispatcher
    from megatron_magi.mcore.groups import make_agreement_group
    from megatron_magi.mcore.settings import layer_masks, magi_config

    environment = envs.load()
    config = magi_config(args, environment.default_config())
    # Tensor-parallel ranks read the data too. Pipeline stages do so at different times and cannot wait.
    readers = get_tensor_and_context_parallel_group()
    return BatchDispatcher(
        config,
        masks=layer_masks(args),
        own_positions=args.magi_mask is not None or args.magi_layer_masks is not None,
        eod=get_tokenizer().eod if args.reset_attention_mask else None,
        cp_group=get_context_parallel_group(),
        agreement_group=make_agreement_group(readers) if config.comm.verify else None,
        seq_length=_buffer_length(args),
        num_plans=environment.plan_cache_size,
    )
