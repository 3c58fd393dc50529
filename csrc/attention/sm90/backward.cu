// Attention backward for sm_90a: one work item is 128 keys of one key head, and some or all query heads of its group.
//
// dK and dV of the item stay in registers over all its queries. A consumer warpgroup owns 64 keys and works on
// transposed logits, so that P and dS are, as they lie in registers, the first operands of dV and dK. dS goes through
// shared memory for dQ = dS K, of which each warpgroup computes half the columns and adds them to fp32 dQ in
// device memory. The tile plan is that of the transposed mask: rows are keys, columns are queries.
//
// Of every query block: S, dP (2 x 64 x 64 x D a warpgroup), dV, dK, dQ. Each elementwise stage has products of the
// same warpgroup to hide under: dS is formed under dV; S and dP of the next block are queued behind dQ, and while they
// run dQ is drained and the exponentials are taken. The softmax scale is left out of dS and multiplies dQ and dK at the
// end. dQ lags a block behind, so that neither warpgroup waits for the other's dS.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), STAGES, ORDERED (0 or 1: sums of dQ in
// the order of the tiles, so that results repeat bit by bit).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kStages = STAGES;  // of q, and of dout
constexpr int kGroups = 2;       // consumer warpgroups
constexpr int kKeys = 64;        // keys of a warpgroup
constexpr int kTileKeys = kGroups * kKeys;
constexpr int kQueries = 64;  // queries of a block
constexpr int kDsBuffers = 3;
constexpr int kDqColumns = kHeadDim / kGroups;
constexpr bool kDqSharesDp = kDqColumns == kQueries;  // they take turns in the same registers
using T = DTYPE;

// Named barriers: two for the turns at the tensor cores, and for dS of each warpgroup two that alternate.
constexpr u32 kMyTurn = 1, kDsThere = 3;

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2 };

struct BackwardParams {
  TensorMap q, k, v, dout;
  TilePlan plan;
  const float* lse;    // [num_heads, stats_row]: times log2 e
  const float* delta;  // [num_heads, stats_row]: -delta
  float* dq;           // sums, [num_heads, stats_row / 16, 2 halves, 16 queries as accumulators lie in registers]
  void *dk, *dv;
  int* counter;      // two words, zero before and after
  const int* turns;  // ORDERED: of each visit of 16 queries, the visits before it
  int* done;         // ORDERED: [num_heads, stats_row / 16, 2 halves], visits that have been added; zero before
  i64 dk_row, dk_head, dv_row, dv_head;                    // strides, elements
  int num_tiles, num_items, group, heads;                  // heads: query heads of an item, a part of the group
  int head_section, heads_inner, stats_row, units, store;  // units: stats_row / 16
  float scale, scale_log2, softcap_factor;
};

// A query block as the producer announces it beside the queries.
struct BlockInfo {
  int column;       // first query
  int unit;         // where its sums begin, in units of 16 queries
  int pass_masked;  // 4 * pass, and a bit for each warpgroup that has to apply the mask
  int turn_last;    // 8 * number of the block among all visits, and 1 for the last block of the item
};

struct Shared {
  alignas(1024) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDimV / kPanel][kTileKeys][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kQueries][kPanel];
  u16 dout[kStages][kHeadDimV / kPanel][kQueries][kPanel];
  u16 ds[kDsBuffers][kTileKeys][kQueries];
  float dq[kGroups * 4][kDqColumns * 16];  // of each warp: 16 queries, as they lie in registers
  float lse[kStages][kQueries], delta[kStages][kQueries];
  u64 kv_full, kv_empty;
  u64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  u64 item_full[2], item_empty[2];
  int4 item[2];
  int4 info[kStages];               // BlockInfo
  int2 bounds[kStages][kTileKeys];  // of a masked block: first and past-the-last query that a key sees
};

constexpr u32 kBytesKV = sizeof(Shared::k) + sizeof(Shared::v);
constexpr u32 kBytesQ = sizeof(Shared::q) / kStages;
constexpr u32 kBytesDout = sizeof(Shared::dout) / kStages;
constexpr u32 kBytesRow = kQueries * sizeof(float);
constexpr u32 kBytesBounds = sizeof(Shared::bounds) / kStages;

// Items of a section of heads, tile by tile; its head is the first of the query heads.
DEVICE int4 decode_item(const BackwardParams& p, int item) {
  if (item >= p.num_items) return make_int4(-1, 0, 0, 0);
  const int per_section = p.num_tiles * p.head_section;
  const int section = item / per_section, rest = item - section * per_section;
  const int tile = rest / p.head_section;
  const int head = section * p.head_section + rest - tile * p.head_section;
  return pack_item(__ldg(p.plan.tiles + tile), head * p.heads);
}

// ---- producer: one thread ----

