// Attention backward in parts for sm_90a, dQ: one work item is 128 queries of one head.
//
// As in the forward, a consumer warpgroup owns 64 rows and goes over all key blocks that any row of the tile sees: S,
// dP, then dQ += dS K with dS from registers. dQ of a block is computed under the logits of the next.
//
// Compile-time, beside those of backward_parts.cuh: WIDTH (keys of a block), STAGES (of keys), STAGES_V (of values).

#include "backward_parts.cuh"

constexpr int kKeys = WIDTH;
constexpr int kStages = STAGES, kStagesV = STAGES_V;

struct Shared {
  alignas(1024) u16 q[kGroups][kHeadDim / kPanel][kRows][kPanel];
  u16 dout[kGroups][kHeadDimV / kPanel][kRows][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kKeys][kPanel];
  u16 v[kStagesV][kHeadDimV / kPanel][kKeys][kPanel];
  u64 rows_full[kGroups], rows_empty[kGroups];
  u64 k_full[kStages], k_empty[kStages], v_full[kStagesV], v_empty[kStagesV];
  u64 item_full[2], item_empty[2];
  int4 item[2];
};

constexpr u32 kBytesRows = (sizeof(Shared::q) + sizeof(Shared::dout)) / kGroups;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStagesV;

DEVICE int4 decode_item(const BackwardPartParams& p, int item) {
  return section_item(p.plan, p.num_tiles, p.num_heads, p.head_section, item);
}

// ---- producer: one thread ----

DEVICE void load_rows(const BackwardPartParams& p, Shared& s, int row, int head, u32 parity) {
  for (int w = 0; w < kGroups; ++w) {
    barrier_wait(smem_address(&s.rows_empty[w]), parity);
    const u32 bar = smem_address(&s.rows_full[w]);
    barrier_expect_bytes(bar, kBytesRows);
    load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[w]), kRows * 128, row + w * kRows, head, bar);
    load_panels<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[w]), kRows * 128, row + w * kRows, head, bar);
  }
}

DEVICE void produce(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  prefetch_map(&p.dout);
  Ring<kStages> rk;
  Ring<kStagesV> rv;
  Ring<2> slot;
  u32 rows_parity = 1;
  int next = blockIdx.x;
  while (true) {
    const int4 item = decode_item(p, next);
    barrier_wait(smem_address(&s.item_empty[slot.index]), slot.parity ^ 1);
    s.item[slot.index] = item;
    barrier_arrive(smem_address(&s.item_full[slot.index]));
    slot.advance();
    if (item.x < 0) break;
    next = gridDim.x + atomicAdd(p.counter, 1);
    const int head = item_head(item), head_kv = head / p.group;
    bool first = true;
    for (int pass = item.z; pass < item.w; ++pass) {
      const int4 range = __ldg(p.plan.passes + 2 * pass);
      for (int n = 0; n < range.y; ++n) {
        const int key = range.x + n * static_cast<int>(p.plan.step);
        u32 bar = smem_address(&s.k_full[rk.index]);
        barrier_wait(smem_address(&s.k_empty[rk.index]), rk.parity ^ 1);
        barrier_expect_bytes(bar, kBytesK);
        load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k[rk.index]), kKeys * 128, key, head_kv, bar);
        rk.advance();
        if (first) load_rows(p, s, item.x, head, rows_parity);
        if (first) rows_parity ^= 1;
        first = false;
        bar = smem_address(&s.v_full[rv.index]);
        barrier_wait(smem_address(&s.v_empty[rv.index]), rv.parity ^ 1);
        barrier_expect_bytes(bar, kBytesV);
        load_panels<kHeadDimV / kPanel>(&p.v, smem_address(s.v[rv.index]), kKeys * 128, key, head_kv, bar);
        rv.advance();
      }
    }
  }
  leave(p.counter);
}

// ---- consumers ----

struct Consumer {
  const BackwardPartParams& p;
  Shared& s;
  const int warpgroup, lane, row;  // row: first of this thread's rows in the tile
  Ring<kStages> rk;
  Ring<kStagesV> rv;
  u32 rows_parity = 0;
  float lse[2], delta[2];

