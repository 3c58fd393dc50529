"""`main`: Megatron's own trainer on a GPT or a hybrid model, with one more value of `--attention-backend`."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_magi import envs
from megatron_magi.mcore.config_file import expand_config
from megatron_magi.mcore.installation import install
from megatron_magi.mcore.validate import check_model, refuse_yaml

_ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's GPT script takes where the command line says nothing."""
_FSDP = frozenset({"--use-torch-fsdp2", "--use-megatron-fsdp"})
"""With these Megatron refuses ``CUDA_DEVICE_MAX_CONNECTIONS=1``, on which it insists with context parallelism."""


def main(
    argv: Sequence[str] | None = None,
    *,
    model: str = "gpt",
    pre_wrap_hooks: Sequence[Callable] = (),
    dataset_provider: Callable[[Sequence[int]], Sequence[Any]] | None = None,
) -> None:
    """Trains a GPT, or a hybrid model, as the command line says.

    ``CUDA_DEVICE_MAX_CONNECTIONS`` is set to 1 where it is not set, but for FSDP, which needs another value.

    Args:
        argv: Megatron's arguments, without the program's name; those of the process when None.
        model: ``gpt``, or ``hybrid`` for the layers of ``--hybrid-layer-pattern``.
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
    if model not in ("gpt", "hybrid"):
        raise ValueError(f"model: expected gpt or hybrid, got {model!r}")
    if argv is not None:
        # Megatron's trainer parses sys.argv again.
        sys.argv = [sys.argv[0], *argv]
    args = _parse(model)

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_magi.mcore import seams

    model_config, transformer, model_provider = _model_parts(args, model, [*pre_wrap_hooks, *_device_hooks(args)])
    make_parts = _magi_parts if args.magi_attention else _stock_parts
    provider, forward_step = make_parts(args, dataset_provider)
    config = pretrain_cfg_container_from_args(args, model_cfg=model_config)
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(training.pretrain)
    options = seams.named(
        "training.training:pretrain",
        train_valid_test_dataset_provider=provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        store=store,
        get_embedding_ranks=functools.partial(_embedding_ranks, args, transformer),
    )
    pretrain(config, **options)


def _model_parts(args: Namespace, model: str, hooks: list[Callable]) -> tuple[Any, Any, Callable | None]:
    """Megatron's configuration of the model, that of its transformer, and where it has no builder one of ours."""
    from megatron.training import argument_utils, arguments

    from megatron_magi.mcore import seams

    trainer_builds = seams.needed("training.models.gpt:GPTModel")
    if model == "hybrid" or trainer_builds:
        config = getattr(argument_utils, f"{model}_config_from_args")(args)
        if trainer_builds:
            config.pre_wrap_hooks += hooks
            return config, config.transformer, None
    from megatron_magi.mcore.model_provider import GPTProvider, HybridProvider

    if model == "hybrid":
        return config, config.transformer, HybridProvider(config, hooks)
    transformer = arguments.core_transformer_config_from_args(args)
    return None, transformer, GPTProvider(args, transformer, hooks)


def _parse(model: str = "gpt") -> Namespace:
    """Parses and validates as Megatron's script does; also for callers that only check a command line."""
    take_back = envs.set_for_megatron()
    install(expand_config)
    if not _FSDP.isdisjoint(sys.argv):
        take_back()
    from megatron.training import arguments

    refuse_yaml()
    args = arguments.parse_and_validate_args(args_defaults=_ARGS_DEFAULTS)
    check_model(args, model)
    return args


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


def _stock_parts(args: Namespace, own_data: Callable | None) -> tuple[Callable, Callable]:
    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.sample_packing import MEGATRONS
    from megatron_magi.mcore.stock_step import StockForwardStep, reads_data
    from megatron_magi.mcore.user_step import make_loss_log
    from megatron_magi.mcore.validate import check_data_sets

    check_data_sets(args)
    if getattr(args, MEGATRONS, None) is not None:
        raise ValueError(f"{MEGATRONS}: needs --attention-backend magi in this script, whose step packs nothing")
    make_loss_log(args.magi_loss_log)
    return make_dataset_provider(reads_data, own=own_data), StockForwardStep(args)


def _magi_parts(args: Namespace, own_data: Callable | None) -> tuple[Callable, Callable]:
    from megatron_magi.mcore.data import make_dataset_provider
    from megatron_magi.mcore.forward_step import MagiForwardStep, make_dispatcher
    from megatron_magi.mcore.sample_packing import is_asked_for, make_packing
    from megatron_magi.mcore.user_step import make_loss_log

    packing = (lambda: make_packing(args)) if is_asked_for(args) else None
    forward_step = MagiForwardStep(lambda: make_dispatcher(args), make_loss_log(args.magi_loss_log), packing)
    # Every rank needs the plan of a batch, so every rank reads it.
    return make_dataset_provider(lambda vp_stage: True, forward_step.prepare, own_data), forward_step
