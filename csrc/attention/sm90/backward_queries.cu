// Attention backward in parts for sm_90a, dQ. A work item is a tile of 128 query rows of one head, or of several heads
// that share their keys (row_tiles.cuh).
//
// As in the forward, a consumer warpgroup owns 64 rows and iterates over all key blocks that any row of the tile sees:
// S, dP, then dQ += dS K with dS from registers. dQ of a block is issued together with the logits of the next. With
// three stages of keys the warpgroups issue their wgmmas in turn.
//
// On the stream it is a programmatic dependent of the kernel for dK and dV and uses none of its results: it starts on
// SMs that have no more work there, and completes only after it.
//
// Compile-time, in addition to those of backward_parts.cuh: WIDTH (keys of a block), STAGES (of keys), STAGES_V (of
// values), STAGED (0 or 1: dQ is staged in shared memory), GATED (0 or 1: keys from a given index on are in separate
// tensors and arrive while the kernel runs).

#define IN_STEP 0

#include "backward_parts.cuh"
#include "row_tiles.cuh"
#include "staging.cuh"

constexpr int kKeys = WIDTH;
constexpr int kStages = STAGES, kStagesV = STAGES_V;
// With two stages of keys, which dQ of one block and S of the next both occupy, turns would delay the loads of keys.
constexpr bool kTurns = kStages > 2;

struct Shared {
  alignas(1024) u16 q[kGroups][kHeadDim / kPanel][kRows][kPanel];
  u16 dout[kGroups][kHeadDimV / kPanel][kRows][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kKeys][kPanel];
  u16 v[kStagesV][kHeadDimV / kPanel][kKeys][kPanel];
  Staging<kHeadDim, STAGED ? 4 * kGroups : 0> dq;
  u64 rows_full[kGroups], rows_empty[kGroups];
  u64 v_full[kStagesV], v_empty[kStagesV];
  BlockBoard<kStages> blocks;
  PassBoard passes;
};

constexpr u32 kBytesRows = (sizeof(Shared::q) + sizeof(Shared::dout)) / kGroups;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStagesV;

// ---- producer: one thread ----

struct Loader {
  const BackwardPartParams& p;
  Shared& s;
  Ring<kStages> rk;
  Ring<kStagesV> rv;
#if GATED
  Arrivals arrivals;
#endif

  DEVICE void block(int key, int head_kv, int flags, int pass, const int4& item) {
    u32 bar = announce_keys(s.blocks, rk, p, key, flags, pass, item, kBytesK);
#if GATED
    arrivals.await(p.gate, key - p.gate.first + kKeys);
#endif
    load_panels<kHeadDim / kPanel>(&OF_KEY(p, key, k), smem_address(s.k[rk.index]), kKeys * 128, row_of_key(p, key),
                                   head_kv, bar);
    rk.advance();
    bar = smem_address(&s.v_full[rv.index]);
    barrier_wait(smem_address(&s.v_empty[rv.index]), rv.parity ^ 1);
    barrier_expect_bytes(bar, kBytesV);
    load_panels<kHeadDimV / kPanel>(&OF_KEY(p, key, v), smem_address(s.v[rv.index]), kKeys * 128, row_of_key(p, key),
                                    head_kv, bar);
    rv.advance();
  }

  DEVICE void describe(int flags, const int4& item) {
    barrier_arrive(announce(s.blocks, rk, 0, flags, item));
    rk.advance();
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
      load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[w]), kRows * 128, row, head, bar);
      load_panels<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[w]), kRows * 128, row, head, bar);
      row += tile_rows(p) / kGroups;
    }
    parity ^= 1;
  }
};

DEVICE void find_rows(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.dout);
  prefetch_map(&p.dq_map);
  RowLoader load{p, s};
  prefetch_items(p, s.passes, load);
  await_earlier_kernels();
}

DEVICE void produce(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  Loader loader{p, s};
  walk_blocks(p, s.passes, loader);
  loader.describe(kEnd, make_int4(0, 0, 0, 0));
}

// ---- consumers ----

struct Consumer {
  const BackwardPartParams& p;
  Shared& s;
  const int warpgroup, lane;
  const PlaceOfThread place;
  Ring<kStages> rk;
  Ring<kStagesV> rv;
  u32 rows_parity = 0;
  int flags;  // of the block whose logits are being computed
  float lse[2], delta[2];

  DEVICE Consumer(const BackwardPartParams& p, Shared& s, int warpgroup)
      : p(p), s(s), warpgroup(warpgroup), lane(threadIdx.x % 32), place(p, warpgroup) {}

  DEVICE void take_turn() const {
    if (kTurns) named_sync(1 + warpgroup, 256);
  }
  DEVICE void pass_turn() const {
    if (kTurns) named_arrive(2 - warpgroup, 256);
  }

