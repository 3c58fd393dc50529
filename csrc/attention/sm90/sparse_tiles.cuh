// Shared by the sparse kernels: tiles of queries with lists of keys, and the producers that load these keys.
//
// A tile has 64 accumulator rows for each consumer warpgroup. They hold `heads` query heads of one key head
// (packed; the largest power of two that divides their number) for as many queries of one block as fit: row i is
// query i / heads of head i % heads. All rows of a tile share one list, of blocks of 64 or 128 keys, or of single
// keys.
//
// Template parameters: kGroups, consumer warpgroups; kStep, keys of a step, a multiple of 64; kHeadDim.
#pragma once

#include "softmax.cuh"
#include "sparse_offsets.cuh"
#include "tiles.cuh"

constexpr int kPiece = 64;           // contiguous keys in a step of a list of blocks
constexpr int kNoKey = 1 << 30;      // past all keys, hence masked
constexpr int kTogetherTimes = 128;  // of keep_together, for single keys

// Copied in place of keys that are none: 0 times what another row holds would not be 0 if that is not finite.
__device__ uint4 absent_row[576 / 8];

// Arrivals that fill a buffer of keys: by TMA one; of single keys those of all copying lanes, and of four warps for the
// description.
template <bool kIndexed>
constexpr u32 kKeyArrivals = kIndexed ? kWarpgroupThreads + 4 : 1;

struct SparseTiles {
  const int* entries;        // of the lists: indices of blocks or of keys; invalid ones are skipped
  const int* offsets;        // [list heads, query blocks + 1]: starts of the lists; or null, then:
  const int* counts;         // [list heads, query blocks]: lengths of the lists; or null: all have length `width`
  i64 head_step, list_step;  // without offsets: strides of entries between heads and between lists
  int* counter;              // two words; zero between launches, see leave()
  int width;
  int num_items, query_blocks, block_tiles, packs;  // block_tiles: tiles of a query block; packs: of a key head
  int heads_kv, list_heads;                         // list_heads: 1 or heads_kv
  int query_block, key_block, key_blocks;           // tokens of a query block, of a key block; number of key blocks
  int num_rows, num_keys;
  int reach;        // query i sees keys below i + reach
  int log2_heads;   // log2 of the heads of a tile
  int long_list;    // keys of a list from which on SMs start their tiles together (keep_together)
  int num_entries;  // size of `entries`, to which offsets are clamped
};

// Start or end of a list.
DEVICE int offset_at(const SparseTiles& p, int list) { return load_offset(p.offsets + list, p.num_entries); }

struct Tile {
  int first_row, past_row;  // queries; may be empty in the last block
  int head, head_kv;
  int list_head, query_block;
};

// The two accumulator rows of a thread in a tile.
struct SparseThreadRows {
  int row[2], head[2];
  DEVICE SparseThreadRows(const SparseTiles& tiles, int warpgroup) {
    const int log2_heads = tiles.log2_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int acc_row = warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 +
                          threadIdx.x % kWarpThreads / 4 + 8 * r;
      row[r] = acc_row >> log2_heads, head[r] = acc_row & (1 << log2_heads) - 1;
    }
  }
};

template <int kGroups>
DEVICE Tile tile_of(const SparseTiles& p, int item) {
  const int heads = 1 << p.log2_heads, rows = kGroups * kWarpgroupRows >> p.log2_heads;
  const int tile = item % p.block_tiles, rest = item / p.block_tiles;
  const int block = rest % p.query_blocks, pack = rest / p.query_blocks;
  const int head_kv = pack / p.packs, first = block * p.query_block + tile * rows;
  const int past = min(p.num_rows, min((block + 1) * p.query_block, first + rows));
  return {first, past, pack * heads, head_kv, p.list_heads > 1 ? head_kv : 0, block};
}

// Flags of a step.
enum : int { kLastStep = 1, kNoMoreSteps = 2, kHidesKeys = 4 };

