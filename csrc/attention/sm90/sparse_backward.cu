// Sparse attention backward for sm_90a, for lists of single keys. A work item is a tile of 128 accumulator rows
// (sparse_tiles.cuh), which iterates over the keys of its list in steps of 64. dQ of the tile is accumulated in
// registers; its contributions to dK and dV of a step are computed at once and added to sums in device memory.
//
// A consumer warpgroup owns 64 accumulator rows: S, dP, and dQ += dS K with dS from registers. P and dS of all 128
// accumulator rows also go through shared memory, for dV = P^T dO, which the first warpgroup computes, and dK = dS^T Q,
// computed by the second. These and dQ of a step are issued with S of the next, which overlaps with adding to the sums;
// dP then reuses their registers.
//
// The sums are fp32, or with FIXED fixed-point indices of 64 bits, whose sum does not depend on the order of additions.
//
// Compile-time: HEAD_DIM, FIXED (0 or 1), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "row_products.cuh"
#include "softmax.cuh"
#include "sparse_backward_tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64, kStages = 2;
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
using T = DTYPE;
using Gather = KeyGather<kHeadDim, kStep>;

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

// Named barriers. 0 is __syncthreads.
enum NamedBarrier : u32 {
  kProbsAndDsWritten = 1,  // by both consumer warpgroups
};

struct Shared : TileBuffers<kHeadDim, kGroups, kStep, kStages> {
  alignas(kSwizzleAtomBytes) u16 probs[2][kGroups][kWarpgroupRows][kStep];
  u16 ds[2][kGroups][kWarpgroupRows][kStep];
  alignas(16) int index[kStages][kStep];  // indices of keys in the order of the list, -1 for none
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

DEVICE void add_global_v4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

DEVICE void add_fixed(i64* p, float x, float scale) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(p), "l"(__float2ll_rn(x * scale)) : "memory");
}

