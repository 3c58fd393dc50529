// Shared by the attention kernels: rings of buffers, tile plans, work items and their persistent scheduling.
#pragma once

#include "../../common/arrivals.cuh"
#include "mask_numbers.cuh"

#ifndef STREAM_KV
#define STREAM_KV 0
#endif

constexpr int kWarpgroupRows = 64;  // of the accumulators of a warpgroup

// Loads a box of rows of one head, panel by panel.
template <int kPanels>
DEVICE void load_panels(const TensorMap* map, u32 smem, u32 panel_bytes, int row, int head, u32 bar) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i) load_box(smem + i * panel_bytes, map, i * kPanel, head, row, bar);
}

// With STREAM_KV, keys from arrival_barrier.first on are fetched from other ranks while the kernel runs and are in
// separate tensors. OF_KEY selects the parameter (p.name or p.name_remote) for a key's tensor; row_of_key is the key's
// row in that tensor. Without STREAM_KV they compile to nothing.
#if STREAM_KV
#define OF_KEY(p, key, name) (*((key) < (p).arrival_barrier.first ? &(p).name : &(p).name##_remote))
#else
#define OF_KEY(p, key, name) ((p).name)
#endif
// The number of these keys.
#if CAPTURED
#define NUM_ARRIVING(p) (__ldg(&(p).plan.numbers->num_arriving))
#else
#define NUM_ARRIVING(p) ((p).arrival_barrier.num_rows)
#endif
template <typename Params>
DEVICE int row_of_key(const Params& p, int key) {
#if STREAM_KV
  if (key >= p.arrival_barrier.first) return key - p.arrival_barrier.first;
#endif
  return key;
}

// The same for packed heads: row r is row r / heads of head r % heads, and `head` is the index of the pack.
template <int kPanels>
DEVICE void load_packed(const TensorMap* map, u32 smem, u32 panel_bytes, int row, int head, int log2_packed, u32 bar) {
  load_panels<kPanels>(map, smem, panel_bytes, row >> log2_packed, head << log2_packed, bar);
}

// Index and mbarrier phase parity in a ring of buffers.
template <int N>
struct PipelineState {
  int index = 0;
  u32 parity = 0;
  DEVICE void advance() {
    if (++index == N) index = 0, parity ^= 1;
  }
};

// Initializes the mbarriers of a buffer: `full` takes one arrival (with transaction bytes), `empty` takes `arrivals`.
DEVICE void init_buffer(u64& full, u64& empty, u32 arrivals) {
  barrier_init(smem_address(&full), 1);
  barrier_init(smem_address(&empty), arrivals);
}

// The same for each buffer of a stage.
template <int N>
DEVICE void init_buffers(u64 (&full)[N], u64 (&empty)[N], u32 arrivals) {
  for (int i = 0; i < N; ++i) init_buffer(full[i], empty[i], arrivals);
}

// Arrives once for the whole warp, after the reads and writes of all its threads.
DEVICE void release(u64& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(smem_address(&barrier));
}

// The mask, tile by tile; made by backends/sm90/tiles.py. A segment (in Python, a pass) is a range of
// successive blocks of a tile.
struct TilePlan {
  const int4* tiles;     // by decreasing cost: first row, first segment, past-the-last segment, number of rows
  const int4* segments;  // two each: first column, number of blocks; first and past-the-last fully visible block, for
                         // each of up to three warpgroups
  const int2* bounds;    // [segments, rows of a tile]: first and past-the-last visible column
  i64 step;              // columns from the start of one block to that of the next; negative: backwards
#if CAPTURED
  const MaskNumbers* numbers;
#endif
};

// Work item: first row (-1: no more items), head | number of rows << 16, first segment, past-the-last segment.
DEVICE int4 pack_item(const int4& tile, int head) { return make_int4(tile.x, head | tile.w << 16, tile.y, tile.z); }
DEVICE int item_head(const int4& item) { return item.y & 0xffff; }
DEVICE int item_rows(const int4& item) { return item.y >> 16; }

// Decodes an item index. Heads are divided into sections, so that the keys of a section stay in the L2 cache; in a
// section, items are ordered by tile, then by head.
DEVICE int4 section_item(const TilePlan& plan, int num_tiles, int num_heads, int head_section, int item) {
  if (item >= num_tiles * num_heads) return make_int4(-1, 0, 0, 0);
  const int per_section = num_tiles * head_section;
  const int section = item / per_section, rest = item - section * per_section;
  const int tile = rest / head_section;
  const int head = section * head_section + rest - tile * head_section;
  return pack_item(__ldg(plan.tiles + tile), head);
}

// Transposes 4 x 4 words among the 4 threads of a row: word j of thread t becomes word t of thread j.
DEVICE void transpose_quad(u32 (&word)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const u32 got = __shfl_xor_sync(0xffffffffu, upper ? word[j] : word[j | bit], bit);
      if (upper)
        word[j] = got;
      else
        word[j | bit] = got;
    }
  }
}

// Holds the start of a long item back until all items of its wave have begun, so that SMs read the same rows at
// the same time: else each would read more than the L2 cache keeps, at another place. It never waits long, for others
// may be late for good reasons. `counter`: each SM takes the item after the next from it just before.
DEVICE void keep_together(const int* counter, int item, int num_items, int blocks) {
  const int wave_end = (item / static_cast<int>(gridDim.x) + 1) * static_cast<int>(gridDim.x);
  const int enough = wave_end < num_items ? wave_end : num_items;
  const i64 until = clock64() + 32 * static_cast<i64>(blocks);
  while (true) {
    // Where rows are awaited SMs come late, and the counter gives the first items as well.
    const int taken = load_relaxed(counter) - (STREAM_KV ? static_cast<int>(gridDim.x) : 0);
    // 0: nothing is left and the counter is restored, or all have just begun.
    if (taken >= enough || (STREAM_KV ? taken <= 0 : taken == 0) || clock64() > until) break;
    sleep_ns(100);
  }
}

// The last block to leave restores the work counter for the next launch. Returns whether this one is the last.
DEVICE bool leave(int* counter) {
  const bool last = atomicAdd(counter + 1, 1) == static_cast<int>(gridDim.x) - 1;
  if (last) {
    counter[0] = 0;
    counter[1] = 0;
  }
  return last;
}
