// How kernels whose tiles are rows come by their blocks of keys. A scout takes work items and reads the tables of the
// plan, a pass ahead of the producer; the producer loads block after block and announces each beside its keys. So the
// consumers read no tables.
#pragma once

#include "tiles.cuh"

// A tile is 128 rows, a warpgroup 64 of them; or 64 rows, a warpgroup one of two heads that share their keys.
constexpr int kTileRows = 128;
template <typename Params>
DEVICE bool in_pairs(const Params& p) {
  return p.tile_rows == kTileRows / 2;
}

// What a block is, beside the warpgroups that apply the mask to it (bits 0 and 1).
enum : int {
  kMasked = 3,    // both
  kLast = 4,      // the last of its item
  kEnd = 8,       // no item follows; nothing is loaded
  kNothing = 16,  // its item has no blocks; nothing is loaded
};

// A block as the producer announces it.
struct BlockInfo {
  int column, flags;  // first key
  int first_row;      // of the tile
  int head_rows;      // see item_head() and item_rows()
};

template <int kStages>
struct BlockBoard {
  u64 full[kStages], empty[kStages];  // keys are there, with what is below; are free
  int4 info[kStages];                 // BlockInfo
  int2 bounds[kStages][kTileRows];    // of a masked block: first and past-the-last key that a row sees
};

// Passes as the scout describes them.
struct PassBoard {
  u64 full[2], empty[2];
  int4 pass[2][3];
};

// ---- scout: one thread. Params: plan, counter, num_tiles, tile_rows; and num_heads, head_section and group, which
// count pairs of heads where a tile is of pairs ----

template <typename Params>
DEVICE void scout(const Params& p, PassBoard& board) {
  Ring<2> slot;
  int4 item = make_int4(0, 0, 0, 0);
  int pass = 0, index = 0;
  for (bool started = false;; started = true) {
    barrier_wait(smem_address(&board.empty[slot.index]), slot.parity ^ 1);
    const bool first = pass >= item.w;
    if (first) {
      index = started ? gridDim.x + atomicAdd(p.counter, 1) : blockIdx.x;
      item = section_item(p.plan, p.num_tiles, p.num_heads, p.head_section, index);
      pass = item.z;
    }
    int4 range = make_int4(0, 0, 0, 0), more = range;  // an item that sees nothing: no blocks
    if (pass < item.w) range = __ldg(p.plan.passes + 2 * pass), more = __ldg(p.plan.passes + 2 * pass + 1);
    board.pass[slot.index][0] = range;
    board.pass[slot.index][1] = make_int4(more.x, more.y, pass, item_head(item) / p.group);
    ++pass;
    const int heads_before = in_pairs(p) ? item_head(item) : 0;  // of as many pairs another head each
    board.pass[slot.index][2] = make_int4(item.x, item.y + heads_before, first ? index : -1, pass >= item.w);
    barrier_arrive(smem_address(&board.full[slot.index]));
    slot.advance();
    if (item.x < 0) break;
  }
  leave(p.counter);
}

// ---- producer: one thread. Params: also long_blocks, of a pass whose keys and values exceed the L2 cache ----

// Calls loader.block(key, head_kv, flags, pass, item, first) for each block, `item` in its first two words the
// first row, and the first head and number of rows as in BlockInfo, and loader.nothing(item) for each item without
// blocks.
template <typename Params, typename Loader>
DEVICE void walk_blocks(const Params& p, PassBoard& board, Loader& loader) {
  Ring<2> slot;
#pragma unroll 1
  while (true) {
    barrier_wait(smem_address(&board.full[slot.index]), slot.parity);
    const int4* pass = board.pass[slot.index];
    const int4 item = pass[2];
    if (item.x < 0) break;
    const int count = pass[0].y, head_kv = pass[1].w;
    int key = pass[0].x;
    const bool first = item.z >= 0;
    if (first && item.w && count >= p.long_blocks) keep_together(p.counter, item.z, p.num_tiles * p.num_heads, count);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int4 range = pass[0], more = pass[1];
      const int masked = (n < range.z || n >= range.w ? 1 : 0) | (n < more.x || n >= more.y ? 2 : 0);
      loader.block(key, head_kv, masked | (item.w && n + 1 == count ? kLast : 0), more.z, item, first && n == 0);
      key += static_cast<int>(p.plan.step);
    }
    if (count == 0) loader.nothing(item);
    barrier_arrive(smem_address(&board.empty[slot.index]));
    slot.advance();
  }
}

// Waits for the place of the next keys and describes their block. The barrier it returns has yet to be told of bytes.
template <int N>
DEVICE u32 announce(BlockBoard<N>& board, const Ring<N>& ring, int column, int flags, const int4& item) {
  barrier_wait(smem_address(&board.empty[ring.index]), ring.parity ^ 1);
  board.info[ring.index] = make_int4(column, flags, item.x, item.y);
  return smem_address(&board.full[ring.index]);
}

// The same, and loads the bounds of the block's rows where they are needed; its keys are `bytes` more. Params: plan,
// tile_rows.
template <int N, typename Params>
DEVICE u32 announce_keys(BlockBoard<N>& board, const Ring<N>& ring, const Params& p, int column, int flags, int pass,
                         const int4& item, u32 bytes) {
  const u32 bounds = p.tile_rows * sizeof(int2);
  const u32 bar = announce(board, ring, column, flags, item);
  const bool masked = flags & kMasked;
  barrier_expect_bytes(bar, bytes + (masked ? bounds : 0));
  if (masked)
    load_bytes(smem_address(board.bounds[ring.index]), p.plan.bounds + static_cast<i64>(pass) * p.tile_rows, bounds,
               bar);
  return bar;
}
