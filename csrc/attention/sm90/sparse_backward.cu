// Sparse attention backward for sm_90a, for lists of single keys. A work item is a tile of 128 accumulator rows
// (sparse_tiles.cuh), which iterates over the keys of its list in steps of 64. dQ of the tile is accumulated in
// registers.
//
// A consumer warpgroup owns 64 accumulator rows: S, dP, and dQ += dS K with dS from registers. P and dS of all 128
// accumulator rows also go through shared memory to a third warpgroup, which computes dV = P^T dO and dK = dS^T Q of
// the step's keys, 64 columns at a time, and adds them to fp32 sums in device memory, or with STORED stores them in 16
// bits for sparse_sums.cu, which adds them key by key. That takes longest, so there are two buffers of P and dS.
//
// Compile-time: HEAD_DIM, STORED (0 or 1), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "row_products.cuh"
#include "softmax.cuh"
#include "sparse_backward_tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64, kStages = 2;
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 2);
using T = DTYPE;
using Gather = KeyGather<kHeadDim, kStep>;

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 168, kThirdRegisters = 120;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters + kThirdRegisters == 128 * (kGroups + 2));

struct Shared : TileBuffers<kHeadDim, kGroups, kStep, kStages> {
  alignas(kSwizzleAtomBytes) u16 probs[2][kGroups][kWarpgroupRows][kStep];
  u16 ds[2][kGroups][kWarpgroupRows][kStep];
  alignas(16) int index[kStages][kStep];  // indices of keys in the order of the list, -1 for none
  int key[2][kStep];                      // of rows of P and dS, likewise
  int2 part[2];                           // of P and dS: flags of the step; key head, or with STORED the list
  u64 part_full[2], part_empty[2];
};

constexpr u32 kBytesRows = sizeof(Shared::q) / kGroups;

// ---- producers ----

struct Loader {
  const SparseBackwardParams& p;
  Shared& s;
  const int warp, lane;
  PipelineState<kStages> stage;
  u32 rows_parity = 1;

  DEVICE void queries(const Tile& tile) {
    if (warp == 0 && lane == 0) load_queries(p, s, tile, rows_parity);
    rows_parity ^= 1;
  }

  DEVICE void step(const Tile& tile, int flags, int index) {
    const bool seen = static_cast<u32>(index) < static_cast<u32>(p.tiles.num_keys);
    const u32 bits = __ballot_sync(0xffffffffu, seen);
    const u32 bar = smem_address(&s.full[stage.index]);
    barrier_wait(smem_address(&s.empty[stage.index]), stage.parity ^ 1);
    Gather::share_indices(s.index[stage.index], warp, lane, seen ? index : -1);
    if (lane == 0) {
      if (warp == 0) describe(s.info[stage.index], tile, flags);
      s.info[stage.index].keys[warp] = static_cast<int>(bits);
      barrier_arrive(bar);
    }
    const u32 offset = Gather::offset(warp, lane);
    const int column = lane % Gather::kChunks * 8, (&indices)[kStep] = s.index[stage.index];
    Gather::copy_rows(smem_address(s.k[stage.index]) + offset, p.keys + tile.head_kv * p.k_head + column, p.k_row,
                      indices, warp, lane);
    Gather::copy_rows(smem_address(s.v[stage.index]) + offset, p.values + tile.head_kv * p.v_head + column, p.v_row,
                      indices, warp, lane);
    copies_arrive(bar);
    stage.advance();
  }

  DEVICE void end() {
    const u32 bar = smem_address(&s.full[stage.index]);
    if (lane == 0) {
      barrier_wait(smem_address(&s.empty[stage.index]), stage.parity ^ 1);
      if (warp == 0) s.info[stage.index].flags = kNoMoreSteps;
      barrier_arrive(bar);
    }
    __syncwarp();
    copies_arrive(bar);
  }
};

// ---- consumers ----

