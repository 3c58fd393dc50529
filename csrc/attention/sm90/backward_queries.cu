// Attention backward in parts for sm_90a, dQ. A work item is a tile of 128 query rows of one head, or of several heads
// that share their keys (row_tiles.cuh).
//
// As in the forward, a consumer warpgroup owns 64 rows and iterates over all key blocks that any row of the tile sees:
// S, dP, then dQ += dS K with dS from registers. dQ of a block is issued together with the scores of the next. With
// three stages of keys the warpgroups issue their wgmmas in turn.
//
// On the stream it is a programmatic dependent of the kernel for dK and dV and uses none of its results: it starts on
// SMs that have no more work there, and completes only after it.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), CAPTURED (0 or 1: mask_numbers.cuh),
// WIDTH (keys of a block), STAGES (of keys), STAGES_V (of values), STAGED (0 or 1: dQ is staged in shared memory),
// STREAM_KV (0 or 1: keys from a given index on are in separate tensors and arrive while the kernel runs).

#include "backward_parts.cuh"
#include "gradients.cuh"
#include "row_products.cuh"
#include "row_tiles.cuh"
#include "softmax.cuh"
#include "staging.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
constexpr int kKeys = WIDTH;
constexpr int kStages = STAGES, kStagesV = STAGES_V;
using T = DTYPE;
// With two stages of keys, which dQ of one block and S of the next both occupy, turns would delay the loads of keys.
constexpr bool kAlternates = kStages > 2;

// Named barriers, each for one warpgroup: the first of kGroups successive ids.
enum NamedBarrier : u32 {
  kWarpScheduler = 1,  // it may issue its wgmmas
};

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

struct Shared {
  alignas(kSwizzleAtomBytes) u16 q[kGroups][kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 dout[kGroups][kHeadDimV / kPanel][kWarpgroupRows][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kKeys][kPanel];
  u16 v[kStagesV][kHeadDimV / kPanel][kKeys][kPanel];
  Staging<kHeadDim, STAGED ? 4 * kGroups : 0> dq;
  u64 rows_full[kGroups], rows_empty[kGroups];
  u64 v_full[kStagesV], v_empty[kStagesV];
  KvPipeline<kGroups, kStages> blocks;
  TileInfoPipeline segments;
};

constexpr u32 kBytesRows = (sizeof(Shared::q) + sizeof(Shared::dout)) / kGroups;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStagesV;

// ---- producer: one thread ----

struct Loader {
  const BackwardPartParams& p;
  Shared& s;
  PipelineState<kStages> k_stage;
  PipelineState<kStagesV> v_stage;
#if STREAM_KV
  ArrivalWaiter waiter;
#endif

  DEVICE void block(int key, int head_kv, int flags, int segment, const int4& item) {
    u32 bar = arrive_keys(s.blocks, k_stage, p, key, flags, segment, item, kBytesK);
#if STREAM_KV
    waiter.await(p.arrival_barrier, NUM_ARRIVING(p), key - p.arrival_barrier.first + kKeys);
#endif
    load_panels<kHeadDim / kPanel>(&OF_KEY(p, key, k), smem_address(s.k[k_stage.index]), kKeys * kPanelRowBytes,
                                   row_of_key(p, key), head_kv, bar);
    k_stage.advance();
    bar = smem_address(&s.v_full[v_stage.index]);
    barrier_wait(smem_address(&s.v_empty[v_stage.index]), v_stage.parity ^ 1);
    barrier_expect_bytes(bar, kBytesV);
    load_panels<kHeadDimV / kPanel>(&OF_KEY(p, key, v), smem_address(s.v[v_stage.index]), kKeys * kPanelRowBytes,
                                    row_of_key(p, key), head_kv, bar);
    v_stage.advance();
  }

  DEVICE void describe(int flags, const int4& item) {
    barrier_arrive(acquire_block(s.blocks, k_stage, 0, flags, item));
    k_stage.advance();
  }

  DEVICE void nothing(const int4& item) { describe(kNothing, item); }
};

// Called by the prefetch thread: loads the rows of an item as soon as their buffers are free.
struct RowLoader {
  const BackwardPartParams& p;
  Shared& s;
  u32 parity = 1;

