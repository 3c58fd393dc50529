// Attention backward for sm_90a: one work item is 128 keys of one key head, and some or all query heads of its group.
//
// dK and dV of the item stay in registers over all its queries. A consumer warpgroup owns 64 keys and works on
// transposed logits, so that P and dS are, as they lie in registers, the first operands of dV and dK. dS goes through
// shared memory for dQ = dS K, of which each warpgroup computes half the columns and adds them to fp32 dQ in
// device memory. The tile plan is that of the transposed mask: rows are keys, columns are queries.
//
// Of every query block: S, dP (2 x 64 x 64 x D a warpgroup), dV, dK, dQ. Each elementwise stage has a product of the
// same warpgroup to hide under: dQ is drained under S, the exponentials run under dP, dS is formed under dV.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), STAGES, ORDERED (0 or 1: sums of dQ in
// the order of the tiles, so that results repeat bit by bit).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kStages = STAGES;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kKeys = 64;   // keys of a warpgroup
constexpr int kTileKeys = kGroups * kKeys;
constexpr int kQueries = 64;  // queries of a block
constexpr int kPanel = 64;    // columns of a swizzled panel
constexpr int kDqColumns = kHeadDim / kGroups;
constexpr bool kDqSharesDp = kDqColumns == kQueries;  // they take turns in the same registers
using T = DTYPE;

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2 };

struct BackwardParams {
  TensorMap q, k, v, dout;
  TilePlan plan;
  const float* lse;    // [num_heads, stats_row]: times log2 e
  const float* delta;  // [num_heads, stats_row]: times softmax scale
  float* dq;           // sums, [num_heads, blocks of 64 queries, 2 halves, 4 warps, as accumulators lie in registers]
  void *dk, *dv;
  int* counter;      // two words, zero before and after
  const int* turns;  // ORDERED: of each visit of a query block, the visits before it
  int* done;         // ORDERED: [num_heads, blocks, 8 warps], visits that have been added; zero before
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  int num_tiles, num_rows, num_keys, num_heads_kv, group, splits, stats_row, store;
  float scale, scale_log2, softcap_factor;
};

struct Shared {
  alignas(1024) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDimV / kPanel][kTileKeys][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kQueries][kPanel];
  u16 dout[kStages][kHeadDimV / kPanel][kQueries][kPanel];
  u16 ds[2][kTileKeys][kQueries];
  float dq[kGroups * 4][kDqColumns * 16];  // of each warp: 16 queries, as they lie in registers
  float lse[kStages][kQueries], delta[kStages][kQueries];
  u64 kv_full, kv_empty;
  u64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  u64 item_full[2], item_empty[2];
  int4 item[2];  // first key (-1: no more), first query head, first pass, past-the-last pass
};

constexpr u32 kBytesKV = sizeof(Shared::k) + sizeof(Shared::v);
constexpr u32 kBytesQ = sizeof(Shared::q) / kStages;
constexpr u32 kBytesDout = sizeof(Shared::dout) / kStages;
constexpr u32 kBytesRow = kQueries * sizeof(float);

DEVICE int4 decode_item(const BackwardParams& p, int item) {
  const int per_tile = p.num_heads_kv * p.splits;
  if (item >= p.num_tiles * per_tile) return make_int4(-1, 0, 0, 0);
  const int tile = item / per_tile, part = item - tile * per_tile;
  const int4 t = __ldg(p.plan.tiles + tile);
  return make_int4(t.x, part * (p.group / p.splits), t.y, t.z);
}

// ---- producer: one thread ----

template <int kPanels>
DEVICE void load_panels(const TensorMap* map, u32 smem, u32 panel_bytes, int row, int head, u32 bar) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i) load_box(smem + i * panel_bytes, map, i * kPanel, head, row, bar);
}

