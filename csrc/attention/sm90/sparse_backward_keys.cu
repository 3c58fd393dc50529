// Sparse attention backward for sm_90a, dK and dV by lists of the blocks of queries that see a block of keys: one work
// item is such a block of keys of one key head, and a part of its list where lists are cut. SMs go over the first parts
// of all lists, then over the second, so that they read the same queries at about the same time; sums wait in device
// memory for the next part of their list.
//
// K and V of the item stay in shared memory, dK and dV in registers. A step is 64 places (sparse_tiles.cuh) of a listed
// block of queries, on transposed logits as in backward.cu. Of blocks of 128 keys each consumer warpgroup owns 64, and
// both take every step. Of blocks of 64 keys they take steps in turn, each with sums of its own, and at the end of the
// item each hands one of its sums to the other through shared memory.
//
// With ADD_DQ dQ comes along as in backward.cu: dS goes through shared memory, each warpgroup computes half the columns
// of dQ of the step before, and a warp adds them to fp32 sums in device memory. Without, nothing is added there, so
// results repeat bit by bit.
//
// Compile-time: HEAD_DIM, K_BLOCK (64 or 128), ADD_DQ (0 or 1, of 128 keys), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "gradients.cuh"
#include "softmax.cuh"

#define INDEXED 0
constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64;
constexpr int kStages = ADD_DQ ? 3 : 4;  // of q and dout; even where a warpgroup takes every second: it finds its own
constexpr int kTileKeys = K_BLOCK;
constexpr int kHalf = kHeadDim / 2;
constexpr u32 kPieceFloats = kHalf * 16;       // sums of 16 places and half the columns, as a warp's accumulators lie
constexpr bool kShares = kTileKeys > kStep;    // steps are of both warpgroups
constexpr int kTurns = kShares ? 1 : kGroups;  // warpgroups that take steps in turn
constexpr int kLeastSteps = 64;                // of a part, as in sparse_backward.py, which also knows kSumHeads
constexpr int kSumHeads = 2;                   // key heads whose sums of parts have places of their own
constexpr int kSums = kShares ? 4 : 2;         // of an item: dK and dV, of each warpgroup or of one
static_assert(kShares || !ADD_DQ);
using T = DTYPE;

// Named barriers: the place where a warpgroup puts what is to be added is free, is full; and dS of each warpgroup is
// there, two that alternate. 1 is also that of a hand-over.
constexpr u32 kPlaceFree = 1, kPlaceFull = 3, kDsThere = 5;

#include "row_products.cuh"
#include "sparse_tiles.cuh"

struct SparseKeysParams {
  TensorMap q, k, v, dout;
  SparseTiles tiles;  // lists are of blocks of queries, [lists of heads, blocks of keys]; offsets: one array
  // [packs, stats_rows, heads of a tile]: lse times log2 e. A block of queries has stats_block rows, so that it begins
  // at a multiple of 16 bytes.
  const float *lse, *delta;
  float* dq_sums;  // [packs, 2 halves, units] pieces; a unit is 16 places; each block of queries has block_units
  void *dk, *dv;
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  i64 stats_rows;
  float4* part_sums;  // [kSumHeads or key heads if fewer, pieces of keys, kSums, head_dim / 8, 128 threads]
  u32* parts_done;    // [as many, pieces of keys, kSums, 4 warps] of zeros; neither is read of one part
  int parts;          // of a long list, without ADD_DQ
  int stats_block, units, block_units;
  float scale, scale_log2;
};

struct Shared {
  alignas(1024) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kPlaces][kPanel];
  u16 dout[kStages][kHeadDim / kPanel][kPlaces][kPanel];
  float handed[kGroups][kShares ? (ADD_DQ ? 4 * kPieceFloats : 4) : kStep * kHeadDim];
  u16 ds[2][ADD_DQ ? kGroups : 1][ADD_DQ ? kPlaces : 1][kStep];
  float lse[kStages][kPlaces], delta[kStages][kPlaces];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  int4 info[kStages];         // flags, first query, past-the-last query of the block, number of the keys;
                              // at the end: flags, part, parts, number of the keys
  int sums[kStages];          // piece of dq_sums, the first half
  int handed_piece[kGroups];  // -1: no more
  int taken;                  // the producer's alone, as the next: item
  int2 item;                  // number of its keys, key head
};

