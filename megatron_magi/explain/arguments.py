"""The options of ``python -m megatron_magi explain``, which need nothing to be installed."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--seqlen", type=int, metavar="TOKENS", required=True, help="tokens of the sequence")
    parser.add_argument("--cp-size", type=int, metavar="RANKS", required=True, help="context-parallel ranks")
    parser.add_argument(
        "--mask",
        default="documents",
        help="as --magi-mask takes it; of one that needs fields of a data set, such "
        "as prefix_tree, a function FILE.py:FUNCTION (default: %(default)s)",
    )
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--documents", type=int, nargs="+", metavar="N", help="lengths of the packed documents")
    documents.add_argument(
        "--random-documents",
        type=int,
        metavar="N",
        help="this many documents, lengths log-uniform over a factor of 64, always the same",
    )
    documents.add_argument(
        "--data-path", metavar="PREFIX", help="prefix of a Megatron dataset: its documents in the order of the file"
    )
    parser.add_argument(
        "--sample", type=int, metavar="NUMBER", default=0, help="which sequence of --data-path (default: %(default)s)"
    )
    parser.add_argument(
        "--num-heads-q",
        type=int,
        metavar="HEADS",
        default=32,
        help="of one tensor-parallel rank (default: %(default)s)",
    )
    parser.add_argument("--num-heads-kv", type=int, metavar="HEADS", default=8, help="likewise (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, metavar="DIM", default=128, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for mask.png and timeline.png; no pictures when not given"
    )