struct alignas(16) StepInfo {
  int flags, first_row, head_rows, head_kv;  // of the tile: first query, first head | queries << 16, key head
  int keys[4];                               // single keys: bits of visible ones; else the first key of each piece
};

DEVICE void describe(StepInfo& info, const Tile& tile, int flags) {
  *reinterpret_cast<int4*>(&info) =
      make_int4(flags, tile.first_row, tile.head | tile.past_row - tile.first_row << 16, tile.head_kv);
}

// Loads a warpgroup's rows of queries, or of dO, of a tile into swizzled panels.
template <int kHeadDim>
DEVICE void load_tile_rows(const TensorMap* map, u32 smem, const SparseTiles& p, const Tile& tile, int warpgroup,
                           u32 bar) {
  const int acc_row = warpgroup * kWarpgroupRows;
  load_panels<kHeadDim / kPanel>(map, smem, kWarpgroupRows * kPanelRowBytes, tile.first_row + (acc_row >> p.log2_heads),
                                 tile.head + (acc_row & (1 << p.log2_heads) - 1), bar);
}

// For pieces of blocks: masks, in each row of a tile, keys from past(row) on.
template <int kStep, typename Past>
DEVICE void hide_pieces(float (&scores)[kStep / 2], const StepInfo& info, int lane, Past past) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = past(r) - 2 * (lane % 4);
    u32 hidden = bits_from(end - info.keys[0], kPiece) & 0xffff;
    if (kStep > kPiece) hidden |= bits_from(end - info.keys[1], kPiece) << 16;
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i) {
      float& score = scores[4 * (i / 2) + 2 * r + i % 2];
      score = hidden & (1u << i) ? -kInfinity : score;
    }
  }
}

DEVICE i64 list_begin(const SparseTiles& p, const Tile& tile, int& count) {
  const int list = tile.list_head * p.query_blocks + tile.query_block;
  if (p.offsets) {
    const int begin = offset_at(p, list + tile.list_head);
    count = offset_at(p, list + tile.list_head + 1) - begin;
    return begin;
  }
  count = p.counts ? __ldg(p.counts + list) : p.width;
  return tile.list_head * p.head_step + tile.query_block * p.list_step;
}

// ---- lists of blocks, read by a warp ----

// Iterates over the pieces of a list: each lane holds one of 32 entries, and the next 32 are prefetched.
struct Pieces {
  const SparseTiles& p;
  const int lane;
  const int* list = nullptr;
  int count = 0, position = 0, limit = 0, own = 0, ahead = 0, rest = kNoKey;
  u32 found = 0;

  DEVICE int load(int at) const { return at + lane < count ? __ldg(list + at + lane) : -1; }
  DEVICE void look() {
    const bool seen = own >= 0 && own < p.key_blocks && own * p.key_block < limit;
    found = __ballot_sync(0xffffffffu, seen);
  }

  DEVICE void open(const Tile& tile) {
    list = p.entries + list_begin(p, tile, count);
    limit = min(p.num_keys, tile.past_row - 1 + p.reach);
    position = 0, rest = kNoKey;
    own = load(0), ahead = load(32);
    look();
  }

  // First key of the next piece; kNoKey after the last.
  DEVICE int next() {
    if (rest != kNoKey) {
      const int first = rest;
      rest = kNoKey;
      return first;
    }
    while (!found) {
      position += 32;
      if (position >= count) return kNoKey;
      own = ahead, ahead = load(position + 32);
      look();
    }
    const int first = __shfl_sync(0xffffffffu, own, __ffs(found) - 1) * p.key_block;
    found &= found - 1;
    if (p.key_block > kPiece && first + kPiece < limit) rest = first + kPiece;
    return first;
  }
};

