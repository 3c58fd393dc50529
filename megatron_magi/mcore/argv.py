"""The command line: Megatron's own, in which `--attention-backend` may also be `magi`.

Megatron makes that option from an enumeration and parses the command line several times, so a
new value cannot be added to it. It is rewritten to ``auto`` and a flag of its own instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

OPTION = "--attention-backend"
_VALUE = "magi"
FLAG = "--magi-attention"
PACKING, PACKING_FIELD = "--sequence-packing-scheduler", "magi_packing"
"""The option, which later versions of Megatron have too, and where its value is kept for this package's schedules."""


def rewrite_argv(argv: Sequence[str]) -> list[str]:
    """The command line with ``--attention-backend magi`` in a form that Megatron can parse.

    Args:
        argv: arguments without the program's name.

    Raises:
        ValueError: ``--attention-backend`` is given twice with different values, one of them magi; an ``auto`` before
            it does not count.
    """
    out: list[str] = []
    values: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == FLAG:
            # Only this function may set it, so that rewriting twice changes nothing.
            values.append(_VALUE)
            continue
        if name == OPTION:
            value = value if equals else next(arguments, "")
            values.append(value)
            out += [OPTION, "auto" if value == _VALUE else value]
            continue
        out.append(argument)
    if _VALUE in values:
        # Rewritten, it is an auto before the flag; the last value counts, so an auto behind it is another backend.
        others = sorted(set(values) - {_VALUE, "auto"} | set(values[values.index(_VALUE) + 1 :]) - {_VALUE})
        if others:
            raise ValueError(f"attention_backend: given as {_VALUE} and as {', '.join(others)}")
        if OPTION not in out:
            out += [OPTION, "auto"]
        out.append(FLAG)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds this package's options to Megatron's parser, unless it has them."""
    if any(FLAG in action.option_strings for action in parser._actions):
        return parser
    group = parser.add_argument_group(
        title="magi attention",
        description="--attention-backend magi selects this package's attention. pretrain_scripts/pretrain_gpt.py also "
        "takes --config FILE, a YAML file of arguments.",
    )
    group.add_argument(
        FLAG,
        action="store_true",
        help="Set by --attention-backend magi: balanced context parallelism for any mask.",
    )
    group.add_argument(
        "--magi-loss-log",
        metavar="PATH",
        default=None,
        help="Append one JSON line an iteration: the exact losses, the gradient norm and, with "
        "--attention-backend magi, balance and rows fetched.",
    )
    group.add_argument(
        "--magi-chunk-size",
        metavar="TOKENS",
        type=int,
        default=None,
        help="Tokens of a chunk: tokens are distributed over context-parallel ranks in chunks. Chosen if not given.",
    )
    group.add_argument(
        "--magi-layout",
        choices=("auto", "planned", "zigzag", "contiguous"),
        default="auto",
        help="Which rank holds which tokens. planned: what the planner chooses for the masks. zigzag: pieces r and "
        "2 * CP - 1 - r of 2 * CP; contiguous: piece r of CP, of the sequences of a microbatch one after another. auto "
        "is planned.",
    )
    group.add_argument(
        "--magi-overlap-degree",
        metavar="STAGES",
        type=int,
        default=None,
        help="Number of stages in which remote keys are fetched; 0 fetches all before computing. Chosen if not given.",
    )
    _add_masks(group)
    if not any(PACKING in action.option_strings for action in parser._actions):
        group.add_argument(
            PACKING,
            dest=PACKING_FIELD,
            choices=["dp_balanced"],
            default=None,
            help="Samples have any length up to --seq-length: those of an iteration are packed into microbatches of as "
            "many tokens at most, whose number differs from iteration to iteration.",
        )
    return parser


def _add_masks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--magi-mask",
        metavar="MASK",
        default=None,
        help="Which token sees which: NAME, MODULE:FUNCTION or FILE.py:FUNCTION, followed by :KEY=VALUE,... where "
        "it has arguments, such as block_causal:block_size=64. Names: documents (what holds if not given), causal, "
        "sliding_window, block_causal, prefix_lm, prefix_tree. A function is given a Microbatch and returns an "
        "AttnMask. "
        "Rotary positions are then the position ids of the data set.",
    )
    group.add_argument(
        "--magi-layer-masks",
        metavar="FUNCTION",
        default=None,
        help="MODULE:FUNCTION or FILE.py:FUNCTION that is given the number of a layer, from 1, and returns its mask as "
        "text for --magi-mask, or None for that of --magi-mask.",
    )
