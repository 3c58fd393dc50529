// Sparse attention backward for sm_90a, dK and dV by lists of the blocks of queries that see a block of keys: one work
// item is such a block of keys of one key head. Nothing is added in device memory, so results repeat bit by bit.
//
// K and V of the item stay in shared memory, dK and dV in registers. A step is 64 places (sparse_tiles.cuh) of a listed
// block of queries, on transposed logits as in backward.cu. Of blocks of 128 keys each consumer warpgroup owns 64, and
// both take every step. Of blocks of 64 keys they take steps in turn, each with sums of its own, and at the end of the
// item each hands one of its sums to the other through shared memory.
//
// Compile-time: HEAD_DIM, K_BLOCK (64 or 128), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "gradients.cuh"
#include "softmax.cuh"

#define INDEXED 0
constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64;
constexpr int kStages = 4;  // of q and dout: even, so that a warpgroup that takes every second finds its own
constexpr int kTileKeys = K_BLOCK;
constexpr bool kShares = kTileKeys > kStep;    // steps are of both warpgroups
constexpr int kTurns = kShares ? 1 : kGroups;  // warpgroups that take steps in turn
using T = DTYPE;

#include "row_products.cuh"
#include "sparse_tiles.cuh"

struct SparseKeysParams {
  TensorMap q, k, v, dout;
  SparseTiles tiles;  // lists are of blocks of queries, [lists of heads, blocks of keys]; offsets: one array
  // [packs, stats_rows, heads of a tile]: lse times log2 e. A block of queries has stats_block rows, so that it begins
  // at a multiple of 16 bytes.
  const float *lse, *delta;
  void *dk, *dv;
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  i64 stats_rows;
  int stats_block;
  float scale, scale_log2;
};

struct Shared {
  alignas(1024) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kPlaces][kPanel];
  u16 dout[kStages][kHeadDim / kPanel][kPlaces][kPanel];
  float handed[kGroups][kShares ? 4 : kStep * kHeadDim];
  float lse[kStages][kPlaces], delta[kStages][kPlaces];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  int4 info[kStages];  // flags, first query, past-the-last query of the block, number of the keys
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

  DEVICE void step(int flags, int row, int past_row, int piece, int pack, int first_head, i64 stats) {
    const u32 bar = announce(flags, row, past_row, piece);
    const int i = ring.index, head = (pack << p.tiles.log2_heads) + first_head;
    barrier_expect_bytes(bar, 2 * (kBytesQ + kBytesRow));
    load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kPlaces * 128, row, head, bar);
    load_panels<kHeadDim / kPanel>(&p.dout, smem_address(s.dout[i]), kPlaces * 128, row, head, bar);
    load_bytes(smem_address(s.lse[i]), p.lse + stats, kBytesRow, bar);
    load_bytes(smem_address(s.delta[i]), p.delta + stats, kBytesRow, bar);
    ring.advance();
  }

  // Both warpgroups are told.
  DEVICE void say(int flags, int piece) {
    for (int w = 0; w < kTurns; ++w) {
      barrier_arrive(announce(flags, 0, 0, piece));
      ring.advance();
    }
  }
};

DEVICE void produce(const SparseKeysParams& p, Shared& s) {
  const SparseTiles& t = p.tiles;
  Loader loader{p, s};
  const int pieces = (t.num_keys + kTileKeys - 1) / kTileKeys;
  for (int item = blockIdx.x; item < t.num_items;) {
    const int next = gridDim.x + atomicAdd(t.counter, 1);
    const int head_kv = item / pieces, piece = item - head_kv * pieces, first_key = piece * kTileKeys;
    const int list = (t.list_heads > 1 ? head_kv * t.key_blocks : 0) + first_key / t.key_block;
    const i64 first = t.offsets ? __ldg(t.offsets + list) : list * t.list_step;
    const int count = t.offsets ? __ldg(t.offsets + list + 1) - first : __ldg(t.counts + list);
    loader.keys(piece, head_kv);
    int ahead = count > 0 ? __ldg(t.entries + first) : 0;
    for (int n = 0; n < count; ++n) {
      const int first_row = ahead * t.query_block, past_row = min(t.num_rows, first_row + t.query_block);
      const i64 stats_row = ahead * p.stats_block;
      if (n + 1 < count) ahead = __ldg(t.entries + first + n + 1);
      if (past_row - 1 + t.reach <= first_key) continue;
      for (int pack = head_kv * t.packs; pack < (head_kv + 1) * t.packs; ++pack)
        for (int place = 0; first_row + (place >> t.log2_heads) < past_row; place += kPlaces) {
          const int row = first_row + (place >> t.log2_heads);
          const bool hides = past_row - row << t.log2_heads < kPlaces || row + t.reach < first_key + kTileKeys;
          loader.step(hides ? kHidesKeys : 0, row, past_row, piece, pack, place & (1 << t.log2_heads) - 1,
                      (pack * p.stats_rows + stats_row << t.log2_heads) + place);
        }
    }
    loader.say(kLastStep | head_kv << 3, piece);
    item = next;
  }
  loader.say(kNoMoreSteps, 0);
  leave(t.counter);
}

