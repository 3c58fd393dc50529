// Producers of the kernels whose tiles are query rows (forward, dQ). A prefetch thread takes work items from the
// persistent scheduler, reads the tables of the plan one segment ahead of the producer, and loads the rows of an item
// as soon as their buffers are free. The producer thread loads the key blocks and describes each in shared memory next
// to its keys, so that consumers read no tables.
//
// Template parameters: kGroups, the number of consumer warpgroups, at most three; kInStep, whether thread blocks are
// kept in step, see InStep.
#pragma once

#include "../../common/arrivals.cuh"
#include "tiles.cuh"

// A tile has 64 rows of accumulators for each warpgroup: 64 query rows of one head, or 64 / heads query rows of each
// of 2, 4 or 8 heads that share their keys (packed). Accumulator row i is query row i / heads of head i % heads, the
// order in which TMA loads a box of rows and heads. Params: log2_packed, log2 of the number of packed heads.
template <int kGroups, typename Params>
DEVICE int tile_rows(const Params& p) {
  return kGroups * kWarpgroupRows >> p.log2_packed;
}

// The two accumulator rows of a thread, which are of the same head.
struct ThreadRows {
  int index;      // accumulator row of the tile, of the first; that of the second is index + 8
  int row, step;  // row in the tile of the first; from it to the second
  int head;       // relative to the first head of the tile
  template <typename Params>
  DEVICE ThreadRows(const Params& p, int warpgroup)
      : index(warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 +
              threadIdx.x % kWarpThreads / 4),
        row(index >> p.log2_packed),
        step(8 >> p.log2_packed),
        head(index & ((1 << p.log2_packed) - 1)) {}
  // Whether all 16 rows of this thread's warp are in the first `rows` rows of the tile.
  template <typename Params>
  DEVICE bool warp_within(const Params& p, int rows) const {
    return (index | 15) >> p.log2_packed < rows;
  }
};

// Flags of a block. Bits 0 to 2: the warpgroup applies the mask.
enum : int {
  kMasked = 7,    // any warpgroup applies the mask
  kLast = 8,      // last block of its item
  kEnd = 16,      // no more items; no keys are loaded
  kNothing = 32,  // its item has no blocks; no keys are loaded
};

// Description of a block, from the producer to the consumers.
struct BlockInfo {
  int column, flags;  // first key; flags as above
  int first_row;      // of the tile
  int head_rows;      // head | number of rows << 16
};

template <int kGroups, int kStages>
struct KvPipeline {
  u64 full[kStages], empty[kStages];               // of the key buffers, and of the entries below
  int4 info[kStages];                              // BlockInfo
  int2 bounds[kStages][kGroups * kWarpgroupRows];  // of a masked block: first and past-the-last visible key of each row
};

// Descriptions of segments, from the prefetch thread to the producer: two entries of the plan; first row,
// first head | rows << 16, index of the item (-1: not its first segment), whether it is the item's last segment;
// segment, key head.
struct TileInfoPipeline {
  u64 full[2], empty[2];
  int4 segment[2][4];
};

// ---- prefetch, one thread. Params: plan, counter, num_tiles, log2_packed; and num_heads, head_section and group,
// which count heads packed together as one ----

// Also calls load_rows(row, head, any) for each item with its first row and head, `any`: whether it has blocks, and at
// the end once more without.
template <bool kInStep, typename Params, typename Rows>
DEVICE void prefetch_items(const Params& p, TileInfoPipeline& pipeline, Rows& load_rows) {
  PipelineState<2> slot;
  int4 item = make_int4(0, 0, 0, 0);
  int segment = 0, index = 0;
  for (bool started = false;; started = true) {
    barrier_wait(smem_address(&pipeline.empty[slot.index]), slot.parity ^ 1);
    const bool first = segment >= item.w;
    if (first) {
      index = STREAM_KV ? atomicAdd(p.counter, 1) : started ? gridDim.x + atomicAdd(p.counter, 1) : blockIdx.x;
      item = section_item(p.plan, OF_MASK(p, num_tiles), p.num_heads, p.head_section, index);
      segment = item.z;
    }
    int4 range = make_int4(0, 0, 0, 0), more = range;  // an item that sees nothing: no blocks
    const bool any = segment < item.w;
    if (any) range = __ldg(p.plan.segments + 2 * segment), more = __ldg(p.plan.segments + 2 * segment + 1);
    pipeline.segment[slot.index][0] = range;
    pipeline.segment[slot.index][1] = more;
    pipeline.segment[slot.index][3] = make_int4(segment, item_head(item) / p.group, 0, 0);
    ++segment;
    const int more_heads = (item_head(item) << p.log2_packed) - item_head(item);
    const int last = segment >= item.w;
    pipeline.segment[slot.index][2] = make_int4(item.x, item.y + more_heads, first ? index : -1, last);
    barrier_arrive(smem_address(&pipeline.full[slot.index]));
    slot.advance();
    if (first) load_rows(item.x, item_head(item) << p.log2_packed, any);
    if (item.x < 0) break;
  }
  let_next_kernel_start();
  if (!kInStep) leave(p.counter);
}

