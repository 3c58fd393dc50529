"""`main`: Megatron's own trainer on a GPT, with one more value of `--attention-backend`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_magi import envs
from megatron_magi.mcore import cpu_device, wheel_repairs
from megatron_magi.mcore.argv import FLAG, add_arguments, rewrite_argv
from megatron_magi.mcore.versions import check_version


def main(argv: Sequence[str] | None = None, *, pre_wrap_hooks: Sequence[Callable] = ()) -> None:
    """Trains a GPT as the command line says.

    Args:
        argv: Megatron's arguments, without the program's name; those of the process when None.
        pre_wrap_hooks: called in order with the list of model chunks before they are wrapped for
            data parallelism; each returns the list.

    Raises:
        ValueError: an argument, or the version of megatron-core, is not supported.
    """
    # Megatron's trainer parses sys.argv again, without the options of this package.
    sys.argv = [sys.argv[0], *rewrite_argv(sys.argv[1:] if argv is None else argv)]
    check_version()
    cpu_device.install()
    wheel_repairs.install()

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = _parse()
    loss_log = _install_loss_log(args)
    parts = _magi_parts(args, loss_log) if args.magi_attention else _stock_parts(args)
    model_config, provider, forward_step = parts
    model_config.pre_wrap_hooks += list(pre_wrap_hooks)
    config = pretrain_cfg_container_from_args(args, model_cfg=model_config)
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(training.pretrain)
    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step, store=store)


def _parse() -> Namespace:
    """Parses and validates as Megatron does, for magi with our checks before its own."""
    from megatron.training import arguments
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    if FLAG not in sys.argv:
        return arguments.parse_and_validate_args(add_arguments)
    args = arguments.parse_args(add_arguments)
    if args.yaml_cfg is not None:
        raise ValueError("yaml_cfg: not supported with --attention-backend magi; give the arguments themselves")
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    _validate_for_magi(args)
    set_global_variables(args)
    return args


def _validate_for_magi(args: Namespace) -> None:
    from megatron.training import arguments

    from megatron_magi.mcore.settings import magi_config, padded_seq_length
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
    arguments.validate_args(args)
    for name, value in wanted.items():
        setattr(args, name, value)
    # The data has seq_length tokens; Megatron's buffers have what dispatch makes of it.
    config = magi_config(args, envs.load().default_config())
    args.magi_seq_length = args.seq_length
    args.seq_length = args.encoder_seq_length = padded_seq_length(args, config.dispatch)
    if getattr(args, "eval_micro_batch_size", args.micro_batch_size) != args.micro_batch_size:
        raise ValueError(
            f"eval_micro_batch_size: must be micro_batch_size={args.micro_batch_size}, got {args.eval_micro_batch_size}"
        )


def _install_loss_log(args: Namespace) -> Any:
    if args.magi_loss_log is None:
        return None
    from megatron_magi.mcore.loss_log import LossLog

    log = LossLog(args.magi_loss_log)
    log.install()
    return log


def _stock_parts(args: Namespace) -> tuple[Any, Callable, Callable]:
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.stock_step import reads_data, stock_forward_step

    return gpt_config_from_args(args), make_dataset_provider(reads_data), stock_forward_step


def _magi_parts(args: Namespace, loss_log: Any) -> tuple[Any, Callable, Callable]:
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_magi.mcore import mtp
    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.forward_step import MagiForwardStep
    from megatron_magi.mcore.model import MagiGPTModelConfig

    mtp.install()
    model_config = gpt_config_from_args(args, model_config_cls=MagiGPTModelConfig)
    forward_step = MagiForwardStep(lambda: _make_dispatcher(args), loss_log)
    # Every rank needs the plan of a batch, so every rank reads it.
    return model_config, make_dataset_provider(lambda vp_stage: True, forward_step.prepare), forward_step


def _make_dispatcher(args: Namespace) -> Any:
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.training import get_tokenizer

    from megatron_magi.mcore.batch import BatchDispatcher
    from megatron_magi.mcore.groups import make_agreement_group
    from megatron_magi.mcore.settings import magi_config, primary_window

    environment = envs.load()
    config = magi_config(args, environment.default_config())
    cp_group = get_context_parallel_group()
    return BatchDispatcher(
        config,
        primary=primary_window(args, args.num_layers),
        eod=get_tokenizer().eod if args.reset_attention_mask else None,
        cp_group=cp_group,
        agreement_group=make_agreement_group(cp_group) if config.comm.verify else None,
        seq_length=args.seq_length,
        num_plans=environment.plan_cache_size,
    )
