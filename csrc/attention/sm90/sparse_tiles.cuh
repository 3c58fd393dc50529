// What the sparse kernels share: tiles of queries with lists of keys, and how a producer brings these keys.
//
// A tile has 64 places for each consumer warpgroup, of as many query heads of one key head as a power of two divides
// (packed) and as many queries of one block as then fit: place i is of query i / heads and head i % heads. All its
// places see one list: of blocks of 64 or 128 keys, or of single keys.
//
// Before it: kGroups, consumer warpgroups; kStep, keys of a step, a multiple of 64; kHeadDim; INDEXED (0 or 1: lists
// are of single keys).
#pragma once

#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kPlaces = 64;  // of a warpgroup
constexpr int kPiece = 64;   // keys that lie together in a step
constexpr int kPieces = kStep / kPiece;
constexpr int kNoKey = 1 << 30;             // behind all keys: hidden
constexpr u32 kArrivals = INDEXED ? 4 : 1;  // that fill a buffer of keys or values, one a warp

struct SparseTiles {
  const int* entries;        // of the lists: numbers of blocks or of keys; what is no such number is passed over
  const int* offsets;        // [lists of heads, query blocks + 1]: where lists begin; or null:
  const int* counts;         // [lists of heads, query blocks]: how long lists are; or null: width
  i64 head_step, list_step;  // without offsets: from a head's lists to the next's; from one list to the next
  int* counter;              // two words, zero before and after
  int width;
  int num_items, query_blocks, block_tiles, packs;  // tiles of a query block, packs of heads of a key head
  int heads_kv, list_heads;                         // list_heads: 1 or heads_kv
  int query_block, key_block, key_blocks;           // tokens of a block; how many blocks
  int num_rows, num_keys;
  int reach;       // query i sees keys below i + reach
  int log2_heads;  // of heads in a tile
  int long_list;   // keys of a list from which on SMs begin their tiles together
};

struct Tile {
  int first_row, past_row;  // queries; none where the last block is short
  int head, head_kv;
  int list_head, query_block;
};

DEVICE Tile tile_of(const SparseTiles& p, int item) {
  const int heads = 1 << p.log2_heads, rows = kGroups * kPlaces >> p.log2_heads;
  const int tile = item % p.block_tiles, rest = item / p.block_tiles;
  const int block = rest % p.query_blocks, pack = rest / p.query_blocks;
  const int head_kv = pack / p.packs, first = block * p.query_block + tile * rows;
  const int past = min(p.num_rows, min((block + 1) * p.query_block, first + rows));
  return {first, past, pack * heads, head_kv, p.list_heads > 1 ? head_kv : 0, block};
}

// Of a step, beside its keys.
enum : int { kLastStep = 1, kNoMoreSteps = 2, kHidesKeys = 4 };

struct alignas(16) StepInfo {
  int flags, first_row, head_rows, unused;  // of the tile: first query, first head and 65536 * queries
  int keys[4];                              // INDEXED: bits of keys that are seen; else of each piece the first key
};

// Of a step of single keys, which of those that a warp gathers are seen.
DEVICE void set_seen(StepInfo& info, int warp, u32 bits) {
  if (kStep == 128)
    info.keys[warp] = static_cast<int>(bits);
  else
    reinterpret_cast<u16*>(info.keys)[warp] = static_cast<u16>(bits);
}

// Hides what is not.
DEVICE void hide_unseen(float (&x)[kStep / 2], const StepInfo& info, int lane) {
  const int4 words = *reinterpret_cast<const int4*>(info.keys);
  const int all = kStep == 128 ? words.x & words.y & words.z & words.w : words.x & words.y;
  if (all == -1) return;
#pragma unroll
  for (int j = 0; j < kStep / 8; ++j) {
    const int word = j < 4 ? words.x : j < 8 ? words.y : j < 12 ? words.z : words.w;
    const u32 two = static_cast<u32>(word) >> 8 * (j % 4) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(two >> i % 2 & 1)) x[4 * j + i] = -kInfinity;
  }
}

DEVICE i64 list_begin(const SparseTiles& p, const Tile& tile, int& count) {
  const int list = tile.list_head * p.query_blocks + tile.query_block;
  if (p.offsets) {
    const int* at = p.offsets + list + tile.list_head;
    count = __ldg(at + 1) - __ldg(at);
    return __ldg(at);
  }
  count = p.counts ? __ldg(p.counts + list) : p.width;
  return tile.list_head * p.head_step + tile.query_block * p.list_step;
}

// ---- lists of blocks: a warp reads them ----

struct Pieces {
  const SparseTiles& p;
  const int lane;
  const int* list = nullptr;
  int count = 0, position = 0, limit = 0, held = 0, ahead = 0, rest = kNoKey;
  u32 found = 0;