  DEVICE Consumer(const BackwardPartParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row(warpgroup * kRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

  DEVICE void load_stats(int4 item) {
    const i64 from = static_cast<i64>(item_head(item)) * p.stats_row + item.x + row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool valid = row + 8 * r < item_rows(item);
      lse[r] = valid ? __ldg(p.lse + from + 8 * r) : 0.f;
      delta[r] = valid ? __ldg(p.delta + from + 8 * r) : 0.f;
    }
  }

  // Turns logits into P, times the slope of the softcap.
  DEVICE void form_probs(float (&x)[kKeys / 2], const BlockWalk<>& walk) {
    if (SOFTCAP) apply_softcap(x, p.softcap_factor);
    if (walk.masked()) {
      int2 bounds[2];
      walk.load_bounds(bounds);
      apply_mask(x, walk.column + 2 * (lane % 4), bounds);
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

  // All key blocks of one work item.
  DEVICE void accumulate(int4 item, float (&dq)[kHeadDim / 2]) {
    float x[kKeys / 2], y[kKeys / 2];
    u32 ds[kKeys / 4];
    BlockWalk<> walk(p.plan, warpgroup, row);
    walk.start(item.z, item.w);
    load_stats(item);
    const Operand q(smem_address(s.q[warpgroup])), dout(smem_address(s.dout[warpgroup]));
    barrier_wait(smem_address(&s.rows_full[warpgroup]), rows_parity);
    rows_parity ^= 1;
    barrier_wait(smem_address(&s.k_full[rk.index]), rk.parity);
    issue_logits<kHeadDim, kKeys>(x, q, Operand(smem_address(s.k[rk.index])));
    barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
    issue_logits<kHeadDimV, kKeys>(y, dout, Operand(smem_address(s.v[rv.index])));
    wgmma_wait<1>();
    pin(x);
    form_probs(x, walk);
    wgmma_wait<0>();
    pin(y);
    release(s.v_empty[rv.index], lane);
    rv.advance();
    form_ds(x, y, ds);
    // The loop opens with dS of its block in registers and no product under way: the assembler would serialise all
    // products if one crossed the place where the loop closes.
    bool more = true;
    while (more) {
      const int now = rk.index;
      issue_gradient<kHeadDim, kKeys>(dq, ds, Operand(smem_address(s.k[now]), kKeys * 128));
      more = walk.advance();
      rk.advance();
      // After the last block, S and dP are computed of what lies in the rows, for nobody: around a branch, too, the
      // assembler would serialise.
      const Operand next_k(more ? smem_address(s.k[rk.index]) : smem_address(s.q));
      const Operand next_v(more ? smem_address(s.v[rv.index]) : smem_address(s.dout));
      if (more) barrier_wait(smem_address(&s.k_full[rk.index]), rk.parity);
      issue_logits<kHeadDim, kKeys>(x, q, next_k);
      if (more) barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
      issue_logits<kHeadDimV, kKeys>(y, dout, next_v);
      wgmma_wait<2>();
      pin(dq);
      pin(ds);
      release(s.k_empty[now], lane);
      wgmma_wait<1>();
      pin(x);
      if (more) form_probs(x, walk);
      wgmma_wait<0>();
      pin(y);
      if (more) {
        release(s.v_empty[rv.index], lane);
        rv.advance();
        form_ds(x, y, ds);
      }
    }
    release(s.rows_empty[warpgroup], lane);
  }

  DEVICE void run() {
    Ring<2> slot;
    while (true) {
      barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
      const int4 item = s.item[slot.index];
      release(s.item_empty[slot.index], lane);
      slot.advance();
      if (item.x < 0) break;
      float dq[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      if (item.z < item.w)
        accumulate(item, dq);
      else if (p.store >= kAddFloat)
        continue;
      const i64 at = item.x + row;
      const bool valid[2] = {row < item_rows(item), row + 8 < item_rows(item)};
      store_gradient<T, kHeadDim>(p.store, p.dq, at * p.dq_row + item_head(item) * p.dq_head, p.dq_row, valid, dq,
                                  p.scale, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_backward_queries(const __grid_constant__ BackwardPartParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) {
      init_buffer(s.rows_full[i], s.rows_empty[i], 4);
    }
    for (int i = 0; i < kStages; ++i) {
      init_buffer(s.k_full[i], s.k_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kStagesV; ++i) {
      init_buffer(s.v_full[i], s.v_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      init_buffer(s.item_full[i], s.item_empty[i], 4 * kGroups);
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
