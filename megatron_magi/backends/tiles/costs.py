"""What tiles and passes cost besides the columns that they compute: fitted to the Hopper kernels on an H200.

They decide where tiles are cut and which rows share a pass, never results.
"""

from __future__ import annotations

TILE_COST_COLUMNS = 48
"""Fixed cost of a tile, in columns."""

MASKED_COST = 0.5
"""Cost of a column that only part of a tile of keys sees, relative to one that all its keys see."""

PASS_COST_BLOCKS = 0.35
"""Fixed cost of a pass, in blocks of 128 columns."""
