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
constexpr int kNoKey = 1 << 30;               // behind all keys: hidden
constexpr u32 kArrivals = INDEXED ? 128 : 1;  // that fill a buffer of keys or values, as all lanes of four warps
constexpr u32 kDescribing = INDEXED ? 4 : 0;  // the same of what is said beside the keys of a step, one a warp

struct SparseTiles {
  const int* entries;        // of the lists: numbers of blocks or of keys; what is no such number is passed over
  const int* offsets;        // [lists of heads, query blocks + 1]: where lists begin; or null:
  const int* counts;         // [lists of heads, query blocks]: how long lists are; or null: width
  i64 head_step, list_step;  // without offsets: from a head's lists to the next's; from one list to the next
  int* counter;              // two words, zero before and after; a third: about where in long lists SMs are
  int width;
  int num_items, query_blocks, block_tiles, packs;  // tiles of a query block, packs of heads of a key head
  int heads_kv, list_heads;                         // list_heads: 1 or heads_kv
  int query_block, key_block, key_blocks;           // tokens of a block; how many blocks
  int num_rows, num_keys;
  int reach;       // query i sees keys below i + reach
  int log2_heads;  // of heads in a tile
  int long_list;   // keys of a list from which on SMs begin where the others are
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

// Where long lists, in rising order, are begun, and from there on around: where the other SMs are, so that all read the
// same rows at the same time, which are then in the L2 cache. The first of `count` groups of `stride` entries that
// begins at this number or behind it.
DEVICE int first_group(const int* list, int count, int stride, int number) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (__ldg(list + middle * stride) < number)
      low = middle + 1;
    else
      high = middle;
  }
  return low < count ? low : 0;
}
DEVICE void say_place(const SparseTiles& p, int number) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p.counter + 2), "r"(number) : "memory");
}

// ---- lists of blocks: a warp reads them ----

struct Pieces {
  const SparseTiles& p;
  const int lane;
  const int* list = nullptr;
  int count = 0, position = 0, limit = 0, held = 0, ahead = 0, rest = kNoKey;
  int begin = 0;  // of the entries
  u32 found = 0;

  DEVICE int load(int at) const {
    at += begin;
    const int past = count + 31 & ~31;
    if (at >= past) at -= past;
    return at + lane < count ? __ldg(list + at + lane) : -1;
  }
  DEVICE void look() {
    const bool seen = held >= 0 && held < p.key_blocks && held * p.key_block < limit;
    found = __ballot_sync(0xffffffffu, seen);
  }

  DEVICE void open(const Tile& tile) {
    list = p.entries + list_begin(p, tile, count);
    limit = min(p.num_keys, tile.past_row - 1 + p.reach);
    position = 0, rest = kNoKey, begin = 0;
    if (count * p.key_block >= p.long_list) {
      const int number = load_relaxed(p.counter + 2);
      begin = 32 * first_group(list, (count + 31) / 32, 32, uniform(number));
    }
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
    const int number = __shfl_sync(0xffffffffu, held, __ffs(found) - 1), first = number * p.key_block;
    found &= found - 1;
    if (lane == 0 && count * p.key_block >= p.long_list) say_place(p, number);
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
// An arrival of this thread once all that it copies has come. Who waits has to call fence_async_proxy before the tensor
// cores read it, so that nobody who copies waits.
DEVICE void copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

constexpr int kWarpKeys = kStep / 4;                 // keys of a step that one warp gathers
constexpr int kChunks = kHeadDim / 8;                // of 16 bytes of a row, one a lane
constexpr int kLaneKeys = kWarpKeys * kChunks / 32;  // keys that a lane takes part in, one after another in the list

// Numbers of a lane's keys: read by itself, for shuffles would wait behind the exponentials of the consumers.
struct Keys {
  int number[kLaneKeys];

  // From this place of a list of `count` on; what is no key becomes 0. Returns a bit for each that is one.
  DEVICE u32 load(const int* entries, int at, int count, int num_keys) {
    u32 seen = 0;
    const int* from = entries + at;
    if (at + kLaneKeys <= count && reinterpret_cast<u64>(from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 4) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(from + i));
        number[i] = four.x, number[i + 1] = four.y, number[i + 2] = four.z, number[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) number[i] = at + i < count ? __ldg(from + i) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const bool is_key = static_cast<u32>(number[i]) < static_cast<u32>(num_keys);
      seen |= is_key ? 1u << i : 0u;
      number[i] = is_key ? number[i] : 0;
    }
    return seen;
  }
};

DEVICE int first_of_lane(int warp, int lane) { return warp * kWarpKeys + lane / kChunks * kLaneKeys; }

// Which of a lane's keys are seen.
DEVICE void set_seen(StepInfo& info, int first, u32 seen, int lane) {
  if (kLaneKeys == 4) seen |= __shfl_down_sync(0xffffffffu, seen, kChunks) << 4;
  if (lane % kChunks) return;
  if (kLaneKeys == 16)
    reinterpret_cast<u16*>(info.keys)[first / 16] = static_cast<u16>(seen);
  else if (first % 8 == 0)
    reinterpret_cast<u8*>(info.keys)[first / 8] = static_cast<u8>(seen);
}

// Rows of keys or values of a step into swizzled panels.
DEVICE void gather_rows(u32 smem, const u16* from, int row_stride, const Keys& keys, int first, int lane) {
  const int chunk = lane % kChunks;
  const u16* column = from + chunk * 8;
  const u32 to = smem + (chunk / 8 * kStep + first) * 128;
  // A copy holds the register of its address until it is under way: several have registers of their own.
  constexpr int kAtOnce = kLaneKeys < 8 ? kLaneKeys : 8;
#pragma unroll
  for (int i = 0; i < kLaneKeys; i += kAtOnce) {
    const u16* from_row[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) from_row[j] = column + static_cast<i64>(keys.number[i + j]) * row_stride;
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) bits |= static_cast<u32>(reinterpret_cast<u64>(from_row[j]));
    // Never so; but the assembler computes all addresses before it, in registers of their own.
    asm volatile("{\n.reg .pred odd;\nsetp.lt.s32 odd, %0, 0;\n@odd trap;\n}" ::"r"(bits << 31) : "memory");
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      copy_async(to + (i + j) * 128 + ((chunk % 8 ^ (kLaneKeys < 8 ? first + j : j) % 8) << 4), from_row[j]);
  }
}