constexpr u32 kBytesK = sizeof(Shared::k);
constexpr u32 kBytesQ = sizeof(Shared::q) / kStages;
constexpr u32 kBytesRow = kPlaces * sizeof(float);

// ---- producer: one thread ----

struct Loader {
  const SparseKeysParams& p;
  Shared& s;
  Ring<kStages> ring;
  u32 kv_parity = 1;

  DEVICE void keys(int piece, int head_kv) {
    const u32 bar = smem_address(&s.kv_full);
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    barrier_expect_bytes(bar, 2 * kBytesK);
    for (int i = 0; i < kTileKeys; i += kPiece) {
      load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k) + i * 128, kTileKeys * 128, piece * kTileKeys + i, head_kv,
                                     bar);
      load_panels<kHeadDim / kPanel>(&p.v, smem_address(s.v) + i * 128, kTileKeys * 128, piece * kTileKeys + i, head_kv,
                                     bar);
    }
  }

  DEVICE u32 announce(int flags, int row, int past_row, int piece) {
    barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
    s.info[ring.index] = make_int4(flags, row, past_row, piece);
    return smem_address(&s.full[ring.index]);
  }

  // 64 places of a block of queries, from this on.
  DEVICE void step(const SparseTiles& t, int block, int pack, int place) {
    const int piece = s.item.x;
    pack += s.item.y * t.packs;
    const int first_row = block * t.query_block, past_row = min(t.num_rows, first_row + t.query_block);
    const int row = first_row + (place >> t.log2_heads),
              head = (pack << t.log2_heads) + (place & (1 << t.log2_heads) - 1);
    const int past_key = (piece + 1) * kTileKeys;
    const bool hides = past_row - row << t.log2_heads < kPlaces || row + t.reach < past_key || past_key > t.num_keys;
    const u32 bar = announce(hides ? kHidesKeys : 0, row, past_row, piece);
    const int i = ring.index;
    if (ADD_DQ) s.sums[i] = 2 * pack * p.units + block * p.block_units + place / 16;
    barrier_expect_bytes(bar, 2 * (kBytesQ + kBytesRow));
    load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kPlaces * 128, row, head, bar);
    load_panels<kHeadDim / kPanel>(&p.dout, smem_address(s.dout[i]), kPlaces * 128, row, head, bar);
    const i64 stats = (pack * p.stats_rows + static_cast<i64>(block) * p.stats_block << t.log2_heads) + place;
    load_bytes(smem_address(s.lse[i]), p.lse + stats, kBytesRow, bar);
    load_bytes(smem_address(s.delta[i]), p.delta + stats, kBytesRow, bar);
    ring.advance();
  }

  // Both warpgroups are told.
  DEVICE void say(int flags, int part, int parts, int piece) {
    for (int w = 0; w < kTurns; ++w) {
      barrier_arrive(announce(flags, part, parts, piece));
      ring.advance();
    }
  }
};

// Items come from one counter, each after the list of the one before it has been loaded. So no item waits for ever for
// sums of another, which is one of a lower number: of all items that have been taken and are not done, the lowest waits
// for nobody, as all lower ones are done; and the block that took it is on an SM, where it has nothing to do before, as
// it takes its items in rising order. Were the first items dealt out by block number, some could wait for that of a
// block which gets no SM while other kernels stay on theirs.
DEVICE int take_item(const SparseTiles& t, Shared& s) {
  s.taken = atomicAdd(t.counter, 1);
  return *static_cast<volatile int*>(&s.taken);  // from there, for registers are scarce
}