  DEVICE void operator()(int row, int head, bool any) {
    if (!any) return;
#pragma unroll 1
    for (int w = 0; w < kGroups; ++w) {
      const u32 bar = smem_address(&s.rows_full[w]);
      barrier_wait(smem_address(&s.rows_empty[w]), parity);
      barrier_expect_bytes(bar, kBytesRows);
      load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[w]), kWarpgroupRows * kPanelRowBytes, row, head, bar);
      load_panels<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[w]), kWarpgroupRows * kPanelRowBytes, row, head,
                                      bar);
      row += tile_rows<kGroups>(p) / kGroups;
    }
    parity ^= 1;
  }
};

DEVICE void find_rows(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.dout);
  prefetch_map(&p.dq_map);
  RowLoader load{p, s};
  prefetch_items<false>(p, s.segments, load);
  await_earlier_kernels();
}

DEVICE void produce(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  Loader loader{p, s};
  walk_blocks<kGroups, false>(p, s.segments, loader);
  loader.describe(kEnd, make_int4(0, 0, 0, 0));
}

// ---- consumers ----

struct Consumer {
  const BackwardPartParams& p;
  Shared& s;
  const int warpgroup, lane;
  const ThreadRows own_rows;
  PipelineState<kStages> k_stage;
  PipelineState<kStagesV> v_stage;
  u32 rows_parity = 0;
  int flags;  // of the block whose scores are being computed
  float lse[2], delta[2];

  DEVICE Consumer(const BackwardPartParams& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), lane(threadIdx.x % 32), own_rows(p, warpgroup) {}

  DEVICE void warp_scheduler_sync() const {
    if (kAlternates) named_sync(kWarpScheduler + warpgroup, kWarpgroupThreads * kGroups);
  }
  DEVICE void warp_scheduler_arrive() const {
    if (kAlternates) named_arrive(kWarpScheduler + 1 - warpgroup, kWarpgroupThreads * kGroups);
  }