// A list of keys: as much of it as is read ahead of its tile.
struct KeyList {
  const int* entries;
  int tail;  // this lane's of the last 32 or fewer

  DEVICE int load(int at, int count) const { return at < count ? __ldg(entries + at) : -1; }
};

DEVICE int tail_of(int count) { return (count - 1) / 32 * 32; }

DEVICE KeyList open_list(const SparseTiles& p, int item) {
  if (item >= p.num_items) return {nullptr, -1};
  const Tile tile = tile_of(p, item);
  KeyList list = {p.entries + tile.list_head * p.head_step + tile.query_block * p.list_step};
  list.tail = list.load(tail_of(p.width) + threadIdx.x % 32, p.width);
  const int at = threadIdx.x % 128 * 4;  // the first four steps
  if (at < p.width && threadIdx.x % 8 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(list.entries + at));
  return list;
}

// How much of a list is left without what is no key at its end.
DEVICE int trimmed(const KeyList& list, int count, int num_keys, int lane) {
  int tail = list.tail;
  while (count > 0) {
    const int at = tail_of(count);
    const u32 found = __ballot_sync(0xffffffffu, static_cast<u32>(tail) < static_cast<u32>(num_keys));
    if (found) return at + 32 - __clz(found);
    count = at;
    tail = list.load(tail_of(count) + lane, count);
  }
  return 0;
}

// Loader: queries(tile), step(tile, flags, list, its length, place of the step), end(), all called by all lanes of four
// warps.
template <typename Loader>
DEVICE void walk_indices(const SparseTiles& p, Loader& loader, int warp, int lane) {
  const bool counts = warp == 0 && lane == 0;
  KeyList ahead = open_list(p, blockIdx.x);
  for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    const Tile tile = tile_of(p, item);
    const KeyList list = ahead;
    const int count = trimmed(list, p.width, p.num_keys, lane);
    const int steps = max(1, (count + kStep - 1) / kStep);
    if (counts) {
      atomicAdd(p.counter, 1);
      if (count >= p.long_list) keep_together(p.counter, item, p.num_items, 4 * steps);
    }
    loader.queries(tile);
    for (int n = 0; n < steps; ++n) {
      const int later = (n + 4) * kStep + warp * kWarpKeys;
      if (lane == 0 && later < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(list.entries + later));
      loader.step(tile, n + 1 == steps ? kLastStep : 0, list.entries, count, n * kStep);
      if (n == 0) ahead = open_list(p, item + gridDim.x);
    }
  }
  loader.end();
  if (counts) leave(p.counter);
}
