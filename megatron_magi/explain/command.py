"""The command line of ``python -m megatron_magi explain``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_magi import envs
from megatron_magi.calibration import with_present_rates
from megatron_magi.checks import int_array, int_at_least
from megatron_magi.config import CostModel
from megatron_magi.explain.report import DispatchFigures, dispatch_figures, explain_text
from megatron_magi.mask import AttnMask
from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.mask.source import MaskSource


def run(args: argparse.Namespace) -> str:
    """Does what the options say.

    Returns:
        The report.

    Raises:
        ValueError: an option is wrong.
    """
    mask = mask_of(args)
    if args.num_heads_kv > 0 and args.num_heads_q % args.num_heads_kv:
        raise ValueError(
            f"num_heads_q: expected a multiple of num_heads_kv, {args.num_heads_kv}, got {args.num_heads_q}"
        )
    cost = CostModel(num_heads_q=args.num_heads_q, num_heads_kv=args.num_heads_kv, head_dim=args.head_dim)
    config = with_present_rates(envs.load().default_config())
    config = replace(config, overlap=replace(config.overlap, cost=cost))
    figures = dispatch_figures(mask, args.cp_size, config)
    chosen = config.dispatch.algorithm
    text = explain_text(mask, figures, chosen)
    if args.out is not None:
        text += "\n\n" + _draw(args.out, next(f for f in figures if f.algorithm == chosen), args.mask)
    return text


def mask_of(args: argparse.Namespace) -> AttnMask:
    """The mask that the options name.

    Raises:
        ValueError: an option is wrong, or documents do not fill the sequence.
    """
    int_at_least(args.seqlen, "seqlen", 1)
    if args.sample and args.data_path is None:
        raise ValueError("sample: needs --data-path")
    lengths = _lengths(args)
    if lengths.sum() != args.seqlen or (lengths < 1).any():
        raise ValueError(f"documents: expected lengths above 0 that add up to {args.seqlen}, got {lengths.tolist()}")
    tokens = np.zeros((1, args.seqlen), dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    return MaskSource.parse(args.mask)(Microbatch(tokens, cu_seqlens, {"tokens": tokens}))


def _lengths(args: argparse.Namespace) -> np.ndarray:
    if args.documents:
        return int_array(args.documents, "documents")
    if args.random_documents is not None:
        if not 1 <= args.random_documents <= args.seqlen:
            raise ValueError(f"random_documents: expected 1 to {args.seqlen}, got {args.random_documents}")
        weights = np.exp(np.random.default_rng(0).uniform(0, np.log(64), args.random_documents))
        spare = args.seqlen - args.random_documents
        ends = np.round(np.cumsum(weights) / weights.sum() * spare).astype(np.int64)
        return np.diff(ends, prepend=0) + 1
    if args.data_path is not None:
        from megatron_magi.mcore.dataset_lengths import document_lengths

        return _lengths_of_sample(document_lengths(args.data_path), args.seqlen, args.sample)
    return np.array([args.seqlen], dtype=np.int64)


def _lengths_of_sample(lengths: np.ndarray, seqlen: int, sample: int) -> np.ndarray:
    """The pieces of documents in tokens ``[sample * seqlen, (sample + 1) * seqlen)`` of a dataset."""
    ends = np.cumsum(lengths)
    first, last = sample * seqlen, (sample + 1) * seqlen
    if sample < 0 or not len(ends) or last > ends[-1]:
        have = int(ends[-1]) // seqlen if len(ends) else 0
        raise ValueError(f"sample: the data set has {have} sequences of {seqlen} tokens, got {sample}")
    inside = ends[(ends > first) & (ends < last)]
    return np.diff(np.concatenate([[first], inside, [last]]))


def _draw(folder: Path, figures: DispatchFigures, title: str) -> str:
    try:
        from megatron_magi.explain.figures import plot_mask, plot_timeline
    except ImportError as error:
        raise ValueError(
            f"out: pictures need matplotlib; pip install '.[demo]' in a checkout, or leave out --out: {error}"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plot_mask(folder / "mask.png", figures.plan, title)
        plot_timeline(folder / "timeline.png", figures.plan)
    except OSError as error:
        raise ValueError(f"out: {error}") from None
    return (
        f"{folder / 'mask.png'}: the mask, each visible pair in the colour of the rank that computes it\n"
        f"{folder / 'timeline.png'}: one layer on each rank by the rates of `plan.degree`, without launch overheads "
        "and partly filled tiles, so shorter than predicted"
    )
