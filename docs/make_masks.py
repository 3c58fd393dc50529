"""Writes docs/masks.md and its pictures: ``python docs/make_masks.py``. A test holds the page to it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from megatron_magi.mask import AttnMask, MaskType, builders

DOCS = Path(__file__).parent
NUM_HEADS, HEAD_DIM = 32, 128

HEAD = """# Masks

For those who choose a mask or write one.

All mask builders, with a picture, the code and the cost of each. The code needs
`from megatron_magi.mask import AttnMask, MaskType, builders`. (This page is made by `python docs/make_masks.py`.)

| input | builder | with `--magi-mask` ([how](megatron.md#other-masks)) |
| --- | --- | --- |
| one sequence | [`full`](#full), [`causal`](#causal) | `causal` |
| packed documents | [`varlen`](#packed-documents) | `documents` |
| the same, by EOD tokens | [`from_eod_positions`](#packed-documents-by-end-of-document-tokens) | `documents` |
| long documents, local attention | [`sliding_window`](#sliding-window) | `sliding_window` |
| frames of a video, blocks of a diffusion model | [`block_causal`](#block-causal) | `block_causal` |
| a prompt with bidirectional attention, and an answer | [`prefix_lm`](#prefix-lm) | `prefix_lm` |
| shared prompts, [rollouts](rollouts.md) | [`prefix_tree`](#prefix-tree) | `prefix_tree` |
| blocks that attend to blocks, given on the host | [`block_sparse`](#block-sparse) | `FILE.py:FUNCTION` |
| something else | [slices of your own](#slices-of-your-own) | `FILE.py:FUNCTION` |

A mask is a set of slices. A slice is a range of queries, a range of keys and a type:

| type | number | keys (of n) that the query in row i (of m) sees |
| --- | --- | --- |
| full | 0 | all |
| causal | 1 | those up to i + n - m: the last query sees all |
| inverse causal | 2 | those from i on: the first query sees all |
| both | 3 | those from i to i + n - m |

Slices may not overlap: a (query, key) pair in two slices is an error that names both. The output of queries in no slice
is 0. `python -m megatron_magi explain --mask ...` shows what a mask costs on your ranks.

Area is the number of visible (query, key) pairs. FLOPs are of one layer's forward pass with 32 query heads of
dimension 128, `4 * area * heads * head_dim`; the backward takes 2.5 times as many.
"""

ENTRIES = [
    ("full", "Full", "Every query sees every key.", "builders.full(1000)"),
    ("causal", "Causal", "Each query sees the keys up to its own.", "builders.causal(1000)"),
    ("documents", "Packed documents", "Causal (or, with `causal=False`, full) attention inside each document.",
     "builders.varlen(doc_lengths=[300, 40, 660], causal=True)"),
    ("eod", "Packed documents by end-of-document tokens", "The same from the positions of EOD tokens.",
     "builders.from_eod_positions([299, 339], seqlen=1000)"),
    ("window", "Sliding window", "`left` keys before and `right` keys after each query, inside its document; "
     "optionally the first tokens of the document as well.",
     "builders.sliding_window(left=128, right=0, doc_lengths=[300, 700], global_tokens=16)"),
    ("block_causal", "Block causal", "Tokens see their whole block (a frame of a video) and every earlier block.",
     "builders.block_causal(1000, block_size=100)"),
    ("prefix_lm", "Prefix LM", "Full attention inside the prefix of each document, causal after it.",
     "builders.prefix_lm(prefix_lengths=[150, 100], doc_lengths=[300, 700])"),
    ("prefix_tree", "Prefix tree", "Samples that share prompts: each token is computed once. Here one prompt of "
     "400 tokens has two answers.",
     "builders.prefix_tree(node_lengths=[400, 300, 300], sample_paths=[[0, 1], [0, 2]])[0]"),
    ("block_sparse", "Block sparse", "Blocks of queries see blocks of keys, the same for all heads. A mask that is "
     "only on a GPU cannot be planned; on one device [sparse attention](sparse.md) reads it there.",
     "builders.block_sparse([[True, False], [False, True], [True, True]], q_block_size=400, k_block_size=500, "
     "seqlen_q=1000)"),
    ("slices", "Slices of your own", "Anything that rectangles, triangles and bands can express.",
     "AttnMask([(0, 500, 0, 500, MaskType.CAUSAL), (500, 1000, 0, 1000, MaskType.FULL)], total_seqlen_q=1000)"),
]  # fmt: skip


TAIL = """## A mask that is not here

Dispatch, communication and kernels take any set of slices, so a new mask needs no change of the package. With Megatron
`--magi-mask FILE.py:FUNCTION` names a function that returns it for each microbatch ([how](megatron.md#other-masks)); in
a loop of your own `magi_attn_flex_key(*mask.to_ranges(), cp_group_or_mesh=group)` makes its [key](own_loop.md). To give
it a name in the package, see [the recipe](recipes/mask.md).
"""


def mask_of(code: str) -> AttnMask:
    """The mask that a line of the gallery makes."""
    return eval(code, {"builders": builders, "AttnMask": AttnMask, "MaskType": MaskType})


def page() -> str:
    """The text of docs/masks.md."""
    parts = [HEAD]
    for name, title, text, code in ENTRIES:
        mask = mask_of(code)
        share = mask.area / (mask.total_seqlen_q * mask.total_seqlen_k)
        flops = 4 * mask.area * NUM_HEADS * HEAD_DIM
        count = f"{len(mask.slices)} slice{'s' * (len(mask.slices) > 1)}"
        text = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
        parts.append(
            f"## {title}\n\n![{title}](images/masks/{name}.png)\n\n{text}\n\n```python\n{code}\n```\n\n"
            f"{count}, area {mask.area:,} ({share:.1%} of all pairs), {flops / 1e9:.2f} GFLOP.\n"
        )
    return "\n".join([*parts, TAIL])


def main() -> None:
    """Writes the page and the pictures."""
    from megatron_magi.explain.figures import plot_shape

    (DOCS / "images/masks").mkdir(parents=True, exist_ok=True)
    (DOCS / "masks.md").write_text(page())
    for name, _, _, code in ENTRIES:
        plot_shape(DOCS / f"images/masks/{name}.png", mask_of(code))


if __name__ == "__main__":
    main()