DEVICE void produce(const SparseKeysParams& p, Shared& s) {
  const SparseTiles& t = p.tiles;
  Loader loader{p, s};
  const int most_parts = ADD_DQ ? 1 : p.parts;
  const int steps = t.packs * (((t.query_block << t.log2_heads) + kPlaces - 1) / kPlaces);  // of an entry
  while (true) {
    const int item = take_item(t, s);
    if (item >= t.num_items) break;
    const int pieces = (t.num_keys + kTileKeys - 1) / kTileKeys;
    const int row = item / pieces, piece = item - row * pieces, first_key = piece * kTileKeys;
    const int head_kv = row / most_parts, part = row - head_kv * most_parts;
    const int list = (t.list_heads > 1 ? head_kv * t.key_blocks : 0) + first_key / t.key_block;
    const i64 begin = t.offsets ? offset_at(t, list) : list * t.list_step;
    const int count = t.offsets ? offset_at(t, list + 1) - static_cast<int>(begin) : __ldg(t.counts + list);
    const int parts = ADD_DQ ? 1 : max(1, min(most_parts, count * steps / kLeastSteps));
    if (part >= parts) continue;
    const int most = (count + parts - 1) / parts, before = most * part;
    const int* at = t.entries + begin + before;
    int left = min(most, count - before);
    loader.keys(piece, head_kv);
    s.item = make_int2(piece, head_kv);
    for (; left > 0; --left) {
      const int block = __ldg(at++);
      const int rows = min(t.num_rows - block * t.query_block, t.query_block);
      if (static_cast<u32>(block) >= t.query_blocks) continue;  // of offsets that are none
      if (block * t.query_block + rows - 1 + t.reach <= s.item.x * kTileKeys) continue;
      for (int pack = 0; pack < t.packs; ++pack)
        for (int place = 0; place < rows << t.log2_heads; place += kPlaces) loader.step(t, block, pack, place);
    }
    loader.say(kLastStep | s.item.y << 3, part, parts, s.item.x);
  }
  loader.say(kNoMoreSteps, 0, 0, 0);
  leave(t.counter);
}

// ---- two warps, one for each warpgroup of consumers: they add to the sums in device memory ----

DEVICE void add_handed(const SparseKeysParams& p, Shared& s, int warpgroup) {
  while (true) {
    named_arrive(kPlaceFree + warpgroup, 160);
    named_sync(kPlaceFull + warpgroup, 160);
    const int piece = s.handed_piece[warpgroup];
    if (piece < 0) break;
    if (threadIdx.x % 32 == 0) {
      add_floats(p.dq_sums + static_cast<i64>(piece) * kPieceFloats, smem_address(s.handed[warpgroup]),
                 4 * kPieceFloats * 4);
      bulk_wait_read();
    }
    __syncwarp();
  }
  bulk_wait();
}

// ---- consumers ----

