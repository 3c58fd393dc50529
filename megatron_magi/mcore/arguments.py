"""Parsing and checking Megatron's command line with the options of this package."""

from __future__ import annotations

import functools
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_magi.mcore import seams
from megatron_magi.mcore.argv import OPTION, add_arguments
from megatron_magi.mcore.sample_packing import is_asked_for, take

_ADD, _VALIDATE = "training.arguments:add_megatron_arguments", "training.arguments:validate_args"


def install() -> None:
    """Adds this package's options and checks to Megatron's, wherever it parses. Idempotent."""
    stock_add, stock_validate = seams.original(_ADD), seams.original(_VALIDATE)

    @functools.wraps(stock_add)
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = _mended(add_arguments(stock_add(parser)))
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: value for name, value in seams.OPTIONS.items() if name not in known})
        return parser

    @functools.wraps(stock_validate)
    def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Any:
        # Arguments from a YAML file do not have it.
        validate = _validate_for_magi if getattr(args, "magi_attention", False) else _validate_stock
        return validate(stock_validate, args, {} if defaults is None else defaults)

    seams.put(_ADD, add_megatron_arguments)
    seams.put(_VALIDATE, validate_args)


def _mended(parser: ArgumentParser) -> ArgumentParser:
    """``parser`` with help texts that can be printed and a backend that is refused by name: Megatron's have bare per
    cent signs, which end ``--help`` with an error, and another backend than those it knows is a KeyError.
    """
    for action in parser._actions:
        if action.help is not None:
            action.help = re.sub(r"%%|%\(\w+\)|%", lambda found: found[0] if len(found[0]) > 1 else "%%", action.help)
        if OPTION in action.option_strings:
            action.type = functools.partial(_backend, action.type, list(type(action.default).__members__))
            action.help = f"{action.help} magi: balanced context parallelism for any mask."
    return parser


def _backend(stock: Callable[[str], Any], names: list[str], text: str) -> Any:
    try:
        return stock(text)
    except KeyError:
        raise ArgumentTypeError(f"expected magi or one of {', '.join(names)}, got {text!r}") from None


def _validate_stock(stock: Callable, args: Namespace, defaults: Mapping[str, Any]) -> Any:
    """Validates in place for another attention backend."""
    from megatron_magi.mcore.validate import check_unused

    check_unused(args)
    return stock(args, defaults)


def _validate_for_magi(stock: Callable, args: Namespace, defaults: Mapping[str, Any]) -> Any:
    """Validates in place: with our checks, Megatron's own (``stock``) and those of the result."""
    from megatron.training import arguments

    from megatron_magi.mcore.hybrid_pattern import check_linear_layers
    from megatron_magi.mcore.settings import buffer_length, layer_masks
    from megatron_magi.mcore.validate import (
        check_evaluation,
        check_full_validation,
        check_layout,
        check_packing,
        check_padding,
        chunk_notices,
        settle_arguments,
        validate_arguments,
    )

    take(args)
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
    result = stock(args, defaults)
    for name, value in wanted.items():
        setattr(args, name, value)
    check_layout(args)
    if is_asked_for(args):
        check_packing(args)
        args.variable_seq_lengths = True  # pipeline stages tell each other lengths
        if not args.num_experts:
            args.moe_token_dispatcher_type = "alltoall"  # Megatron asks for it, of models without experts too
    padded = buffer_length(args)
    check_linear_layers(args, is_padded=padded != args.seq_length)
    check_padding(args, padded)
    for notice in chunk_notices(args, padded):
        arguments.warn_rank_0(notice)
    layer_masks(args)
    if args.full_validation:
        check_full_validation(args, padded, buffer_length(args, num_sequences=1))
    check_evaluation(args)
    return result