// ---- producer: one thread. Params: also long_blocks, of which the keys and values exceed the L2 cache ----

// For kernels that start while their keys arrive: keeps thread blocks in step through long items of several segments.
// Some thread blocks start 1 to 2 ms after the others, because their SMs were still publishing rows. Thread blocks out
// of step read keys at different places, together more than the L2 cache holds. So each waits, at the start of an item,
// until all have started as many; but only after two items of one length, as items of different lengths are never in
// step, and for at most some 4 % of an item, so that a late thread block catches up over several items.
struct InStep {
  u32* started;                           // items, by all thread blocks
  u32 items = 0;                          // by this one
  int num_blocks = 0, blocks_before = 0;  // of keys, of its last item and of the one before

  DEVICE void start_item(int long_blocks, bool one_segment) {
    count(1);
    ++items;
    if (!one_segment && num_blocks >= long_blocks && num_blocks == blocks_before) {
      const i64 until = clock64() + 128 * static_cast<i64>(num_blocks);
      while (load_volatile(started) < items * gridDim.x && clock64() < until) sleep_ns(200);
    }
    blocks_before = num_blocks;
    num_blocks = 0;
  }

  // No thread block waits for this one from here on. The last of them sets the counters to zero.
  DEVICE void end(int* counter) const {
    count(1 << 24);
    __threadfence();
    if (leave(counter)) *started = 0;
  }

 private:
  DEVICE void count(u32 n) const { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(started), "r"(n)); }
};
// Calls loader.block(key, head_kv, flags, segment, item) for each block, `item` in its first two words the
// first row, and the first head and number of rows as in BlockInfo, and loader.nothing(item) for each item without
// blocks.
template <int kGroups, bool kInStep, typename Params, typename Loader>
DEVICE void walk_blocks(const Params& p, TileInfoPipeline& pipeline, Loader& loader) {
  PipelineState<2> slot;
  InStep in_step{kInStep ? reinterpret_cast<u32*>(p.counter + 2) : nullptr};
#pragma unroll 1
  while (true) {
    barrier_wait(smem_address(&pipeline.full[slot.index]), slot.parity);
    const int4* info = pipeline.segment[slot.index];
    const int4 item = info[2];
    if (item.x < 0) break;
    const int count = info[0].y, number = info[3].x, head_kv = info[3].y;
    int key = info[0].x;
    const bool first = item.z >= 0;
    if (first && item.w && count >= p.long_blocks)
      keep_together(p.counter, item.z, OF_MASK(p, num_tiles) * p.num_heads, count);
    if (kInStep && first) in_step.start_item(p.long_blocks, item.w);
    if (kInStep) in_step.num_blocks += count;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int4 range = info[0], more = info[1];
      int masked = (n < range.z || n >= range.w ? 1 : 0) | (n < more.x || n >= more.y ? 2 : 0);
      if (kGroups == 3 && (n < more.z || n >= more.w)) masked |= 4;
      loader.block(key, head_kv, masked | (item.w && n + 1 == count ? kLast : 0), number, item);
      key += static_cast<int>(p.plan.step);
    }
    if (count == 0) loader.nothing(item);
    barrier_arrive(smem_address(&pipeline.empty[slot.index]));
    slot.advance();
  }
  if (kInStep) in_step.end(p.counter);
}

// Waits until the next key buffer is free and describes its block. Returns the buffer's full barrier, on which the
// caller has yet to arrive, with or without transaction bytes.
template <int kGroups, int kStages>
DEVICE u32 acquire_block(KvPipeline<kGroups, kStages>& pipeline, const PipelineState<kStages>& stage, int column,
                         int flags, const int4& item) {
  barrier_wait(smem_address(&pipeline.empty[stage.index]), stage.parity ^ 1);
  pipeline.info[stage.index] = make_int4(column, flags, item.x, item.y);
  return smem_address(&pipeline.full[stage.index]);
}

// The same, and arrives with the transaction bytes of the keys, `bytes`, and of the rows' bounds, which are loaded if
// the block is masked. Params: plan, log2_packed.
template <int kGroups, int kStages, typename Params>
DEVICE u32 arrive_keys(KvPipeline<kGroups, kStages>& pipeline, const PipelineState<kStages>& stage, const Params& p,
                       int column, int flags, int segment, const int4& item, u32 bytes) {
  const u32 bounds = tile_rows<kGroups>(p) * sizeof(int2);
  const u32 bar = acquire_block(pipeline, stage, column, flags, item);
  const bool masked = flags & kMasked;
  barrier_expect_bytes(bar, bytes + (masked ? bounds : 0));
  if (masked)
    load_bytes(smem_address(pipeline.bounds[stage.index]),
               p.plan.bounds + static_cast<i64>(segment) * tile_rows<kGroups>(p), bounds, bar);
  return bar;
}