// ---- consumers ----

struct Consumer {
  const SparseKeysParams& p;
  Shared& s;
  const int warpgroup, lane, key;  // key: first of this thread's, of the item
  int stage;
  u32 parity = 0, kv_parity = 0;

  DEVICE Consumer(const SparseKeysParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        key((kShares ? warpgroup * kStep : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        stage(kShares ? 0 : warpgroup) {}

  DEVICE void advance() {
    stage += kTurns;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }

  DEVICE void step(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2], const int4& info) {
    float x[kPlaces / 2], y[kPlaces / 2];
    u32 probs[kPlaces / 4], ds[kPlaces / 4];
    const u32 own = kShares ? warpgroup * kStep * 128 : 0;
    issue_logits<kHeadDim, kPlaces, kTileKeys>(x, Operand(smem_address(s.k) + own), Operand(smem_address(s.q[stage])));
    issue_logits<kHeadDim, kPlaces, kTileKeys>(y, Operand(smem_address(s.v) + own),
                                               Operand(smem_address(s.dout[stage])));
    const u32 values = smem_address(s.lse[stage]) + lane % 4 * 8;
    float2 two[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + 32 * j);
    wgmma_wait<1>();
    pin(x);
    if (uniform(info.x) & kHidesKeys) {
      int2 bounds[2];
      const int past = info.z - info.y << p.tiles.log2_heads;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = info.w * kTileKeys + key + 8 * r - p.tiles.reach + 1 - info.y;  // query that sees the key
        bounds[r] = make_int2(min(max(first, 0), kPlaces) << p.tiles.log2_heads, past);
      }
      apply_mask(x, 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < kPlaces / 2; ++i)
      x[i] = exp2_fast(fmaf(x[i], p.scale_log2, i % 2 ? -two[i / 4].y : -two[i / 4].x));
    pack_pairs(probs, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + sizeof(Shared::lse) + 32 * j);
    wgmma_wait<0>();
    pin(y);
#pragma unroll
    for (int i = 0; i < kPlaces / 4; ++i)
      ds[i] = T::pack(x[2 * i] * (y[2 * i] - two[i / 2].x), x[2 * i + 1] * (y[2 * i + 1] - two[i / 2].y));
    issue_weighted<kHeadDim, kPlaces>(dv, probs, Operand(smem_address(s.dout[stage]), kPlaces * 128));
    issue_weighted<kHeadDim, kPlaces>(dk, ds, Operand(smem_address(s.q[stage]), kPlaces * 128));
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

  DEVICE void store(const float (&acc)[kHeadDim / 2], void* to, i64 row_stride, i64 head_stride, float factor,
                    const int4& info) const {
    const i64 first = static_cast<i64>(info.w) * kTileKeys + key;
    const bool valid[2] = {first < p.tiles.num_keys, first + 8 < p.tiles.num_keys};
    store_gradient_as<T, kHeadDim, kStoreHalf>(to, first * row_stride + (info.x >> 3) * head_stride, 8 * row_stride,
                                               valid, acc, factor, lane);
  }

  DEVICE void run() {
    while (true) {
      float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      int4 info;
      bool waited = false;
      while (true) {
        barrier_wait(smem_address(&s.full[stage]), parity);
        info = s.info[stage];
        info.x = uniform(info.x);
        if (info.x & kNoMoreSteps) return;
        if (!waited) barrier_wait(smem_address(&s.kv_full), kv_parity);
        waited = true;
        if (!(info.x & kLastStep)) step(dk, dv, info);
        release(s.empty[stage], lane);
        advance();
        if (info.x & kLastStep) break;
      }
      kv_parity ^= 1;
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
      if (kShares || !warpgroup) store(dk, p.dk, p.dk_row, p.dk_head, p.scale, info);
      if (kShares || warpgroup) store(dv, p.dv, p.dv_row, p.dv_head, 1.f, info);
    }
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
    registers_shrink<40>();  // together all that the block was launched with
    if (threadIdx.x == 0) produce(p, s);
  } else {
    registers_grow<232>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
