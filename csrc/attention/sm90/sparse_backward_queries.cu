// Sparse attention backward for sm_90a, dQ for lists of blocks of keys; sparse_backward_keys.cu computes dK and dV. A
// work item is a tile of 128 places (sparse_tiles.cuh), which iterates over the blocks of its list in steps of 64 keys.
//
// A consumer warpgroup owns 64 places and keeps their queries, dO and dQ in registers. dQ of a step overlaps with
// computing P and dS of the next. Deterministic.
//
// Compile-time: HEAD_DIM, DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"

#define INDEXED 0
constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64, kStages = 5;
using T = DTYPE;

#include "row_products.cuh"
#include "sparse_backward_tiles.cuh"

using Shared = TileBuffers;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;

// ---- producer: a warp ----

struct Loader {
  const SparseBackwardParams& p;
  Shared& s;
  const int lane;
  Ring<kStages> ring;
  u32 rows_parity = 1;

  DEVICE void queries(const Tile& tile) {
    if (lane == 0) load_queries(p, s, tile, rows_parity);
    rows_parity ^= 1;
  }

  DEVICE void step(const Tile& tile, int flags, const int4& keys) {
    if (lane == 0) {
      const u32 bar = smem_address(&s.full[ring.index]);
      barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
      describe(s.info[ring.index], tile, flags);
      s.info[ring.index].keys[0] = keys.x;
      barrier_expect_bytes(bar, 2 * kBytesK);
      load_pieces(&p.k, smem_address(s.k[ring.index]), keys, tile.head_kv, bar);
      load_pieces(&p.v, smem_address(s.v[ring.index]), keys, tile.head_kv, bar);
    }
    ring.advance();
  }

  DEVICE void end() {
    if (lane == 0) {
      barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
      s.info[ring.index].flags = kNoMoreSteps;
      barrier_arrive(smem_address(&s.full[ring.index]));
    }
  }
};

// ---- consumers ----

// acc[64 places, 64 keys] = a[64, kHeadDim] * b[64 keys, kHeadDim]^T, a from registers.
DEVICE void issue_kept(float (&acc)[kStep / 2], const u32 (&a)[kHeadDim / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i)
    Wgmma<T, kStep>::template rs<0>(acc, a + 4 * i, b.at((i / 4) * kStep * 128 + (i % 4) * 32), i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseBackwardParams& p;
  Shared& s;
  const int warpgroup, lane;
  Places places;
  Ring<kStages> ring;
  u32 rows_parity = 0;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), lane(threadIdx.x % 32), places(warpgroup, p.tiles.log2_heads) {}

  // Rows of a warpgroup as an operand in registers.
  DEVICE void load_kept(u32 (&kept)[kHeadDim / 4], const void* rows) const {
    const u32 at = smem_address(rows) + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) load_matrices_x4((at ^ (i % 4 << 5)) + i / 4 * kPlaces * 128, kept + 4 * i);
  }

  DEVICE int wait_keys() const {
    barrier_wait(smem_address(&s.full[ring.index]), ring.parity);
    return uniform(s.info[ring.index].flags);
  }

  DEVICE void form_probs(float (&x)[kStep / 2], int flags) const {
    const StepInfo& info = s.info[ring.index];
    if (flags & kHidesKeys)
      hide_pieces(x, info, lane,
                  [&](int r) { return min(p.tiles.num_keys, info.first_row + places.row[r] + p.tiles.reach); });
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) x[i] = exp2_fast(fmaf(x[i], p.scale_log2, -places.lse[(i >> 1) & 1]));
  }

  DEVICE void form_ds(float (&y)[kStep / 2], const float (&x)[kStep / 2]) const {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) y[i] = x[i] * (y[i] - places.delta[(i >> 1) & 1]);
  }

  DEVICE void run() {
    while (true) {
      int flags = wait_keys();
      if (flags & kNoMoreSteps) break;
      const int4 item = *reinterpret_cast<const int4*>(&s.info[ring.index]);
      const int first_row = item.y, head_rows = item.z;
      places.load_stats(p, first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      u32 q[kHeadDim / 4], dout[kHeadDim / 4], ds[kStep / 4];
      load_kept(q, s.q[warpgroup]);
      load_kept(dout, s.dout[warpgroup]);
      release(s.rows_empty, lane);
      float dq[kHeadDim / 2], x[kStep / 2], y[kStep / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_kept(x, q, Operand(smem_address(s.k[ring.index])));
      issue_kept(y, dout, Operand(smem_address(s.v[ring.index])));
      wgmma_wait<1>();
      pin(x);
      form_probs(x, flags);
      wgmma_wait<0>();
      pin(y);
      form_ds(y, x);
      pack_pairs(ds, y);
      // At the start of each iteration dS of the step is in registers and no wgmma is in flight: ptxas serializes all
      // wgmmas if one is in flight across the back edge of the loop.
      while (true) {
        // kLastStep always ends the loop; see sparse_forward.cu.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = ring.index;
        ring.advance();
        flags = wait_keys();
        issue_kept(x, q, Operand(smem_address(s.k[ring.index])));
        issue_kept(y, dout, Operand(smem_address(s.v[ring.index])));
        issue_weighted<kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[now]), kStep * 128));
        wgmma_wait<2>();
        pin(x);
        form_probs(x, flags);
        wgmma_wait<1>();
        pin(y);
        form_ds(y, x);
        wgmma_wait<0>();
        pin(q);
        pin(dout);
        pin(dq);
        pin(ds);
        release(s.empty[now], lane);
        pack_pairs(ds, y);
      }
      issue_weighted<kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[ring.index]), kStep * 128));
      wgmma_wait<0>();
      pin(dq);
      pin(ds);
      release(s.empty[ring.index], lane);
      ring.advance();
      places.store_dq(p, dq, first_row, head_rows, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_sparse_backward_queries(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.init(kArrivals);
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // together with registers_grow: all registers of the block
    if (threadIdx.x < 32) {
      Loader loader{p, s, static_cast<int>(threadIdx.x)};
      walk_blocks(p.tiles, loader, threadIdx.x);
    }
  } else {
    registers_grow<240>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