  DEVICE int load(int at) const { return at + lane < count ? __ldg(list + at + lane) : -1; }
  DEVICE void look() {
    const bool seen = held >= 0 && held < p.key_blocks && held * p.key_block < limit;
    found = __ballot_sync(0xffffffffu, seen);
  }

  DEVICE void open(const Tile& tile) {
    list = p.entries + list_begin(p, tile, count);
    limit = min(p.num_keys, tile.past_row - 1 + p.reach);
    position = 0, rest = kNoKey;
    held = load(0), ahead = load(32);
    look();
  }

  // First key of the next piece, kNoKey behind the last.
  DEVICE int next() {
    if (rest != kNoKey) {
      const int first = rest;
      rest = kNoKey;
      return first;
    }
    while (!found) {
      position += 32;
      if (position >= count) return kNoKey;
      held = ahead, ahead = load(position + 32);
      look();
    }
    const int first = __shfl_sync(0xffffffffu, held, __ffs(found) - 1) * p.key_block;
    found &= found - 1;
    if (p.key_block > kPiece && first + kPiece < limit) rest = first + kPiece;
    return first;
  }
};

// Loader: queries(tile), step(tile, info, first key of each piece), end(), all called by all lanes.
template <typename Loader>
DEVICE void walk_blocks(const SparseTiles& p, Loader& loader, int lane) {
  Pieces pieces{p, lane};
  int item = blockIdx.x;
  while (item < p.num_items) {
    int next = 0;
    if (lane == 0) next = gridDim.x + atomicAdd(p.counter, 1);
    const Tile tile = tile_of(p, item);
    if (tile.first_row < tile.past_row) {
      loader.queries(tile);
      pieces.open(tile);
      if (lane == 0 && pieces.count * p.key_block >= p.long_list)
        keep_together(p.counter, item, p.num_items, pieces.count);
      const int all_see = min(p.num_keys, tile.first_row + p.reach);
      int ahead = pieces.next();
      bool last = false;
      while (!last) {
        int4 keys = make_int4(kNoKey, kNoKey, 0, 0);
        keys.x = ahead;
        if (ahead != kNoKey) ahead = pieces.next();
        if (kPieces > 1 && ahead != kNoKey) keys.y = ahead, ahead = pieces.next();
        last = ahead == kNoKey;
        const bool hides = max(keys.x, kPieces > 1 ? keys.y : 0) + kPiece > all_see;
        loader.step(tile, (last ? kLastStep : 0) | (hides ? kHidesKeys : 0), keys);
      }
    }
    item = __shfl_sync(0xffffffffu, next, 0);
  }
  loader.end();
  if (lane == 0) leave(p.counter);
}

// ---- lists of keys: four warps gather them ----

DEVICE void copy_async(u32 smem, const void* global) {
  if (kHeadDim == 128)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// An arrival of this thread once all that it copies has come. Who waits has to call fence_async_proxy before the tensor
// cores read it, so that nobody who copies waits.
DEVICE void copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Whether a barrier is done with the phase; the same for all lanes.
DEVICE bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return __all_sync(0xffffffffu, done);
}

constexpr int kWarpKeys = kStep / 4;  // keys of a step that one warp gathers; lane i holds the number of key i

// Rows of keys or values of a step into swizzled panels.
DEVICE void gather_rows(u32 smem, const u16* from, int row_stride, int index, int warp, int lane) {
  constexpr int kChunks = kHeadDim / 8, kAtOnce = 32 / kChunks;  // 16 bytes each of a row; rows
  const int chunk = lane % kChunks, first = lane / kChunks;
  const u16* column = from + chunk * 8;
  const u32 to = smem + (chunk / 8 * kStep + warp * kWarpKeys + first) * 128;
#pragma unroll
  for (int i = 0; i < kWarpKeys; i += kAtOnce) {
    const int row = __shfl_sync(0xffffffffu, index, i + first);
    copy_async(to + i * 128 + ((chunk % 8 ^ (i + first) % 8) << 4), column + static_cast<i64>(row) * row_stride);
  }
}

// How much of a list is left without what is no key at its end.
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

// Loader: queries(tile), step(tile, flags, number of this lane's key), end(), all called by all lanes of four warps.
template <typename Loader>
DEVICE void walk_indices(const SparseTiles& p, Loader& loader, int warp, int lane) {
  for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    const Tile tile = tile_of(p, item);
    int count;
    const int* list = p.entries + list_begin(p, tile, count);
    count = trimmed(list, count, p.num_keys, lane);
    auto load = [&](int step) {
      const int at = step * kStep + warp * kWarpKeys + lane % kWarpKeys;
      return at < count ? __ldg(list + at) : -1;
    };
    loader.queries(tile);
    const int steps = max(1, (count + kStep - 1) / kStep);
    int index = load(0);
    for (int n = 0; n < steps; ++n) {
      const int ahead = load(n + 1);
      loader.step(tile, n + 1 == steps ? kLastStep : 0, index);
      index = ahead;
    }
  }
  loader.end();
}