// Loads pieces into swizzled panels; `keys`: the first of each. From kNoKey on TMA fills in zeros.
template <int kHeadDim, int kStep>
DEVICE void load_pieces(const TensorMap* map, u32 smem, const int4& keys, int head_kv, u32 bar) {
  const int first[2] = {keys.x, keys.y};
#pragma unroll
  for (int i = 0; i < kStep / kPiece; ++i)
    load_panels<kHeadDim / kPanel>(map, smem + i * kPiece * kPanelRowBytes, kStep * kPanelRowBytes, first[i], head_kv,
                                   bar);
}

// Loader: queries(tile), step(tile, flags, first key of each piece), end(), all called by all lanes of the warp.
template <int kGroups, int kStep, typename Loader>
DEVICE void walk_block_lists(const SparseTiles& p, Loader& loader, int lane) {
  Pieces pieces{p, lane};
  int item = blockIdx.x;
  while (item < p.num_items) {
    int next = 0;
    if (lane == 0) next = gridDim.x + atomicAdd(p.counter, 1);
    const Tile tile = tile_of<kGroups>(p, item);
    if (tile.first_row < tile.past_row) {
      loader.queries(tile);
      pieces.open(tile);
      const int keys_listed = pieces.count * p.key_block;
      if (lane == 0 && keys_listed >= p.long_list)  // for at most 2 % of the time that they take
        keep_together(p.counter, item, p.num_items, keys_listed / 64);
      int ahead = pieces.next();
      bool last = false;
      while (!last) {
        int4 keys = make_int4(kNoKey, kNoKey, 0, 0);
        keys.x = ahead;
        if (ahead != kNoKey) ahead = pieces.next();
        if (kStep > kPiece && ahead != kNoKey) keys.y = ahead, ahead = pieces.next();
        last = ahead == kNoKey;
        const bool hides =
            max(keys.x, kStep > kPiece ? keys.y : 0) + kPiece > min(p.num_keys, tile.first_row + p.reach);
        loader.step(tile, (last ? kLastStep : 0) | (hides ? kHidesKeys : 0), keys);
      }
    }
    item = __shfl_sync(0xffffffffu, next, 0);
  }
  loader.end();
  if (lane == 0) leave(p.counter);
}

// ---- lists of keys: four warps gather them ----

// Makes this thread arrive once all of its copies are complete; it does not wait itself. cp.async writes through the
// generic proxy, so the consumer that waits must call fence_async_proxy before wgmmas read the data.
DEVICE void copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Single keys: a unit is kChunks lanes that copy a row, 16 bytes each; four warps are kUnits units. Unit u copies
// kUnitKeys successive entries of the list to rows u, u + kUnits and so on. These rows differ by multiples of 8, so
// that they have the same swizzle.
template <int kHeadDim, int kStep>
struct KeyGather {
  static constexpr int kChunks = kHeadDim / 8, kUnits = kWarpgroupThreads / kChunks, kUnitKeys = kStep / kUnits;

  // Copies 16 bytes, and has the rest of the row brought into the L2 cache.
  static DEVICE void copy_async(u32 smem, const void* global) {
    if (kHeadDim == 128)
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
    else
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
  }

  // The entry of a step whose index a lane holds.
  static DEVICE int entry_of_lane(int warp, int lane) {
    return (warp * kUnits / 4 + lane / kChunks) * kUnitKeys + lane % kUnitKeys;
  }

  // The entry of a step that is copied to a row.
  static DEVICE int entry_of_row(int row) { return row % kUnits * kUnitKeys + row / kUnits; }

  // Offset, in a buffer of swizzled panels, of a lane's 16 bytes of the first row of its unit.
  static DEVICE u32 offset(int warp, int lane) {
    const int unit = warp * kUnits / 4 + lane / kChunks, chunk = lane % kChunks;
    return (chunk / 8 * kStep + unit) * kPanelRowBytes + ((chunk % 8 ^ unit % 8) << 4);
  }