  DEVICE void load_stats(const BlockInfo& of) {
    const int head = (of.head_rows & 0xffff) >> p.log2_packed;
    const i64 from = static_cast<i64>(head) * p.stats_row + (of.first_row << p.log2_packed) + own_rows.index;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool valid = own_rows.row + own_rows.step * r < of.head_rows >> 16;
      lse[r] = valid ? __ldg(p.lse + from + 8 * r) : 0.f;
      delta[r] = valid ? __ldg(p.delta + from + 8 * r) : 0.f;
    }
  }

  DEVICE BlockInfo block_info() const {
    const int4 x = s.blocks.info[k_stage.index];
    return {x.x, uniform(x.y), x.z, x.w};
  }

  // Replaces scores by P, times the derivative of the softcap.
  DEVICE void form_probs(float (&scores)[kKeys / 2]) {
    if (SOFTCAP) apply_softcap(scores, p.softcap_factor);
    if (flags & (1 << warpgroup)) {
      const int2* of_row = s.blocks.bounds[k_stage.index] + own_rows.row;
      const int2 bounds[2] = {of_row[0], of_row[own_rows.step]};
      apply_mask(scores, s.blocks.info[k_stage.index].x + 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const float prob = exp2_fast(fmaf(scores[i], p.scale_log2, -lse[(i >> 1) & 1]));
      scores[i] = SOFTCAP ? prob * softcap_slope(scores[i]) : prob;
    }
  }

  DEVICE void form_ds(const float (&probs)[kKeys / 2], const float (&dp)[kKeys / 2], u32 (&ds)[kKeys / 4]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i)
      ds[i] = T::pack(probs[2 * i] * (dp[2 * i] + delta[i & 1]), probs[2 * i + 1] * (dp[2 * i + 1] + delta[i & 1]));
  }

  // Waits for S and dP, the last wgmmas in flight, and computes dS.
  DEVICE void await_ds(float (&scores)[kKeys / 2], float (&dp)[kKeys / 2], u32 (&ds)[kKeys / 4]) {
    wgmma_wait<1>();
    fence_operand(scores);
    form_probs(scores);
    wgmma_wait<0>();
    fence_operand(dp);
    release(s.v_empty[v_stage.index], lane);
    v_stage.advance();
    form_ds(scores, dp, ds);
  }

  // All key blocks of one work item; `flags` are those of the first.
  DEVICE void accumulate(float (&dq)[kHeadDim / 2]) {
    float scores[kKeys / 2], dp[kKeys / 2];
    u32 ds[kKeys / 4];
    const Operand q(smem_address(s.q[warpgroup])), dout(smem_address(s.dout[warpgroup]));
    barrier_wait(smem_address(&s.rows_full[warpgroup]), rows_parity);
    rows_parity ^= 1;
    barrier_wait(smem_address(&s.v_full[v_stage.index]), v_stage.parity);
    warp_scheduler_sync();
    issue_scores<T, kHeadDim, kKeys>(scores, q, Operand(smem_address(s.k[k_stage.index])));
    issue_scores<T, kHeadDimV, kKeys>(dp, dout, Operand(smem_address(s.v[v_stage.index])));
    warp_scheduler_arrive();
    await_ds(scores, dp, ds);
    // At the start of each iteration dS of the block is in registers and no wgmma is in flight: ptxas serializes all
    // wgmmas if one is in flight across the back edge of the loop.
    while (true) {
      // kLast always ends the loop: num_tiles is never negative. As the loop's condition, the compiler would rotate the
      // loop and duplicate the test, after which ptxas runs out of registers and serializes the wgmmas.
      if (flags & kLast) {
        if (p.num_tiles >= 0) break;
        flags = uniform(flags + 1);
      }
      const int now = k_stage.index;
      k_stage.advance();
      barrier_wait(smem_address(&s.blocks.full[k_stage.index]), k_stage.parity);
      barrier_wait(smem_address(&s.v_full[v_stage.index]), v_stage.parity);
      warp_scheduler_sync();
      issue_weighted<T, kHeadDim, kKeys>(dq, ds, Operand(smem_address(s.k[now]), kKeys * kPanelRowBytes));
      issue_scores<T, kHeadDim, kKeys>(scores, q, Operand(smem_address(s.k[k_stage.index])));
      issue_scores<T, kHeadDimV, kKeys>(dp, dout, Operand(smem_address(s.v[v_stage.index])));
      warp_scheduler_arrive();
      flags = block_info().flags;
      wgmma_wait<2>();
      fence_operand(dq);
      fence_operand(ds);
      release(s.blocks.empty[now], lane);
      await_ds(scores, dp, ds);
    }
    release(s.rows_empty[warpgroup], lane);
    warp_scheduler_sync();
    issue_weighted<T, kHeadDim, kKeys>(dq, ds, Operand(smem_address(s.k[k_stage.index]), kKeys * kPanelRowBytes));
    warp_scheduler_arrive();
    wgmma_wait<0>();
    fence_operand(dq);
    fence_operand(ds);
    release(s.blocks.empty[k_stage.index], lane);
    k_stage.advance();
  }

  DEVICE void run() {
    if (warpgroup == 1) warp_scheduler_arrive();
    const u32 staging = p.store == kStoreHalf ? s.dq.of_warp(threadIdx.x / 32 - 4) : 0;
    while (true) {
      barrier_wait(smem_address(&s.blocks.full[k_stage.index]), k_stage.parity);
      const BlockInfo item = block_info();
      flags = item.flags;
      if (flags & kEnd) break;
      float dq[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      if (flags & kNothing) {
        release(s.blocks.empty[k_stage.index], lane);
        k_stage.advance();
        if (p.store >= kAddFloat) continue;
      } else {
        load_stats(item);
        accumulate(dq);
      }
      const int head = (item.head_rows & 0xffff) + own_rows.head, rows = item.head_rows >> 16;
      const i64 at = item.first_row + own_rows.row;
      if (staging && own_rows.warp_within(p, rows)) {
        const float scales[2] = {p.scale, p.scale};
        store_staged<T, kHeadDim>(&p.dq_map, staging, 16 * kPanel * sizeof(u16), dq, scales, at, head, lane);
        continue;
      }
      const bool valid[2] = {own_rows.row < rows, own_rows.row + own_rows.step < rows};
      store_gradient<T, kHeadDim>(p.store, p.dq, at * p.dq_row + head * p.dq_head, own_rows.step * p.dq_row, valid, dq,
                                  p.scale, lane);
    }
    if (warpgroup == 0) warp_scheduler_sync();
    if (lane == 0) bulk_wait_read();
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_backward_queries(const __grid_constant__ BackwardPartParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffers(s.rows_full, s.rows_empty, 4);
    init_buffers(s.blocks.full, s.blocks.empty, 4 * kGroups);
    init_buffers(s.v_full, s.v_empty, 4 * kGroups);
    init_buffers(s.segments.full, s.segments.empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, s);
    if (threadIdx.x == 32) find_rows(p, s);
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