struct Consumer {
  const SparseBackwardParams& p;
  Shared& s;
  const int warpgroup, lane;
  BackwardThreadRows own_rows;
  PipelineState<kStages> stage;
  PipelineState<2> buffer;  // of P and dS
  u32 rows_parity = 0;
  int flags = 0;
  u32 store_at;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), lane(threadIdx.x % 32), own_rows(p.tiles, warpgroup) {
    store_at = (threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + lane % 16) * kPanelRowBytes +
               ((lane / 16 ^ lane % 8) << 4);
    opaque(store_at);
  }

  DEVICE void wait_keys() const {
    barrier_wait(smem_address(&s.full[stage.index]), stage.parity);
    fence_async_proxy();
  }

  DEVICE void issue_s(float (&scores)[kStep / 2]) const {
    issue_scores<T, kHeadDim, kStep>(scores, Operand(smem_address(s.q[warpgroup])),
                                     Operand(smem_address(s.k[stage.index])));
  }

  DEVICE void store(u32 smem, const u32 (&x)[kStep / 4]) const {
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i)
      store_matrices_x4(smem + (store_at ^ (i << 5)), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  // Waits for S, the last wgmma in flight, and computes P and dS.
  DEVICE void form_ds(float (&scores)[kStep / 2], u32 (&ds)[kStep / 4]) {
    float dp[kStep / 2];
    issue_scores<T, kHeadDim, kStep>(dp, Operand(smem_address(s.dout[warpgroup])),
                                     Operand(smem_address(s.v[stage.index])));
    wgmma_wait<1>();
    fence_operand(scores);
    Gather::hide_unseen(scores, s.info[stage.index], lane);
    u32 probs[kStep / 4];
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i)
      scores[i] = exp2_fast(fmaf(scores[i], p.scale_log2, -own_rows.lse[(i >> 1) & 1]));
    pack_pairs<T>(probs, scores);
    barrier_wait(smem_address(&s.part_empty[buffer.index]), buffer.parity ^ 1);
    store(smem_address(s.probs[buffer.index][warpgroup]), probs);
    wgmma_wait<0>();
    fence_operand(dp);
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i)
      ds[i] = T::pack(scores[2 * i] * (dp[2 * i] - own_rows.delta[i & 1]),
                      scores[2 * i + 1] * (dp[2 * i + 1] - own_rows.delta[i & 1]));
    store(smem_address(s.ds[buffer.index][warpgroup]), ds);
    fence_async_proxy();
  }

  // Hands P and dS to the third warpgroup. `index`: buffer of the keys; `of`: see Shared::part.
  DEVICE void hand(int index, int of) {
    if (warpgroup == 0) {
      const int thread = threadIdx.x % kWarpgroupThreads;
      if (thread < kStep) s.key[buffer.index][thread] = s.index[index][Gather::entry_of_row(thread)];
      if (thread == 0) s.part[buffer.index] = make_int2(flags, of);
    }
    release(s.part_full[buffer.index], lane);
    buffer.advance();
  }

  DEVICE void issue_dq(float (&dq)[kHeadDim / 2], const u32 (&ds)[kStep / 4]) const {
    issue_weighted<T, kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[stage.index]), kStep * kPanelRowBytes));
  }

  DEVICE void run() {
    while (true) {
      wait_keys();
      const int4 item = *reinterpret_cast<const int4*>(&s.info[stage.index]);
      flags = uniform(item.x);
      if (flags & kNoMoreSteps) break;
      const int first_row = item.y, head_rows = item.z;
      const int of = STORED ? ((head_rows & 0xffff) >> p.tiles.log2_heads) * p.tiles.num_rows + first_row : item.w;
      own_rows.load_stats(p, first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      float dq[kHeadDim / 2], scores[kStep / 2];
      u32 ds[kStep / 4];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_s(scores);
      form_ds(scores, ds);
      hand(stage.index, of);
      // At the start of each iteration dS of the step is in registers and no wgmma is in flight: ptxas serializes all
      // wgmmas if one is in flight across the back edge of the loop.
      while (true) {
        // kLastStep always ends the loop; see forward_consumer.cuh.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = stage.index;
        issue_dq(dq, ds);
        stage.advance();
        wait_keys();
        issue_s(scores);
        flags = uniform(s.info[stage.index].flags);
        wgmma_wait<1>();
        fence_operand(dq);
        fence_operand(ds);
        release(s.empty[now], lane);
        form_ds(scores, ds);
        hand(stage.index, of);
      }
      issue_dq(dq, ds);
      wgmma_wait<0>();
      fence_operand(dq);
      fence_operand(ds);
      release(s.empty[stage.index], lane);
      release(s.rows_empty, lane);
      stage.advance();
      own_rows.store_dq<T, kHeadDim>(p, dq, first_row, head_rows, lane);
    }
    barrier_wait(smem_address(&s.part_empty[buffer.index]), buffer.parity ^ 1);
    if (threadIdx.x == kWarpgroupThreads) s.part[buffer.index].x = kNoMoreSteps;
    release(s.part_full[buffer.index], lane);
  }
};

// The third warpgroup.
struct KeyGradients {
  static constexpr int kPanels = kHeadDim / kPanel, kParts = 2 * kPanels;

  const SparseBackwardParams& p;
  Shared& s;
  const int lane, row;  // of this thread: its first accumulator row, a key
  PipelineState<2> buffer;
  int step = 0;  // of the list