DEVICE void produce(const BackwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  prefetch_map(&p.dout);
  Ring<kStages> ring;
  Ring<2> slot;
  u32 kv_parity = 1;
  int4 item = decode_item(p, blockIdx.x), next_item;
  for (;; item = next_item) {
    barrier_wait(smem_address(&s.item_empty[slot.index]), slot.parity ^ 1);
    s.item[slot.index] = item;
    barrier_arrive(smem_address(&s.item_full[slot.index]));
    slot.advance();
    if (item.x < 0) break;
    auto fetch_next = [&] { next_item = decode_item(p, gridDim.x + atomicAdd(p.counter, 1)); };
    if (item.z >= item.w) {
      fetch_next();
      continue;
    }
    const int first_head = item_head(item), head_kv = first_head / p.group;
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    const u32 kv = smem_address(&s.kv_full);
    barrier_expect_bytes(kv, kBytesKV);
    load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k), kTileKeys * 128, item.x, head_kv, kv);
    load_panels<kHeadDimV / kPanel>(&p.v, smem_address(s.v), kTileKeys * 128, item.x, head_kv, kv);
    int pass = item.z, n = 0, h = 0;
    bool first = true, last = false;
    while (!last) {
      const int4 range = __ldg(p.plan.passes + 2 * pass), more = __ldg(p.plan.passes + 2 * pass + 1);
      const int row = range.x + n * static_cast<int>(p.plan.step), head = first_head + h;
      const int masked = (n < range.z || n >= range.w ? 1 : 0) | (n < more.x || n >= more.y ? 2 : 0);
      int4 info = make_int4(row, head * p.units + row / 16, 4 * pass + masked, 8 * (more.z + n));
      if (!p.heads_inner || ++h == p.heads) {
        if (p.heads_inner) h = 0;
        if (++n == range.y) {
          n = 0;
          if (++pass == item.w) {
            pass = item.z;
            last = p.heads_inner || ++h == p.heads;
          }
        }
      }
      info.w += last;
      const int i = ring.index;
      u32 bar = smem_address(&s.q_full[i]);
      barrier_wait(smem_address(&s.q_empty[i]), ring.parity ^ 1);
      s.info[i] = info;
      barrier_expect_bytes(bar, kBytesQ + kBytesRow + (masked ? kBytesBounds : 0));
      if (masked)
        load_bytes(smem_address(s.bounds[i]), p.plan.bounds + static_cast<i64>(info.z / 4) * kTileKeys, kBytesBounds,
                   bar);
      load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kQueries * 128, row, head, bar);
      const i64 at = static_cast<i64>(head) * p.stats_row + row;
      load_bytes(smem_address(s.lse[i]), p.lse + at, kBytesRow, bar);
      bar = smem_address(&s.dout_full[i]);
      barrier_wait(smem_address(&s.dout_empty[i]), ring.parity ^ 1);
      barrier_expect_bytes(bar, kBytesDout + kBytesRow);
      load_panels<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[i]), kQueries * 128, row, head, bar);
      load_bytes(smem_address(s.delta[i]), p.delta + at, kBytesRow, bar);
      ring.advance();
      if (first) fetch_next();  // early, for it takes long
      first = false;
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

// A warp adds its accumulators to device memory through its piece of shared memory, by the copy engine: first they are
// staged, and later, when the stores have long landed, handed over.
DEVICE void stage_dq(u32 staging, const float (&acc)[kDqColumns / 2], int lane) {
  if (lane == 0) bulk_wait_read();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDqColumns / 8; ++i)
    store_shared_v4(staging + i * 512 + lane * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
}

DEVICE void add_dq(const BackwardParams& p, int piece, u32 staging, int lane, int turn) {
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    if (ORDERED) wait_turn(p.done + piece, turn);
    add_floats(p.dq + static_cast<i64>(piece) * (kDqColumns * 16), staging, kDqColumns * 64);
  }
}

// ORDERED: when the sums have arrived, the next tile may add its own.
DEVICE void announce_dq(const BackwardParams& p, int piece, int lane, int turn) {
  if (!ORDERED || lane != 0) return;
  bulk_wait();
  next_turn(p.done + piece, turn);
}