// acc[64 places, kHalf] = ds[64 places, 128 keys] * keys[128 keys, kHalf]
DEVICE void issue_dq(float (&acc)[kHalf / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    Wgmma<T, kHalf>::template ss<0, 1>(acc, a.at((i / 4) * kPlaces * 128 + (i % 4) * 32), b.at(i * 16 * 128), i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseKeysParams& p;
  Shared& s;
  const int warpgroup, lane, key;  // key: first of this thread's, of the item
  int stage;
  u32 parity = 0, kv_parity = 0;
  Ring<2> buffer;     // of dS
  int previous = -1;  // piece of the step before, whose dQ is not added yet
  u32 ds_store = 0;

  DEVICE Consumer(const SparseKeysParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        key((kShares ? warpgroup * kStep : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        stage(kShares ? 0 : warpgroup) {
    // stmatrix: lane L gives the address of row L % 8 of matrix L / 8. Matrices 1 and 3 are 8 keys on, 2 and 3 are 8
    // places on.
    const int chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    if (ADD_DQ)
      ds_store = smem_address(s.ds[0][warpgroup]) + (lane / 16 * 8 + lane % 8) * 128 + ((chunk ^ lane % 8) << 4);
    keep(ds_store);
  }

  // Its half of the columns.
  DEVICE Operand keys_half() const {
    return Operand(smem_address(s.k) + warpgroup * kHalf / kPanel * kTileKeys * 128 + warpgroup * kHalf % kPanel * 2,
                   kTileKeys * 128);
  }

  // Until the other warpgroup's dS of the step before is there; then it has also read dS of the step before that.
  DEVICE void wait_ds() const { named_sync(kDsThere + 2 * buffer.index + 1 - warpgroup, 128 * kGroups); }

  DEVICE void add_dq(const float (&dq)[kHalf / 2]) const {
    named_sync(kPlaceFree + warpgroup, 160);
    const u32 place = smem_address(s.handed[warpgroup]) + threadIdx.x % 128 / 32 * (kPieceFloats * 4) + lane * 16;
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
      store_shared_v4(place + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    if (threadIdx.x % 128 == 0) s.handed_piece[warpgroup] = previous;
    fence_async_proxy();
    named_arrive(kPlaceFull + warpgroup, 160);
  }

  // dQ of the last step of an item.
  DEVICE void add_last_dq() {
    float dq[kHalf / 2];
    wait_ds();
    issue_dq(dq, Operand(smem_address(s.ds[buffer.index])), keys_half());
    wgmma_wait<0>();
    pin(dq);
    add_dq(dq);
    previous = -1;
  }

  DEVICE void advance() {
    stage += kTurns;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }

  DEVICE void step(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2], int flags) {
    float x[kPlaces / 2], y[kPlaces / 2], own[kHalf / 2 == kPlaces / 2 ? 1 : kHalf / 2];
    u32 probs[kPlaces / 4], ds[kPlaces / 4];
    const int piece = ADD_DQ ? uniform(s.sums[stage]) + warpgroup * p.units : 0;
    const u32 row = kShares ? warpgroup * kStep * 128 : 0;
    issue_logits<kHeadDim, kPlaces, kTileKeys>(x, Operand(smem_address(s.k) + row), Operand(smem_address(s.q[stage])));
    issue_logits<kHeadDim, kPlaces, kTileKeys>(y, Operand(smem_address(s.v) + row),
                                               Operand(smem_address(s.dout[stage])));
    const u32 values = smem_address(s.lse[stage]) + lane % 4 * 8;
    float2 two[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + 32 * j);
    wgmma_wait<1>();
    pin(x);
    if (flags & kHidesKeys) {
      const int4 info = s.info[stage];
      int2 bounds[2];
      const int past = info.z - info.y << p.tiles.log2_heads;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int number = info.w * kTileKeys + key + 8 * r;
        const int first = number < p.tiles.num_keys ? number - p.tiles.reach + 1 - info.y : kPlaces;  // that sees it
        bounds[r] = make_int2(min(max(first, 0), kPlaces) << p.tiles.log2_heads, past);
      }
      apply_mask(x, 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < kPlaces / 2; ++i)
      x[i] = exp2_fast(fmaf(x[i], p.scale_log2, i % 2 ? -two[i / 4].y : -two[i / 4].x));
    pack_pairs(probs, x);
    issue_weighted<kHeadDim, kPlaces>(dv, probs, Operand(smem_address(s.dout[stage]), kPlaces * 128));
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + sizeof(Shared::lse) + 32 * j);
    wgmma_wait<1>();  // dP
    pin(y);
#pragma unroll
    for (int i = 0; i < kPlaces / 4; ++i)
      ds[i] = T::pack(x[2 * i] * (y[2 * i] - two[i / 2].x), x[2 * i + 1] * (y[2 * i + 1] - two[i / 2].y));
    auto& dq = choose < kHalf / 2 == kPlaces / 2 > (y, own);  // registers are scarce
    if constexpr (ADD_DQ) {
      if (previous >= 0) wait_ds();
      const Operand before(smem_address(s.ds[buffer.index]));
      buffer.advance();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_transposed_x4(ds_store + buffer.index * (sizeof(Shared::ds) / 2) + i * 16 * 128, ds[4 * i], ds[4 * i + 1],
                            ds[4 * i + 2], ds[4 * i + 3]);
      // Of an item's first step this is computed of whatever lies there, and not used: a product on one side of a
      // branch would serialise all of them.
      issue_dq(dq, before, keys_half());
    }
    issue_weighted<kHeadDim, kPlaces>(dk, ds, Operand(smem_address(s.q[stage]), kPlaces * 128));
    if constexpr (ADD_DQ) {
      fence_async_proxy();
      wgmma_wait<1>();  // dV, dQ
      pin(dq);
      named_arrive(kDsThere + 2 * buffer.index + warpgroup, 128 * kGroups);
      if (previous >= 0) add_dq(dq);
      previous = piece;
    }
    wgmma_wait<0>();
    pin(probs);
    pin(ds);
    pin(dv);
    pin(dk);
  }

  // What one warpgroup has of a sum goes to the other, which has the rest and stores it.
  DEVICE void hand_over(const float (&acc)[kHeadDim / 2]) const {
    float4* to = reinterpret_cast<float4*>(s.handed[warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i)
      to[128 * i] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  }

  DEVICE void take_over(float (&acc)[kHeadDim / 2]) const {
    const float4* from = reinterpret_cast<const float4*>(s.handed[1 - warpgroup]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const float4 other = from[128 * i];
      acc[4 * i] += other.x, acc[4 * i + 1] += other.y, acc[4 * i + 2] += other.z, acc[4 * i + 3] += other.w;
    }
  }

  // Adds what the parts before have summed up; of the last part the sum is whole, else it is left for the next. A place
  // of sums is that of the same list of every kSumHeads-th key head, one after another: what is `done` there grows by
  // p.parts with each.
  DEVICE bool whole(float (&acc)[kHeadDim / 2], int head_kv, const int4& item, int sum) const {
    if (ADD_DQ || p.parts == 1) return true;
    const int part = item.y, pieces = (p.tiles.num_keys + kTileKeys - 1) / kTileKeys, thread = threadIdx.x % 128;
    const bool last = part + 1 == item.z;
    const i64 place = static_cast<i64>(head_kv % kSumHeads * pieces + item.w) * kSums + sum;
    float4* sums = p.part_sums + place * (kHeadDim / 8 * 128) + thread;
    u32* done = p.parts_done + place * 4 + thread / 32;
    const u32 begin = head_kv / kSumHeads * p.parts;
    while (load_acquire_gpu(done) < begin + part) sleep_ns(100);
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const float4 other = __ldcg(sums + 128 * i);
        acc[4 * i] += other.x, acc[4 * i + 1] += other.y, acc[4 * i + 2] += other.z, acc[4 * i + 3] += other.w;
      }
    }
    if (!last) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i)
        __stcg(sums + 128 * i, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
    __syncwarp();
    if (lane == 0) store_release_gpu(done, begin + (last ? p.parts : part + 1));
    return last;
  }

  DEVICE void store(const float (&acc)[kHeadDim / 2], void* to, i64 row_stride, i64 head_stride, float factor,
                    int head_kv, int first_key) const {
    const i64 first = first_key + key;
    const bool valid[2] = {first < p.tiles.num_keys, first + 8 < p.tiles.num_keys};
    store_gradient_as<T, kHeadDim, kStoreHalf>(to, first * row_stride + head_kv * head_stride, 8 * row_stride, valid,
                                               acc, factor, lane);
  }

  DEVICE void run() {
    while (true) {
      float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      bool waited = false;
      int flags;
      int4 item;
      while (true) {
        barrier_wait(smem_address(&s.full[stage]), parity);
        flags = uniform(s.info[stage].x);
        if (flags & kNoMoreSteps) break;
        if (!waited) barrier_wait(smem_address(&s.kv_full), kv_parity);
        waited = true;
        if (flags & kLastStep)
          item = s.info[stage];
        else
          step(dk, dv, flags);
        release(s.empty[stage], lane);
        advance();
        if (flags & kLastStep) break;
      }
      if (flags & kNoMoreSteps) break;
      kv_parity ^= 1;
      if constexpr (ADD_DQ)
        if (previous >= 0) add_last_dq();
      release(s.kv_empty, lane);
      if constexpr (!kShares) {
        named_sync(1, 256);  // what was handed over before has been read
        // Not by reference to one of the two, which would put both on the stack.
        if (warpgroup)
          hand_over(dk);
        else
          hand_over(dv);
        named_sync(1, 256);
        if (warpgroup)
          take_over(dv);
        else
          take_over(dk);
      }
      const int head_kv = flags >> 3, sum = kShares ? 2 * warpgroup : 0;
      if ((kShares || !warpgroup) && whole(dk, head_kv, item, sum))
        store(dk, p.dk, p.dk_row, p.dk_head, p.scale, head_kv, item.w * kTileKeys);
      if ((kShares || warpgroup) && whole(dv, head_kv, item, sum + 1))
        store(dv, p.dv, p.dv_row, p.dv_head, 1.f, head_kv, item.w * kTileKeys);
    }
    if (!ADD_DQ) return;
    named_sync(kPlaceFree + warpgroup, 160);
    if (threadIdx.x % 128 == 0) s.handed_piece[warpgroup] = -1;
    __syncwarp();
    named_arrive(kPlaceFull + warpgroup, 160);
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_sparse_backward_keys(const __grid_constant__ SparseKeysParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.kv_full, s.kv_empty, 4 * kGroups);
    init_buffers(s.full, s.empty, 4 * kGroups / kTurns);
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // together all that the block was launched with
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0)
      produce(p, s);
    else if (ADD_DQ && (warp == 1 || warp == 2))
      add_handed(p, s, warp - 1);
  } else {
    registers_grow<240>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