DEVICE void produce(const BackwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  prefetch_map(&p.dout);
  Ring<kStages> ring;
  Ring<2> slot;
  u32 kv_parity = 1;
  int next = blockIdx.x;
  while (true) {
    const int4 item = decode_item(p, next);
    barrier_wait(smem_address(&s.item_empty[slot.index]), slot.parity ^ 1);
    s.item[slot.index] = item;
    barrier_arrive(smem_address(&s.item_full[slot.index]));
    slot.advance();
    if (item.x < 0) break;
    next = gridDim.x + atomicAdd(p.counter, 1);
    if (item.z >= item.w) continue;
    const int head_kv = item.y / p.group;
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    const u32 kv = smem_address(&s.kv_full);
    barrier_expect_bytes(kv, kBytesKV);
    load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k), kTileKeys * 128, item.x, head_kv, kv);
    load_panels<kHeadDimV / kPanel>(&p.v, smem_address(s.v), kTileKeys * 128, item.x, head_kv, kv);
    for (int h = 0; h < p.group / p.splits; ++h) {
      const int head = item.y + h;
      for (int pass = item.z; pass < item.w; ++pass) {
        const int4 range = __ldg(p.plan.passes + 2 * pass);
        for (int n = range.x; n < range.y; ++n) {
          const int i = ring.index, row = n * kQueries;
          u32 bar = smem_address(&s.q_full[i]);
          barrier_wait(smem_address(&s.q_empty[i]), ring.parity ^ 1);
          barrier_expect_bytes(bar, kBytesQ + kBytesRow);
          load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kQueries * 128, row, head, bar);
          const i64 at = static_cast<i64>(head) * p.stats_row + row;
          load_bytes(smem_address(s.lse[i]), p.lse + at, kBytesRow, bar);
          bar = smem_address(&s.dout_full[i]);
          barrier_wait(smem_address(&s.dout_empty[i]), ring.parity ^ 1);
          barrier_expect_bytes(bar, kBytesDout + kBytesRow);
          load_panels<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[i]), kQueries * 128, row, head, bar);
          load_bytes(smem_address(s.delta[i]), p.delta + at, kBytesRow, bar);
          ring.advance();
        }
      }
    }
  }
  leave(p.counter);
}

// ---- consumers ----

// acc[64 keys, 64 queries] = a[64 keys, kColumns] * b[64 queries, kColumns]^T
template <int kColumns>
DEVICE void issue_transposed_logits(float (&acc)[kQueries / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i)
    Wgmma<T, kQueries>::template ss<0, 0>(acc, a.at((i / 4) * kTileKeys * 128 + (i % 4) * 32),
                                          b.at((i / 4) * kQueries * 128 + (i % 4) * 32), i > 0);
  wgmma_commit();
}

// acc[64 keys, kColumns] += a[64 keys, 64 queries] * b[64 queries, kColumns]
template <int kColumns>
DEVICE void issue_key_gradient(float (&acc)[kColumns / 2], const u32 (&a)[kQueries / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i) Wgmma<T, kColumns>::template rs<1>(acc, a + 4 * i, b.at(i * 16 * 128), 1);
  wgmma_commit();
}

// acc[64 queries, kDqColumns] = ds[128 keys, 64 queries]^T * keys[128 keys, kDqColumns]
DEVICE void issue_dq(float (&acc)[kDqColumns / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    Wgmma<T, kDqColumns>::template ss<1, 1>(acc, a.at(i * 16 * 128), b.at(i * 16 * 128), i > 0);
  wgmma_commit();
}

// Work items are started in their order, and wait only for earlier ones, so all of them get their turn.
DEVICE void wait_turn(int* done, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(done) : "memory");
  } while (now != turn);
  fence_async_global();
}

DEVICE void next_turn(int* done, int turn) {
  fence_async_global();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(done), "r"(turn + 1) : "memory");
}

// A warp adds its accumulators to `to` through its piece of shared memory, by the copy engine.
DEVICE void add_dq(float* to, u32 staging, const float (&acc)[kDqColumns / 2], int lane, int* done, int turn) {
  if (lane == 0) bulk_wait_read();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDqColumns / 8; ++i)
    store_shared_v4(staging + i * 512 + lane * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    if (ORDERED) wait_turn(done, turn);
    add_floats(to, staging, kDqColumns * 64);
    if (ORDERED) {
      bulk_wait();
      next_turn(done, turn);
    }
  }
}

