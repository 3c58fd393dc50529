// Sparse attention backward for sm_90a, dQ for lists of blocks of keys; sparse_backward_keys.cu computes dK and dV. A
// work item is a tile of 128 accumulator rows (sparse_tiles.cuh), which iterates over the blocks of its list in steps
// of 64 keys.
//
// A consumer warpgroup owns 64 accumulator rows and keeps their queries, dO and dQ in registers. dQ of a step overlaps
// with computing P and dS of the next. Deterministic.
//
// Compile-time: HEAD_DIM, DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "row_products.cuh"
#include "softmax.cuh"
#include "sparse_backward_tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64, kStages = 5;
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
using T = DTYPE;

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

using Shared = TileBuffers<kHeadDim, kGroups, kStep, kStages>;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;

// ---- producer: a warp ----

struct Loader {
  const SparseBackwardParams& p;
  Shared& s;
  const int lane;
  PipelineState<kStages> stage;
  u32 rows_parity = 1;

  DEVICE void queries(const Tile& tile) {
    if (lane == 0) load_queries(p, s, tile, rows_parity);
    rows_parity ^= 1;
  }

  DEVICE void step(const Tile& tile, int flags, const int4& keys) {
    if (lane == 0) {
      const u32 bar = smem_address(&s.full[stage.index]);
      barrier_wait(smem_address(&s.empty[stage.index]), stage.parity ^ 1);
      describe(s.info[stage.index], tile, flags);
      s.info[stage.index].keys[0] = keys.x;
      barrier_expect_bytes(bar, 2 * kBytesK);
      load_pieces<kHeadDim, kStep>(&p.k, smem_address(s.k[stage.index]), keys, tile.head_kv, bar);
      load_pieces<kHeadDim, kStep>(&p.v, smem_address(s.v[stage.index]), keys, tile.head_kv, bar);
    }
    stage.advance();
  }

  DEVICE void end() {
    if (lane == 0) {
      barrier_wait(smem_address(&s.empty[stage.index]), stage.parity ^ 1);
      s.info[stage.index].flags = kNoMoreSteps;
      barrier_arrive(smem_address(&s.full[stage.index]));
    }
  }
};

// ---- consumers ----

// acc[64 rows, 64 keys] = a[64, kHeadDim] * b[64 keys, kHeadDim]^T, a from registers.
DEVICE void issue_from_registers(float (&acc)[kStep / 2], const u32 (&a)[kHeadDim / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i)
    Wgmma<T, kStep>::template rs<0>(acc, a + 4 * i, b.at(columns_step(i, kStep)), i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseBackwardParams& p;
  Shared& s;
  const int warpgroup, lane;
  BackwardThreadRows own_rows;
  PipelineState<kStages> stage;
  u32 rows_parity = 0;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), lane(threadIdx.x % 32), own_rows(p.tiles, warpgroup) {}

  // SparseThreadRows of a warpgroup as an operand in registers.
  DEVICE void load_operand(u32 (&operand)[kHeadDim / 4], const void* rows) const {
    const u32 at = smem_address(rows) +
                   (threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + lane % 16) * kPanelRowBytes +
                   ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      load_matrices_x4((at ^ (i % 4 << 5)) + i / 4 * kWarpgroupRows * kPanelRowBytes, operand + 4 * i);
  }

  DEVICE int wait_keys() const {
    barrier_wait(smem_address(&s.full[stage.index]), stage.parity);
    return uniform(s.info[stage.index].flags);
  }

  DEVICE void form_probs(float (&scores)[kStep / 2], int flags) const {
    const StepInfo& info = s.info[stage.index];
    if (flags & kHidesKeys)
      hide_pieces<kStep>(scores, info, lane, [&](int r) {
        return min(p.tiles.num_keys, info.first_row + own_rows.row[r] + p.tiles.reach);
      });
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i)
      scores[i] = exp2_fast(fmaf(scores[i], p.scale_log2, -own_rows.lse[(i >> 1) & 1]));
  }

  DEVICE void form_ds(float (&dp)[kStep / 2], const float (&probs)[kStep / 2]) const {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) dp[i] = probs[i] * (dp[i] - own_rows.delta[(i >> 1) & 1]);
  }

  DEVICE void run() {
    while (true) {
      int flags = wait_keys();
      if (flags & kNoMoreSteps) break;
      const int4 item = *reinterpret_cast<const int4*>(&s.info[stage.index]);
      const int first_row = item.y, head_rows = item.z;
      own_rows.load_stats(p, first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      u32 q[kHeadDim / 4], dout[kHeadDim / 4], ds[kStep / 4];
      load_operand(q, s.q[warpgroup]);
      load_operand(dout, s.dout[warpgroup]);
      release(s.rows_empty, lane);
      float dq[kHeadDim / 2], scores[kStep / 2], dp[kStep / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_from_registers(scores, q, Operand(smem_address(s.k[stage.index])));
      issue_from_registers(dp, dout, Operand(smem_address(s.v[stage.index])));
      wgmma_wait<1>();
      fence_operand(scores);
      form_probs(scores, flags);
      wgmma_wait<0>();
      fence_operand(dp);
      form_ds(dp, scores);
      pack_pairs<T>(ds, dp);
      // At the start of each iteration dS of the step is in registers and no wgmma is in flight: ptxas serializes all
      // wgmmas if one is in flight across the back edge of the loop.
      while (true) {
        // kLastStep always ends the loop; see forward_consumer.cuh.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = stage.index;
        stage.advance();
        flags = wait_keys();
        issue_from_registers(scores, q, Operand(smem_address(s.k[stage.index])));
        issue_from_registers(dp, dout, Operand(smem_address(s.v[stage.index])));
        issue_weighted<T, kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[now]), kStep * kPanelRowBytes));
        wgmma_wait<2>();
        fence_operand(scores);
        form_probs(scores, flags);
        wgmma_wait<1>();
        fence_operand(dp);
        form_ds(dp, scores);
        wgmma_wait<0>();
        fence_operand(q);
        fence_operand(dout);
        fence_operand(dq);
        fence_operand(ds);
        release(s.empty[now], lane);
        pack_pairs<T>(ds, dp);
      }
      issue_weighted<T, kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[stage.index]), kStep * kPanelRowBytes));
      wgmma_wait<0>();
      fence_operand(dq);
      fence_operand(ds);
      release(s.empty[stage.index], lane);
      stage.advance();
      own_rows.store_dq<T, kHeadDim>(p, dq, first_row, head_rows, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_sparse_backward_queries(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.init(kKeyArrivals<false>);
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x < 32) {
      Loader loader{p, s, static_cast<int>(threadIdx.x)};
      walk_block_lists<kGroups, kStep>(p.tiles, loader, threadIdx.x);
    }
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