template <int kColumns>
DEVICE void store_key_gradient(const BackwardParams& p, void* to, i64 offset, i64 row_stride, bool (&valid)[2],
                               const float (&acc)[kColumns / 2], float factor, int lane) {
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
        const float x = acc[4 * (4 * g + j) + 2 * r] * factor, y = acc[4 * (4 * g + j) + 2 * r + 1] * factor;
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

// Registers that the sums of dQ share with those of dP, where they are of one size.
template <bool kFirst, typename A, typename B>
DEVICE auto& choose(A& a, B& b) {
  if constexpr (kFirst)
    return a;
  else
    return b;
}

// Derivative of the softcap.
struct Slope {
  float of[SOFTCAP ? 32 : 1];
};

struct Consumer {
  const BackwardParams& p;
  Shared& s;
  const int warpgroup, lane, row;  // row: first of this thread's keys in the tile
  Ring<kStages> ring;
  Ring<kDsBuffers> buffer;  // of dS, to be written next
  u32 parity = 0;           // of the dS written last
  int last_turn = 0;
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

  DEVICE int warp() const { return uniform(threadIdx.x % 128 / 32); }
  DEVICE u32 staging() const { return smem_address(s.dq[warpgroup * 4 + warp()]); }

  DEVICE void release(u64& barrier) {
    __syncwarp();  // what the other threads read, they have read
    if (lane == 0) barrier_arrive(smem_address(&barrier));
  }

  // One value each query, those of this thread.
  DEVICE void load_values(float2 (&x)[8], u32 values) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load_shared_v2(values + 32 * j + lane % 4 * 8);
  }

  DEVICE BlockInfo block_info() const {
    const int4 x = s.info[ring.index];
    return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
  }

  DEVICE void issue_s(float (&x)[32], bool real) {
    const Operand k_own(smem_address(s.k) + warpgroup * kKeys * 128);
    const Operand q(smem_address(real ? &s.q[ring.index][0][0][0] : &s.k[0][0][0]));
    issue_transposed_logits<kHeadDim>(x, k_own, q);
  }

  DEVICE void issue_dp(float (&y)[32], bool real) {
    const Operand v_own(smem_address(s.v) + warpgroup * kKeys * 128);
    const Operand dout(smem_address(real ? &s.dout[ring.index][0][0][0] : &s.v[0][0][0]));
    issue_transposed_logits<kHeadDimV>(y, v_own, dout);
  }

  DEVICE void form_probs(float (&logits)[32], u32 (&probs)[16], Slope& slope, const float2 (&lse)[8],
                         const BlockInfo& info) {
    if (SOFTCAP) {
      apply_softcap(logits, p.softcap_factor);
#pragma unroll
      for (int i = 0; i < (SOFTCAP ? 32 : 0); ++i) slope.of[i] = 1.f - logits[i] * logits[i];
    }
    if (info.pass_masked & (1 << warpgroup)) {
      const int2* of_key = s.bounds[ring.index] + row;
      const int2 bounds[2] = {of_key[0], of_key[8]};
      apply_mask(logits, info.column + 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 two = lse[i / 4];
      logits[i] = exp2_fast(fmaf(logits[i], p.scale_log2, i % 2 ? -two.y : -two.x));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) probs[i] = T::pack(logits[2 * i], logits[2 * i + 1]);
  }

  DEVICE void form_ds(const float (&probs)[32], const float (&dp)[32], const Slope& slope, u32 (&ds)[16]) {
    float2 delta[8];
    load_values(delta, smem_address(s.delta[ring.index]));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 two = delta[i / 2];
      float x = probs[2 * i] * (dp[2 * i] + two.x), y = probs[2 * i + 1] * (dp[2 * i + 1] + two.y);
      if (SOFTCAP) x *= slope.of[SOFTCAP ? 2 * i : 0], y *= slope.of[SOFTCAP ? 2 * i + 1 : 0];
      ds[i] = T::pack(x, y);
    }
  }

  DEVICE void store_ds(const u32 (&ds)[16]) {
    const u32 base = ds_store + buffer.index * (sizeof(Shared::ds) / kDsBuffers);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * i + lane / 16;
      store_matrices_x4(base + ((chunk ^ (lane % 8)) << 4), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
    fence_async_proxy();
  }

  // One query block. Finds P in x and in `probs`, and dP in y, with no product under way, and leaves those of the next
  // block there. dQ is a block behind: that of the piece `previous` is added. Returns whether there is a next block.
  DEVICE bool step(BlockInfo& info, float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2], float (&x)[32],
                   float (&y)[32], u32 (&probs)[16], Slope& slope, int& previous) {
    const int now = ring.index;
    u32 ds[16];
    float own[kDqSharesDp ? 1 : kDqColumns / 2];
    auto& dq = choose<kDqSharesDp>(y, own);
    issue_key_gradient<kHeadDimV>(dv, probs, Operand(smem_address(s.dout[now]), kQueries * 128));
    form_ds(x, y, slope, ds);
    store_ds(ds);
    const int to_add = previous, turn = last_turn;
    previous = 2 * (info.unit + warp()) + warpgroup;
    if (ORDERED) last_turn = __ldg(p.turns + info.turn_last / 2 + warp());
    const bool more = !(info.turn_last & 1);
    ring.advance();
    if (more) barrier_wait(smem_address(&s.q_full[ring.index]), ring.parity);
    wgmma_wait<0>();  // dV
    pin(probs);
    pin(dv);
    release(s.dout_empty[now]);
    issue_key_gradient<kHeadDim>(dk, ds, Operand(smem_address(s.q[now]), kQueries * 128));
    if (to_add >= 0) named_sync(kDsThere + 2 * parity + 1 - warpgroup, 128 * kGroups);
    // The warpgroups take turns at the products that have both operands in shared memory, dQ, S and dP: one at a time
    // reads all that shared memory gives, while the other is at its exponentials, dS, dV and dK.
    named_sync(kMyTurn + warpgroup, 128 * kGroups);
    issue_dq(dq, Operand(smem_address(s.ds[buffer.before()])), k_half);
    wgmma_wait<1>();  // dK
    pin(ds);
    pin(dk);
    release(s.q_empty[now]);
    // After the last block, S and dP are computed of what lies in k and v, for nobody: where products are on one side
    // of a branch, the assembler would serialise all of them.
    issue_s(x, more);
    if (more) info = block_info();
    float2 lse[8];
    load_values(lse, smem_address(s.lse[ring.index]));
    wgmma_wait<1>();  // dQ
    pin(dq);
    parity ^= 1;
    buffer.advance();
    named_arrive(kDsThere + 2 * parity + warpgroup, 128 * kGroups);
    if (to_add >= 0) stage_dq(staging(), dq, lane);
    if (more) barrier_wait(smem_address(&s.dout_full[ring.index]), ring.parity);
    issue_dp(y, more);
    named_arrive(kMyTurn + 1 - warpgroup, 128 * kGroups);
    if (to_add >= 0) add_dq(p, to_add, staging(), lane, turn);
    wgmma_wait<1>();  // S
    pin(x);
    if (more) form_probs(x, probs, slope, lse, info);
    if (to_add >= 0) announce_dq(p, to_add, lane, turn);
    wgmma_wait<0>();  // dP
    pin(y);
    return more;
  }

  // All query blocks of one work item.
  DEVICE void accumulate(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2]) {
    float x[32], y[32], own[kDqSharesDp ? 1 : kDqColumns / 2];
    auto& dq = choose<kDqSharesDp>(y, own);
    u32 probs[16];
    Slope slope;
    int previous = -1;
    barrier_wait(smem_address(&s.kv_full), kv_parity);
    kv_parity ^= 1;
    barrier_wait(smem_address(&s.q_full[ring.index]), ring.parity);
    issue_s(x, true);
    barrier_wait(smem_address(&s.dout_full[ring.index]), ring.parity);
    issue_dp(y, true);
    float2 lse[8];
    BlockInfo info = block_info();
    load_values(lse, smem_address(s.lse[ring.index]));
    wgmma_wait<1>();
    pin(x);
    form_probs(x, probs, slope, lse, info);
    wgmma_wait<0>();
    pin(y);
    // No product is under way where the loop closes: the assembler would serialise all of them.
    while (step(info, dk, dv, x, y, probs, slope, previous)) {
    }
    named_sync(kDsThere + 2 * parity + 1 - warpgroup, 128 * kGroups);
    issue_dq(dq, Operand(smem_address(s.ds[buffer.before()])), k_half);
    wgmma_wait<0>();
    pin(dq);
    release(s.kv_empty);
    stage_dq(staging(), dq, lane);
    add_dq(p, previous, staging(), lane, last_turn);
    announce_dq(p, previous, lane, last_turn);
  }

  DEVICE void run() {
    if (warpgroup == 1) named_arrive(kMyTurn, 128 * kGroups);
    Ring<2> slot;
    while (true) {
      barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
      // The item stays there until its gradients are written: registers are scarce meanwhile.
      const bool some = s.item[slot.index].z < s.item[slot.index].w;
      if (s.item[slot.index].x < 0) break;
      float dk[kHeadDim / 2], dv[kHeadDimV / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.f;
      if (some) accumulate(dk, dv);
      const int4 item = s.item[slot.index];
      release(s.item_empty[slot.index]);
      slot.advance();
      if (!some && p.store == kAddFloat) continue;
      const i64 key = item.x + row;
      bool valid[2] = {row < item_rows(item), row + 8 < item_rows(item)};
      const int head_kv = item_head(item) / p.group;
      store_key_gradient<kHeadDim>(p, p.dk, key * p.dk_row + head_kv * p.dk_head, p.dk_row, valid, dk, p.scale, lane);
      store_key_gradient<kHeadDimV>(p, p.dv, key * p.dv_row + head_kv * p.dv_head, p.dv_row, valid, dv, 1.f, lane);
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
      barrier_init(smem_address(&s.dout_full[i]), 1);
      barrier_init(smem_address(&s.dout_empty[i]), 4 * kGroups);
      barrier_init(smem_address(&s.q_full[i]), 1);
      barrier_init(smem_address(&s.q_empty[i]), 4 * kGroups);
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