template <int kColumns>
DEVICE void store_key_gradient(const BackwardParams& p, void* to, i64 offset, i64 row_stride, bool (&valid)[2],
                               const float (&acc)[kColumns / 2], int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 at = offset + 8 * r * row_stride;
    float* out32 = static_cast<float*>(to) + at + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(to) + at + 8 * (lane % 4);
#pragma unroll
    for (int g = 0; g < kColumns / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = acc[4 * (4 * g + j) + 2 * r], y = acc[4 * (4 * g + j) + 2 * r + 1];
        float* at32 = out32 + 32 * g + 8 * j;
        if (p.store == kStoreHalf)
          word[j] = T::pack(x, y);
        else if (valid[r] && p.store == kAddFloat)
          add_global_v2(at32, x, y);
        else if (valid[r])
          *reinterpret_cast<float2*>(at32) = make_float2(x, y);
      }
      if (p.store == kStoreHalf) {
        transpose_quad(word, lane);
        if (valid[r]) *reinterpret_cast<uint4*>(out16 + 32 * g) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

template <bool kFirst, typename A, typename B>
DEVICE auto& choose(A& a, B& b) {
  if constexpr (kFirst)
    return a;
  else
    return b;
}

struct Consumer {
  const BackwardParams& p;
  Shared& s;
  const int warpgroup, lane, row;  // row: first of this thread's keys in the tile
  Ring<kStages> ring;
  int buffer = 0;  // of dS
  u32 kv_parity = 0;
  const Operand k_half;
  u32 ds_store;

  DEVICE Consumer(const BackwardParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row(warpgroup * kKeys + (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4),
        k_half(
            smem_address(s.k) + warpgroup * kDqColumns / kPanel * kTileKeys * 128 + warpgroup * kDqColumns % kPanel * 2,
            kTileKeys * 128) {
    // stmatrix: lane L gives the address of row L % 8 of matrix L / 8; matrices 1 and 3 are 8 keys below.
    const int key = row - lane / 4 + (lane / 8 % 2) * 8 + lane % 8;
    ds_store = smem_address(s.ds) + key * 128;
  }

  DEVICE void release(u64& barrier) {
    if (lane == 0) barrier_arrive(smem_address(&barrier));
  }

  DEVICE void form_probs(float (&logits)[32], u32 (&probs)[16], float (&slope)[SOFTCAP ? 32 : 1],
                         const BlockWalk<false>& walk) {
    if (SOFTCAP) {
      apply_softcap(logits, p.softcap_factor);
#pragma unroll
      for (int i = 0; i < (SOFTCAP ? 32 : 1); ++i) slope[i] = 1.f - logits[i] * logits[i];
    }
    if (walk.masked()) {
      int2 bounds[2];
      walk.load_bounds(bounds);
      apply_mask(logits, walk.n * kQueries + 2 * (lane % 4), bounds);
    }
    const float2* lse = reinterpret_cast<const float2*>(s.lse[ring.index]) + lane % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = lse[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        logits[4 * j + 2 * r] = exp2_fast(fmaf(logits[4 * j + 2 * r], p.scale_log2, -two.x));
        logits[4 * j + 2 * r + 1] = exp2_fast(fmaf(logits[4 * j + 2 * r + 1], p.scale_log2, -two.y));
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) probs[i] = T::pack(logits[2 * i], logits[2 * i + 1]);
  }

  DEVICE void form_ds(const float (&probs)[32], const float (&dp)[32], const float (&slope)[SOFTCAP ? 32 : 1],
                      u32 (&ds)[16]) {
    const float2* delta = reinterpret_cast<const float2*>(s.delta[ring.index]) + lane % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = delta[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        float x = probs[i] * fmaf(dp[i], p.scale, -two.x), y = probs[i + 1] * fmaf(dp[i + 1], p.scale, -two.y);
        if (SOFTCAP) x *= slope[SOFTCAP ? i : 0], y *= slope[SOFTCAP ? i + 1 : 0];
        ds[2 * j + r] = T::pack(x, y);
      }
    }
  }

  DEVICE void store_ds(const u32 (&ds)[16]) {
    const u32 base = ds_store + buffer * sizeof(Shared::ds) / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * i + lane / 16;
      store_matrices_x4(base + ((chunk ^ (lane % 8)) << 4), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
    fence_async_proxy();
  }

  // All query blocks of one work item.
  DEVICE void accumulate(int4 item, float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2]) {
    float x[32], y[32], own[kDqSharesDp ? 1 : kDqColumns / 2];
    auto& dq_acc = choose<kDqSharesDp>(y, own);
    u32 probs[16], ds[16];
    float slope[SOFTCAP ? 32 : 1];
    int head = item.y;
    const int end_head = item.y + p.group / p.splits;
    BlockWalk<false> walk(p.plan, warpgroup, row);
    walk.start(item.z, item.w);
    const int blocks = p.stats_row / kQueries;
    const int warp = uniform(threadIdx.x % 128 / 32);
    float* const dq = p.dq + (warpgroup * 4 + warp) * (kDqColumns * 16);
    const u32 staging = smem_address(s.dq[warpgroup * 4 + warp]);
    const Operand k_own(smem_address(s.k) + warpgroup * kKeys * 128);
    const Operand v_own(smem_address(s.v) + warpgroup * kKeys * 128);
    barrier_wait(smem_address(&s.kv_full), kv_parity);
    kv_parity ^= 1;
    barrier_wait(smem_address(&s.q_full[ring.index]), ring.parity);
    issue_transposed_logits<kHeadDim>(x, k_own, Operand(smem_address(s.q[ring.index])));
    barrier_wait(smem_address(&s.dout_full[ring.index]), ring.parity);
    issue_transposed_logits<kHeadDimV>(y, v_own, Operand(smem_address(s.dout[ring.index])));
    wgmma_wait<1>();
    pin(x);
    form_probs(x, probs, slope, walk);
    wgmma_wait<0>();
    pin(y);
    // The loop opens with P and dP of its block in registers and no product under way: the assembler would serialise
    // all products if one crossed the place where the loop closes.
    bool more = true;
    while (more) {
      const int now = ring.index;
      const Operand dout_turned(smem_address(s.dout[now]), kQueries * 128);
      const Operand q_turned(smem_address(s.q[now]), kQueries * 128);
      const Operand ds_block(smem_address(s.ds) + buffer * sizeof(Shared::ds) / 2);
      issue_key_gradient<kHeadDimV>(dv, probs, dout_turned);
      form_ds(x, y, slope, ds);
      store_ds(ds);
      issue_key_gradient<kHeadDim>(dk, ds, q_turned);
      wgmma_wait<1>();  // dV
      pin(probs);
      pin(dv);
      release(s.dout_empty[now]);
      float* const dq_block = dq + (static_cast<i64>(head) * blocks + walk.n) * (kQueries * kHeadDim);
      int* const done =
          ORDERED ? p.done + (static_cast<i64>(head) * blocks + walk.n) * 8 + warpgroup * 4 + warp : nullptr;
      const int turn = ORDERED ? walk.turn(p.turns) : 0;
      more = walk.advance();
      if (!more && ++head < end_head) {
        walk.start(item.z, item.w);
        more = true;
      }
      buffer ^= 1;
      ring.advance();
      named_sync(1, 128 * kGroups);  // dS of both warpgroups is there
      issue_dq(dq_acc, ds_block, k_half);
      wgmma_wait<1>();  // dK
      pin(dk);
      pin(ds);
      release(s.q_empty[now]);
      // After the last block, S and dP are computed of what lies in k and v, for nobody: around a branch, too, the
      // assembler would serialise.
      const Operand next_q(smem_address(more ? &s.q[ring.index][0][0][0] : &s.k[0][0][0]));
      const Operand next_dout(smem_address(more ? &s.dout[ring.index][0][0][0] : &s.v[0][0][0]));
      if (more) barrier_wait(smem_address(&s.q_full[ring.index]), ring.parity);
      issue_transposed_logits<kHeadDim>(x, k_own, next_q);
      wgmma_wait<1>();  // dQ
      pin(dq_acc);
      add_dq(dq_block, staging, dq_acc, lane, done, turn);
      if (more) barrier_wait(smem_address(&s.dout_full[ring.index]), ring.parity);
      issue_transposed_logits<kHeadDimV>(y, v_own, next_dout);
      wgmma_wait<1>();  // S
      pin(x);
      if (more) form_probs(x, probs, slope, walk);
      wgmma_wait<0>();  // dP
      pin(y);
    }
    release(s.kv_empty);
  }

  DEVICE void run() {
    Ring<2> slot;
    while (true) {
      barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
      const int4 item = s.item[slot.index];
      __syncwarp();
      release(s.item_empty[slot.index]);
      slot.advance();
      if (item.x < 0) break;
      float dk[kHeadDim / 2], dv[kHeadDimV / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.f;
      if (item.z < item.w)
        accumulate(item, dk, dv);
      else if (p.store == kAddFloat)
        continue;
      const i64 key = item.x + row;
      bool valid[2] = {key < p.num_keys, key + 8 < p.num_keys};
      const int head_kv = item.y / p.group;
      store_key_gradient<kHeadDim>(p, p.dk, key * p.dk_row + head_kv * p.dk_head, p.dk_row, valid, dk, lane);
      store_key_gradient<kHeadDimV>(p, p.dv, key * p.dv_row + head_kv * p.dv_head, p.dv_row, valid, dv, lane);
    }
    if (lane == 0) bulk_wait();
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&s.kv_full), 1);
    barrier_init(smem_address(&s.kv_empty), 4 * kGroups);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&s.q_full[i]), 1);
      barrier_init(smem_address(&s.dout_full[i]), 1);
      barrier_init(smem_address(&s.q_empty[i]), 4 * kGroups);
      barrier_init(smem_address(&s.dout_empty[i]), 4 * kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&s.item_full[i]), 1);
      barrier_init(smem_address(&s.item_empty[i]), 4 * kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // 24 * 128 + 240 * 256 is all that the block was launched with
    if (threadIdx.x == 0) produce(p, s);
  } else {
    registers_grow<240>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