  // A part of dV, or behind those of dK.
  DEVICE void issue(float (&acc)[kPanel / 2], int part) const {
    const u32 panel = part % kPanels * kWarpgroupRows * kPanelRowBytes;
    const Operand a(part < kPanels ? smem_address(s.probs[buffer.index]) : smem_address(s.ds[buffer.index]));
    const Operand b((part < kPanels ? smem_address(s.dout) : smem_address(s.q)) + panel,
                    kWarpgroupRows * kPanelRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroups * kWarpgroupRows / 16; ++i)
      Wgmma<T, kPanel>::template ss<1, 1>(acc, a.at(rows_step(i)),
                                          b.at((i / 4) * kBytesRows + (i % 4) * 16 * kPanelRowBytes), i > 0);
    wgmma_commit();
  }

  // Keys of this thread's two rows, negative for none; each with the next or the one before, whichever has an odd
  // number.
  DEVICE int4 keys_of_rows() const {
    const int even = row & ~1, (&key)[kStep] = s.key[buffer.index];
    return make_int4(key[even], key[even + 1], key[even + 8], key[even + 9]);
  }

  DEVICE void add(const float (&x)[kPanel / 2], const int4& keys, int head_kv, int part) const {
    float* sums = (part < kPanels ? p.dv_sums : p.dk_sums) + head_kv * p.sum_rows * kHeadDim + part % kPanels * kPanel +
                  4 * (lane % 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 key[2] = {r ? keys.z : keys.x, r ? keys.w : keys.y};
#pragma unroll
      for (int j = 0; j < kPanel / 32; ++j) {
        float y[2][4];
        exchange_halves(y, x + 16 * j + 2 * r, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          add_global_v4(key[i] >= 0, sums + key[i] * kHeadDim + 32 * j, y[i][0], y[i][1], y[i][2], y[i][3]);
      }
    }
  }

  // Also stores what is given to keys that are none, which nobody reads.
  DEVICE void store(const float (&x)[kPanel / 2], int list, int part) const {
    constexpr int kPlace = 2 * kHeadDim;
    const i64 place = static_cast<i64>(list) * p.list_places + step * kStep + Gather::entry_of_row(row);
    u16* to = p.given + place * kPlace + part * kPanel + lane % 4 * 8;
    const float factor = part < kPanels ? 1.f : p.scale;  // before the rounding, as sums over heads may exceed fp16
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int g = 0; g < kPanel / 32; ++g) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* two = x + 4 * (4 * g + j) + 2 * r;
          word[j] = T::pack(two[0] * factor, two[1] * factor);
        }
        __stcs(reinterpret_cast<uint4*>(to + r * Gather::entry_of_row(8) * kPlace + 32 * g),
               make_uint4(word[0], word[1], word[2], word[3]));
      }
  }

  // Returns whether there was a step.
  DEVICE bool finish_step() {
    barrier_wait(smem_address(&s.part_full[buffer.index]), buffer.parity);
    const int flags = uniform(s.part[buffer.index].x), of = uniform(s.part[buffer.index].y);
    if (flags & kNoMoreSteps) return false;
    int4 keys;
    if (!STORED) keys = keys_of_rows();
    auto pass_on = [&](const float (&x)[kPanel / 2], int part) {
      if constexpr (STORED)
        store(x, of, part);
      else
        add(x, keys, of, part);
    };
    float acc[2][kPanel / 2];
    issue(acc[0], 0);
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      issue(acc[part % 2], part);
      wgmma_wait<1>();
      fence_operand(acc[(part - 1) % 2]);
      pass_on(acc[(part - 1) % 2], part - 1);
    }
    wgmma_wait<0>();
    fence_operand(acc[(kParts - 1) % 2]);
    release(s.part_empty[buffer.index], lane);
    if (flags & kLastStep) release(s.rows_empty, lane);
    pass_on(acc[(kParts - 1) % 2], kParts - 1);
    buffer.advance();
    step = flags & kLastStep ? 0 : step + 1;
    return true;
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_sparse_backward(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&s.part_full[i]), 4 * kGroups);
      barrier_init(smem_address(&s.part_empty[i]), 4);
    }
    s.init(kKeyArrivals<true>, 4 * (kGroups + 1));
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    Loader loader{p, s, warp, lane};
    walk_key_lists<kGroups, kHeadDim, kStep, !STORED>(p.tiles, loader, warp, lane);
  } else if (threadIdx.x >= kWarpgroupThreads * (kGroups + 1)) {
    registers_shrink<kThirdRegisters>();
    const int lane = threadIdx.x % kWarpThreads;
    const int row = threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + lane / 4;
    KeyGradients gradients{p, s, lane, row};
    while (gradients.finish_step()) continue;
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
