"""Fitted constants: thresholds and costs from measurements, which affect speed only, never results.

All were found on an H200 (132 SMs, 50 MB of L2 cache, 690 W), bf16, head dims 64 and 128; the measurements are in
docs/kernel_log.md. On another GPU they are a guess. Those that predictions need too are in `cost.py`.
"""

from __future__ import annotations

# ---- keys that arrive ----

ARRIVAL_US, ARRIVAL_BYTES_PER_US = 20, 250_000
"""Arrival of keys of other ranks: latency in microseconds, and bytes a microsecond."""

SM_FLOP_PER_US = 4.5e6
"""Rate of an SM in the forward."""

# ---- caches ----

L2_BYTES = 24 << 20
"""Bytes that stay in the L2 cache if SMs read them at different times."""

# ---- backward: one kernel or two ----

SCATTERED_INTERVALS, SEPARATE_DQ_SCATTERED = 1.5, (128 << 20, 2000)
"""As `KernelCosts.separate_dq_packed`, if at least this many intervals of queries see a key; measured on an H100."""

SMALL_SUMS_BYTES = 16 << 20
"""Memory for sums of dk and dv that is allocated for speed even if dq has no room for them."""

# ---- backward: order of work ----

LONG_BLOCKS, LONG_BLOCKS_UNEVEN, LONG_BLOCKS_MOVING = 16, 8, 32
"""Blocks from which on a tile is split by query head: if adjacent tiles see the same queries; if they differ in their
number of blocks, and so do not iterate in step; if each sees queries that the previous one does not, as in a window."""

SMALL_DRIFT_COLUMNS = 32
"""Most columns between the starts of adjacent tiles at which they still hit each other's data in the cache."""

ITEM_COST_BLOCKS, PART_COST_BLOCKS = 2, 3
"""Fixed cost of an item, in blocks: loading keys, and writing gradients, or adding them to sums."""

WHOLE_COST_BLOCKS, SPLIT_COST_BLOCKS = 6, 14
"""The same for the kernel for dk and dv of wide heads, without and with splits, which add in fp32."""

PIECE_BLOCKS, MOST_BLOCKS_IN_STEP, MOST_PIECES = 256, 512, 1 << 20
"""Blocks of a piece of a tile; of tiles of one size, only those of more blocks are cut; and about how many pieces there
are at most."""

SECTION_TILES = 56
"""Most tiles of a section of a causal document, whose query heads are all processed before the next section: what they
read and add to stays in the L2 cache."""

LAST_ITEMS, LAST_OF_MANY_ITEMS = 2, 4
"""Last items for each SM that are ordered by decreasing cost; of many unsplit ones, the shortest."""

LEAST_PIECE_BLOCKS = 8
"""Blocks of a piece of an item."""

ENOUGH_ITEMS = 8
"""Items for each SM from which on none is split for balance."""

BALANCED = 1.05
"""Ratio of the longest to the mean time of an SM below which no other order is tried."""

FALLING_COST_GAIN, FALLING_COST_MOST_ITEMS = 0.96, 16
"""Unsplit tiles are ordered by decreasing cost alone if that reduces the time to this fraction; never with more items
for each SM."""

# ---- sparse attention ----

MOST_SPARSE_DQ_BYTES, MOST_SPARSE_DQ_BYTES_OF_HEAD = 112 << 20, 48 << 20
"""Up to this many bytes of fp32 dq, in total and of a key head, one kernel for all gradients of blocks of 128 keys is
faster than two: 1.10 times as fast at 34 MB of one key head, 0.94 at 67, 0.67 at 268; 1.15 times at 101 MB of 24 key
heads. Masks with 268 MB of eight: 0.69 to 0.83, before dq alone became faster."""

SPARSE_PART_BYTES = 24 << 20
"""Bytes of q and dout of a key head from which on lists of queries are cut into parts of this size: dk and dv
of blocks of 64 keys at 134 and 268 MB 1.10 to 1.12 and 1.12 to 1.14 times as fast, of 128 keys 1.00 to 1.03 and 1.03 to
1.06."""

LEAST_STORED_SUM_BYTES, MOST_STORED_ADDITIONS = 48 << 20, 1.5
"""Backward over single and latent keys: if the fp32 sums of dk and dv of a key head have more bytes, so that they
exceed the L2 cache, and the lists of a wave of tiles name a key less often on average, it is faster to store what each
query gives to a key and to add it key by key than to add it in memory at once: 1.14 and 1.18 times as fast at 1.0 and
0.1 names, 67 and 537 MB; 1.02 at 2.1 names and 134 MB, where another run had 0.92; 0.7 to 0.8 with more names. Latent
keys: 1.16 to 1.32 times at 0.5 and 1.0 names, 0.66 to 0.75 at 2.1."""

GIVEN_BYTES, GIVEN_LATENT_BYTES, GIVEN_OVER_SUMS = 1 << 30, 2 << 30, 2
"""Bytes of what queries give to keys, or to latent keys, that are stored at a time; or so many times the bytes of the
sums if that is more, as these are read and written each time. Latent keys, 64 heads, 1 GiB, 2 GiB, all at once (2.4,
2.4, 4.8 GB), times as fast as adding: 512 of 128k keys 1.22, 1.32, 1.45; 512 of 64k 1.16, 1.21, 1.28; 1,024 of 128k
1.02, 1.16, 1.29."""