  DEVICE void load_stats(const BlockInfo& of) {
    const int head = (of.head_rows & 0xffff) >> p.log2_packed;
    const i64 from = static_cast<i64>(head) * p.stats_row + (of.first_row << p.log2_packed) + place.index;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool valid = place.row + place.step * r < of.head_rows >> 16;
      lse[r] = valid ? __ldg(p.lse + from + 8 * r) : 0.f;
      delta[r] = valid ? __ldg(p.delta + from + 8 * r) : 0.f;
    }
  }

  DEVICE BlockInfo block_info() const {
    const int4 x = s.blocks.info[rk.index];
    return {x.x, uniform(x.y), x.z, x.w};
  }

  // Replaces logits by P, times the derivative of the softcap.
  DEVICE void form_probs(float (&x)[kKeys / 2]) {
    if (SOFTCAP) apply_softcap(x, p.softcap_factor);
    if (flags & (1 << warpgroup)) {
      const int2* of_row = s.blocks.bounds[rk.index] + place.row;
      const int2 bounds[2] = {of_row[0], of_row[place.step]};
      apply_mask(x, s.blocks.info[rk.index].x + 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const float prob = exp2_fast(fmaf(x[i], p.scale_log2, -lse[(i >> 1) & 1]));
      x[i] = SOFTCAP ? prob * softcap_slope(x[i]) : prob;
    }
  }

  DEVICE void form_ds(const float (&probs)[kKeys / 2], const float (&dp)[kKeys / 2], u32 (&ds)[kKeys / 4]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i)
      ds[i] = T::pack(probs[2 * i] * (dp[2 * i] + delta[i & 1]), probs[2 * i + 1] * (dp[2 * i + 1] + delta[i & 1]));
  }

  // Waits for S and dP, the last wgmmas in flight, and computes dS.
  DEVICE void await_ds(float (&x)[kKeys / 2], float (&y)[kKeys / 2], u32 (&ds)[kKeys / 4]) {
    wgmma_wait<1>();
    pin(x);
    form_probs(x);
    wgmma_wait<0>();
    pin(y);
    release(s.v_empty[rv.index], lane);
    rv.advance();
    form_ds(x, y, ds);
  }

  // All key blocks of one work item; `flags` are those of the first.
  DEVICE void accumulate(float (&dq)[kHeadDim / 2]) {
    float x[kKeys / 2], y[kKeys / 2];
    u32 ds[kKeys / 4];
    const Operand q(smem_address(s.q[warpgroup])), dout(smem_address(s.dout[warpgroup]));
    barrier_wait(smem_address(&s.rows_full[warpgroup]), rows_parity);
    rows_parity ^= 1;
    barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
    take_turn();
    issue_logits<kHeadDim, kKeys>(x, q, Operand(smem_address(s.k[rk.index])));
    issue_logits<kHeadDimV, kKeys>(y, dout, Operand(smem_address(s.v[rv.index])));
    pass_turn();
    await_ds(x, y, ds);
    // At the start of each iteration dS of the block is in registers and no wgmma is in flight: ptxas serializes all
    // wgmmas if one is in flight across the back edge of the loop.
    while (true) {
      // kLast always ends the loop: num_tiles is never negative. As the loop's condition, the compiler would rotate the
      // loop and duplicate the test, after which ptxas runs out of registers and serializes the wgmmas.
      if (flags & kLast) {
        if (p.num_tiles >= 0) break;
        flags = uniform(flags + 1);
      }
      const int now = rk.index;
      rk.advance();
      barrier_wait(smem_address(&s.blocks.full[rk.index]), rk.parity);
      barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
      take_turn();
      issue_weighted<kHeadDim, kKeys>(dq, ds, Operand(smem_address(s.k[now]), kKeys * 128));
      issue_logits<kHeadDim, kKeys>(x, q, Operand(smem_address(s.k[rk.index])));
      issue_logits<kHeadDimV, kKeys>(y, dout, Operand(smem_address(s.v[rv.index])));
      pass_turn();
      flags = block_info().flags;
      wgmma_wait<2>();
      pin(dq);
      pin(ds);
      release(s.blocks.empty[now], lane);
      await_ds(x, y, ds);
    }
    release(s.rows_empty[warpgroup], lane);
    take_turn();
    issue_weighted<kHeadDim, kKeys>(dq, ds, Operand(smem_address(s.k[rk.index]), kKeys * 128));
    pass_turn();
    wgmma_wait<0>();
    pin(dq);
    pin(ds);
    release(s.blocks.empty[rk.index], lane);
    rk.advance();
  }

  DEVICE void run() {
    if (warpgroup == 1) pass_turn();
    const u32 staging = p.store == kStoreHalf ? s.dq.of_warp(threadIdx.x / 32 - 4) : 0;
    while (true) {
      barrier_wait(smem_address(&s.blocks.full[rk.index]), rk.parity);
      const BlockInfo item = block_info();
      flags = item.flags;
      if (flags & kEnd) break;
      float dq[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      if (flags & kNothing) {
        release(s.blocks.empty[rk.index], lane);
        rk.advance();
        if (p.store >= kAddFloat) continue;
      } else {
        load_stats(item);
        accumulate(dq);
      }
      const int head = (item.head_rows & 0xffff) + place.head, rows = item.head_rows >> 16;
      const i64 at = item.first_row + place.row;
      if (staging && place.warp_within(p, rows)) {
        const float scales[2] = {p.scale, p.scale};
        store_staged<T, kHeadDim>(&p.dq_map, staging, 16 * kPanel * sizeof(u16), dq, scales, at, head, lane);
        continue;
      }
      const bool valid[2] = {place.row < rows, place.row + place.step < rows};
      store_gradient<T, kHeadDim>(p.store, p.dq, at * p.dq_row + head * p.dq_head, place.step * p.dq_row, valid, dq,
                                  p.scale, lane);
    }
    if (warpgroup == 0) take_turn();
    if (lane == 0) bulk_wait_read();
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_backward_queries(const __grid_constant__ BackwardPartParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffers(s.rows_full, s.rows_empty, 4);
    init_buffers(s.blocks.full, s.blocks.empty, 4 * kGroups);
    init_buffers(s.v_full, s.v_empty, 4 * kGroups);
    init_buffers(s.passes.full, s.passes.empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // 24 * 128 + 240 * 256: all registers of the block
    if (threadIdx.x == 0) produce(p, s);
    if (threadIdx.x == 32) find_rows(p, s);
  } else {
    registers_grow<240>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