  // Exchanges the key indices of a unit's lanes through shared memory; -1 for none.
  static DEVICE void share_indices(int (&indices)[kStep], int warp, int lane, int index) {
    __syncwarp();  // all lanes have read the old contents: ptxas may move the store before a vote of diverged lanes
    if (lane % kChunks < kUnitKeys) indices[entry_of_lane(warp, lane)] = index;
    __syncwarp();
  }

  // Copies rows of keys or values of a step. `to`: offset() in their buffer; `column`: this lane's 16 bytes of row
  // 0.
  static DEVICE void copy_rows(u32 to, const u16* column, int row_stride, const int (&indices)[kStep], int warp,
                               int lane) {
    const int4* four = reinterpret_cast<const int4*>(indices + (warp * kUnits / 4 + lane / kChunks) * kUnitKeys);
#pragma unroll
    for (int i = 0; i < kUnitKeys; i += 4) {
      const int4 rows = four[i / 4];
      const int row[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u16* from = column + static_cast<i64>(row[j]) * row_stride;
        copy_async(to + (i + j) * kUnits * kPanelRowBytes, row[j] < 0 ? reinterpret_cast<u16*>(absent_row) : from);
      }
    }
  }

  // Masks keys that are not visible; each word of info.keys is a ballot of one gathering warp.
  static DEVICE void hide_unseen(float (&scores)[kStep / 2], const StepInfo& info, int lane) {
    constexpr int kUnitsOfWarp = kUnits / 4;
    constexpr u32 kAll = 0xffffffffu >> 32 - 2 * kChunks;
#pragma unroll
    for (int half = 0; half < kUnits / 8; ++half) {  // rows 8 to 15 of every 16 belong to other units
      const int unit = 8 * half + 2 * (lane % 4);
      const u32 seen = static_cast<u32>(info.keys[unit / kUnitsOfWarp]) >> unit % kUnitsOfWarp * kChunks;
      if ((seen & kAll) == kAll) continue;
#pragma unroll
      for (int j = half; j < kStep / 8; j += kUnits / 8)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!(seen >> i % 2 * kChunks + j * 8 / kUnits & 1)) scores[4 * j + i] = -kInfinity;
    }
  }
};

// Length of a list without invalid entries at its end.
DEVICE int trimmed(const int* list, int count, int num_keys, int lane) {
  while (count > 0) {
    const int at = (count - 1) / 32 * 32;
    const bool seen = at + lane < count && static_cast<u32>(__ldg(list + at + lane)) < static_cast<u32>(num_keys);
    const u32 found = __ballot_sync(0xffffffffu, seen);
    if (found) return at + 32 - __clz(found);
    count = at;
  }
  return 0;
}

// Loader: queries(tile), step(tile, flags, index of this lane's key), end(), all called by all lanes of four warps.
template <int kGroups, int kHeadDim, int kStep, bool kTogether, typename Loader>
DEVICE void walk_key_lists(const SparseTiles& p, Loader& loader, int warp, int lane) {
  for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    const Tile tile = tile_of<kGroups>(p, item);
    int count;
    const int* list = p.entries + list_begin(p, tile, count);
    count = trimmed(list, count, p.num_keys, lane);
    auto load = [&](int step) {
      const int at = step * kStep + KeyGather<kHeadDim, kStep>::entry_of_lane(warp, lane);
      return at < count ? __ldg(list + at) : -1;
    };
    const int steps = max(1, (count + kStep - 1) / kStep);
    if (kTogether && warp == 0 && lane == 0 && p.long_list < kNoKey) {
      atomicAdd(p.counter, 1);
      keep_together(p.counter, item, p.num_items, kTogetherTimes * steps);
    }
    __syncwarp();
    loader.queries(tile);
    int index = load(0);
    for (int n = 0; n < steps; ++n) {
      const int ahead = load(n + 1);
      loader.step(tile, n + 1 == steps ? kLastStep : 0, index);
      index = ahead;
    }
  }
  loader.end();
  if (kTogether && warp == 0 && lane == 0 && p.long_list < kNoKey) leave(p.counter);
}