// acc[kStep, kHeadDim] = a[128 rows, kStep]^T * b[128 rows, kHeadDim]
DEVICE void issue_key_gradient(float (&acc)[kHeadDim / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kGroups * kWarpgroupRows / 16; ++i)
    Wgmma<T, kHeadDim>::template ss<1, 1>(acc, a.at(rows_step(i)),
                                          b.at((i / 4) * kBytesRows + (i % 4) * 16 * kPanelRowBytes), i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseBackwardParams& p;
  Shared& s;
  const int warpgroup, lane, row_of_warpgroup;  // row_of_warpgroup: first of this thread's two rows, of 64
  BackwardThreadRows own_rows;
  PipelineState<kStages> stage;
  PipelineState<2> buffer;  // of P and dS
  u32 rows_parity = 0;
  int flags = 0;
  u32 store_at;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row_of_warpgroup(threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + threadIdx.x % kWarpThreads / 4),
        own_rows(p.tiles, warpgroup) {
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

  // Waits for S, the last wgmma in flight, and computes P and dS; both warpgroups may read them after a barrier.
  DEVICE void form_ds(float (&scores)[kStep / 2], u32 (&ds)[kStep / 4]) {
    float dp[kStep / 2];
    issue_scores<T, kHeadDim, kStep>(dp, Operand(smem_address(s.dout[warpgroup])),
                                     Operand(smem_address(s.v[stage.index])));
    buffer.advance();
    wgmma_wait<1>();
    fence_operand(scores);
    Gather::hide_unseen(scores, s.info[stage.index], lane);
    u32 probs[kStep / 4];
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i)
      scores[i] = exp2_fast(fmaf(scores[i], p.scale_log2, -own_rows.lse[(i >> 1) & 1]));
    pack_pairs<T>(probs, scores);
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

  DEVICE void issue_gradients(float (&dq)[kHeadDim / 2], float (&part)[kHeadDim / 2], const u32 (&ds)[kStep / 4],
                              int index) {
    named_sync(kProbsAndDsWritten, kWarpgroupThreads * kGroups);
    issue_weighted<T, kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[index]), kStep * kPanelRowBytes));
    const u32 left = warpgroup ? smem_address(s.ds[buffer.index]) : smem_address(s.probs[buffer.index]);
    const u32 right = warpgroup ? smem_address(s.q) : smem_address(s.dout);
    issue_key_gradient(part, Operand(left), Operand(right, kWarpgroupRows * kPanelRowBytes));
  }

  // Keys of a contribution to dK or dV, negative for none: of this thread's two rows, each with the next or the one
  // before, whichever has an odd number.
  DEVICE int4 keys_of(int index) const {
    const int even = row_of_warpgroup & ~1, (&keys)[kStep] = s.index[index];
    return make_int4(keys[Gather::entry_of_row(even)], keys[Gather::entry_of_row(even + 1)],
                     keys[Gather::entry_of_row(even + 8)], keys[Gather::entry_of_row(even + 9)]);
  }

  DEVICE void add_part(const float (&part)[kHeadDim / 2], const int4& keys, int head_kv) const {
    void* sums = warpgroup ? p.dk_sums : p.dv_sums;
    if constexpr (FIXED) {
      const float scale = __ldg(p.fixed_scales + 1 - warpgroup);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = row_of_warpgroup % 2 ? (r ? keys.w : keys.y) : (r ? keys.z : keys.x);
        if (key < 0) continue;
        i64* to = static_cast<i64*>(sums) + (head_kv * p.sum_rows + key) * kHeadDim + 4 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kHeadDim / 16; ++j, to += 16) {
          const float* x = part + 8 * j + 2 * r;
          add_fixed(to, x[0], scale), add_fixed(to + 1, x[1], scale);
          add_fixed(to + 2, x[4], scale), add_fixed(to + 3, x[5], scale);
        }
      }
    } else {
      float* at = static_cast<float*>(sums) + head_kv * p.sum_rows * kHeadDim + 4 * (lane % 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key[2] = {r ? keys.z : keys.x, r ? keys.w : keys.y};
#pragma unroll
        for (int j = 0; j < kHeadDim / 32; ++j) {
          float x[2][4];
          exchange_halves(x, part + 16 * j + 2 * r, lane);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (key[i] >= 0)
              add_global_v4(at + static_cast<i64>(key[i]) * kHeadDim + 32 * j, x[i][0], x[i][1], x[i][2], x[i][3]);
        }
      }
    }
  }

  DEVICE void run() {
    while (true) {
      wait_keys();
      const int4 item = *reinterpret_cast<const int4*>(&s.info[stage.index]);
      flags = uniform(item.x);
      if (flags & kNoMoreSteps) break;
      const int first_row = item.y, head_rows = item.z, head_kv = item.w;
      own_rows.load_stats(p, first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      float dq[kHeadDim / 2], part[kHeadDim / 2], scores[kStep / 2];
      u32 ds[kStep / 4];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_s(scores);
      form_ds(scores, ds);
      // At the start of each iteration dS of the step is in registers and no wgmma is in flight: ptxas serializes all
      // wgmmas if one is in flight across the back edge of the loop.
      while (true) {
        // kLastStep always ends the loop; see forward_consumer.cuh.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = stage.index;
        const int4 keys = keys_of(now);
        issue_gradients(dq, part, ds, now);
        stage.advance();
        wait_keys();
        issue_s(scores);
        flags = uniform(s.info[stage.index].flags);
        wgmma_wait<1>();
        fence_operand(dq);
        fence_operand(ds);
        fence_operand(part);
        release(s.empty[now], lane);
        add_part(part, keys, head_kv);
        form_ds(scores, ds);  // dP reuses the registers of the part
      }
      const int4 keys = keys_of(stage.index);
      issue_gradients(dq, part, ds, stage.index);
      wgmma_wait<0>();
      fence_operand(dq);
      fence_operand(ds);
      fence_operand(part);
      release(s.empty[stage.index], lane);
      release(s.rows_empty, lane);
      stage.advance();
      add_part(part, keys, head_kv);
      own_rows.store_dq<T, kHeadDim>(p, dq, first_row, head_rows, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_sparse_backward(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.init(kKeyArrivals<true>);
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    Loader loader{p, s, warp, lane};
    walk_key_lists<kGroups, kHeadDim, kStep, true>(p.tiles, loader, warp, lane);
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
