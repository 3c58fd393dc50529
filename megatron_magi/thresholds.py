"""Sizes by which the Hopper kernels, and predictions of their time, choose tiles and kernels.

Fitted on an H200 like the numbers of `megatron_magi.backends.sm90.tuning`.
"""

MOST_PACKED_HEADS = 8
"""Query heads that share a tile at most."""

SHORT_ROWS = 4096
"""Heads are packed where documents have fewer rows than this on average."""

TALL_TILE_KEYS = {(64, 64): (100, 100), (128, 128): (0, 4000)}
"""Least keys that a query sees on average for forward tiles of 192 rows, by head dims: with packed heads, without."""

SEPARATE_DQ_PACKED = (256 << 20, 800), (128 << 20, 480), (64 << 20, 200)
"""Where kernels pack heads: from so many bytes of fp32 dq on, a separate kernel for dq is faster if a query sees fewer
keys than this."""

SEPARATE_DQ = (256 << 20, 650), (128 << 20, 450)
"""Likewise where kernels do not pack heads, with head dim 128."""
