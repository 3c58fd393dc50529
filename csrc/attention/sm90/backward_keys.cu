// Attention backward in parts for sm_90a, dK and dV. A work item is a tile of 64 keys of one key head, with some or all
// query heads of its group.
//
// The two consumer warpgroups share the 64 keys. One computes the transposed scores, P and dV, the other dP, dS and dK:
// each has a wgmma for 64 x WIDTH scores or dP, and one for its gradient whose first operand is in registers. Only P in
// 16 bits (times the derivative of the softcap) is passed between them, from each thread to the thread with the same
// elements. While one does elementwise work, the tensor cores work for the other.
//
// The tile plan is that of the transposed mask: rows are keys, columns are queries.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), CAPTURED (0 or 1: mask_numbers.cuh),
// WIDTH (queries of a block), STAGES (of q, and of dout).

#include "backward_parts.cuh"
#include "gradients.cuh"
#include "row_products.cuh"
#include "softmax.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
constexpr int kQueries = WIDTH;
constexpr int kStages = STAGES;
using T = DTYPE;

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

struct Shared {
  alignas(kSwizzleAtomBytes) u16 k[kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 v[kHeadDimV / kPanel][kWarpgroupRows][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kQueries][kPanel];
  u16 dout[kStages][kHeadDimV / kPanel][kQueries][kPanel];
  // P, from each thread of one warpgroup to the same thread of the other
  uint4 probs[kQueries / 16][kWarpgroupThreads];
  float lse[kStages][kQueries], delta[kStages][kQueries];
  u64 kv_full, kv_empty;
  u64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  u64 probs_full[4], probs_empty[4];  // for each pair of warps
  u64 item_full[2], item_empty[2];
  int4 item[2];
};

constexpr u32 kBytesKV = sizeof(Shared::k) + sizeof(Shared::v);
constexpr u32 kBytesQ = sizeof(Shared::q) / kStages;
constexpr u32 kBytesDout = sizeof(Shared::dout) / kStages;
constexpr u32 kBytesRow = kQueries * sizeof(float);

// Decodes an item index; the item's head is the first of its query heads.
DEVICE int4 decode_item(const BackwardPartParams& p, int item) {
  const int per_tile = p.num_heads / p.group * p.splits;
  if (item >= OF_MASK(p, num_tiles) * per_tile) return make_int4(-1, 0, 0, 0);
  const int tile = item / per_tile, part = item - tile * per_tile;
  return pack_item(__ldg(p.plan.tiles + tile), part * (p.group / p.splits));
}

// ---- producer: one thread ----

DEVICE void produce(const BackwardPartParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  prefetch_map(&p.dout);
  PipelineState<kStages> stage;
  PipelineState<2> slot;
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
    const int first_head = item_head(item), heads = p.group / p.splits, head_kv = first_head / p.group;
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    const u32 kv = smem_address(&s.kv_full);
    barrier_expect_bytes(kv, kBytesKV);
    load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k), kWarpgroupRows * kPanelRowBytes, item.x, head_kv, kv);
    load_panels<kHeadDimV / kPanel>(&p.v, smem_address(s.v), kWarpgroupRows * kPanelRowBytes, item.x, head_kv, kv);
    int segment = item.z, n = 0, h = 0;
    int4 range = __ldg(p.plan.segments + 2 * segment);
    while (true) {
      const int i = stage.index, row = range.x + n * STEP_OF(p.plan), head = first_head + h;
      u32 bar = smem_address(&s.q_full[i]);
      barrier_wait(smem_address(&s.q_empty[i]), stage.parity ^ 1);
      barrier_expect_bytes(bar, kBytesQ + kBytesRow);
      load_packed<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kQueries * kPanelRowBytes, row, head, p.log2_packed,
                                     bar);
      const i64 at = static_cast<i64>(head) * p.stats_row + row;
      load_bytes(smem_address(s.lse[i]), p.lse + at, kBytesRow, bar);
      bar = smem_address(&s.dout_full[i]);
      barrier_wait(smem_address(&s.dout_empty[i]), stage.parity ^ 1);
      barrier_expect_bytes(bar, kBytesDout + kBytesRow);
      load_packed<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[i]), kQueries * kPanelRowBytes, row, head,
                                      p.log2_packed, bar);
      load_bytes(smem_address(s.delta[i]), p.delta + at, kBytesRow, bar);
      stage.advance();
      if (OF_MASK(p, heads_inner)) {
        if (++h < heads) continue;
        h = 0;
      }
      if (++n < range.y) continue;
      n = 0;
      if (++segment == item.w) {
        if (OF_MASK(p, heads_inner) || ++h == heads) break;
        segment = item.z;
      }
      range = __ldg(p.plan.segments + 2 * segment);
    }
  }
  let_next_kernel_start();
  leave(p.counter);
}

// ---- consumers ----

// Iterates over the blocks of all segments of a tile.
struct BlockWalk {
  const TilePlan& plan;
  int segment, end_segment, row;
  int n, count, column, full_begin, full_end;  // n, column: index in the segment and first column of the block

  // `row`: first of this thread's two rows in the tile; the other is 8 below.
  DEVICE BlockWalk(const TilePlan& plan, int row) : plan(plan), row(row) {}
  DEVICE void start(int first_segment, int past_segment) {
    segment = uniform(first_segment);
    end_segment = uniform(past_segment);
    if (segment < end_segment) open();
  }
  DEVICE void open() {
    const int4 range = __ldg(plan.segments + 2 * segment);
    n = 0;
    column = uniform(range.x);
    count = uniform(range.y);
    full_begin = uniform(range.z);
    full_end = uniform(range.w);
  }
  DEVICE bool advance() {
    column += STEP_OF(plan);
    if (++n < count) return true;
    if (++segment >= end_segment) return false;
    open();
    return true;
  }
  DEVICE bool masked() const { return n < full_begin || n >= full_end; }
  DEVICE void load_bounds(int2 (&bounds)[2]) const {
    const int2* b = plan.bounds + static_cast<i64>(segment) * kWarpgroupRows + row;
    bounds[0] = __ldg(b);
    bounds[1] = __ldg(b + 8);
  }
};

// kOfValues: the warpgroup that computes P and dV; else the one that computes dS and dK.
template <bool kOfValues>
struct Consumer {
  static constexpr int kDepth = kOfValues ? kHeadDim : kHeadDimV;
  static constexpr int kColumns = kOfValues ? kHeadDimV : kHeadDim;

  const BackwardPartParams& p;
  Shared& s;
  const int thread, lane, warp, row;  // thread of the warpgroup; row: first of this thread's keys in the tile
  PipelineState<kStages> stage;
  u32 probs_parity = kOfValues ? 1 : 0, kv_parity = 0;

  DEVICE Consumer(const BackwardPartParams& p, Shared& s)
      : p(p),
        s(s),
        thread(threadIdx.x % kWarpgroupThreads),
        lane(threadIdx.x % 32),
        warp(uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads)),
        row(threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + threadIdx.x % kWarpThreads / 4) {}

  // Barriers and buffers of the operand of the scores or dP, and of the operand of the gradient.
  DEVICE u64& scores_full(int i) { return kOfValues ? s.q_full[i] : s.dout_full[i]; }
  DEVICE u64& scores_empty(int i) { return kOfValues ? s.q_empty[i] : s.dout_empty[i]; }
  DEVICE u64& gradient_full(int i) { return kOfValues ? s.dout_full[i] : s.q_full[i]; }
  DEVICE u64& gradient_empty(int i) { return kOfValues ? s.dout_empty[i] : s.q_empty[i]; }
  DEVICE u32 scores_block(int i) { return kOfValues ? smem_address(s.q[i]) : smem_address(s.dout[i]); }
  DEVICE u32 gradient_block(int i) { return kOfValues ? smem_address(s.dout[i]) : smem_address(s.q[i]); }
  DEVICE u32 own_keys() { return kOfValues ? smem_address(s.k) : smem_address(s.v); }

  DEVICE void send(const u32 (&word)[kQueries / 4]) {
    barrier_wait(smem_address(&s.probs_empty[warp]), probs_parity);
    probs_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
      s.probs[i][thread] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
    release(s.probs_full[warp], lane);
  }

  DEVICE void form_probs(float (&scores_t)[kQueries / 2], u32 (&probs_t)[kQueries / 4], const BlockWalk& walk) {
    if (SOFTCAP) apply_softcap(scores_t, p.softcap_factor);
    if (walk.masked()) {
      int2 bounds[2];
      walk.load_bounds(bounds);
      apply_mask(scores_t, walk.column + 2 * (lane % 4), bounds);
    }
    const float2* lse = reinterpret_cast<const float2*>(s.lse[stage.index]) + lane % 4;
    u32 sloped_t[kQueries / 4];
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 two = lse[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x0 = scores_t[4 * j + 2 * r], x1 = scores_t[4 * j + 2 * r + 1];
        const float p0 = exp2_fast(fmaf(x0, p.scale_log2, -two.x)), p1 = exp2_fast(fmaf(x1, p.scale_log2, -two.y));
        probs_t[2 * j + r] = T::pack(p0, p1);
        sloped_t[2 * j + r] = SOFTCAP ? T::pack(p0 * softcap_slope(x0), p1 * softcap_slope(x1)) : probs_t[2 * j + r];
      }
    }
    send(sloped_t);
  }

  DEVICE void form_ds(const float (&dp_t)[kQueries / 2], u32 (&ds_t)[kQueries / 4]) {
    barrier_wait(smem_address(&s.probs_full[warp]), probs_parity);
    probs_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
      const uint4 word = s.probs[i][thread];
      ds_t[4 * i] = word.x, ds_t[4 * i + 1] = word.y, ds_t[4 * i + 2] = word.z, ds_t[4 * i + 3] = word.w;
    }
    release(s.probs_empty[warp], lane);
    const float2* delta = reinterpret_cast<const float2*>(s.delta[stage.index]) + lane % 4;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 two = delta[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        ds_t[2 * j + r] =
            T::pack(T::low(ds_t[2 * j + r]) * (dp_t[i] + two.x), T::high(ds_t[2 * j + r]) * (dp_t[i + 1] + two.y));
      }
    }
  }

  DEVICE void form(float (&scores_or_dp_t)[kQueries / 2], u32 (&probs_or_ds_t)[kQueries / 4], const BlockWalk& walk) {
    if constexpr (kOfValues)
      form_probs(scores_or_dp_t, probs_or_ds_t, walk);
    else
      form_ds(scores_or_dp_t, probs_or_ds_t);
    release(scores_empty(stage.index), lane);
  }

  // Advances to the next block, in the order of `produce`; false after the last.
  DEVICE bool advance(BlockWalk& walk, int& h, int4 item) const {
    const int heads = p.group / p.splits;
    if (OF_MASK(p, heads_inner)) {
      if (++h < heads) return true;
      h = 0;
      return walk.advance();
    }
    if (walk.advance()) return true;
    if (++h == heads) return false;
    walk.start(item.z, item.w);
    return true;
  }

  // All query blocks of one work item.
  DEVICE void accumulate(int4 item, float (&gradient)[kColumns / 2]) {
    float scores_or_dp_t[kQueries / 2];
    u32 probs_or_ds_t[kQueries / 4];
    BlockWalk walk(p.plan, row);
    walk.start(item.z, item.w);
    int h = 0;
    const Operand own(own_keys());
    barrier_wait(smem_address(&s.kv_full), kv_parity);
    kv_parity ^= 1;
    barrier_wait(smem_address(&scores_full(stage.index)), stage.parity);
    issue_scores<T, kDepth, kQueries>(scores_or_dp_t, own, Operand(scores_block(stage.index)));
    wgmma_wait<0>();
    fence_operand(scores_or_dp_t);
    form(scores_or_dp_t, probs_or_ds_t, walk);
    // At the start of each iteration the first operand of the gradient is in registers and no wgmma is in flight: ptxas
    // serializes all wgmmas if one is in flight across the back edge of the loop.
    bool more = true;
    while (more) {
      const int now = stage.index;
      barrier_wait(smem_address(&gradient_full(now)), stage.parity);
      issue_weighted<T, kColumns, kQueries>(gradient, probs_or_ds_t,
                                            Operand(gradient_block(now), kQueries * kPanelRowBytes));
      more = advance(walk, h, item);
      stage.advance();
      // After the last block these products are computed from k or v and not used: ptxas would also serialize the
      // wgmmas if one were on one side of a branch.
      const Operand next(more ? scores_block(stage.index) : own_keys());
      if (more) barrier_wait(smem_address(&scores_full(stage.index)), stage.parity);
      issue_scores<T, kDepth, kQueries>(scores_or_dp_t, own, next);
      wgmma_wait<1>();
      fence_operand(gradient);
      fence_operand(probs_or_ds_t);
      release(gradient_empty(now), lane);
      wgmma_wait<0>();
      fence_operand(scores_or_dp_t);
      if (more) form(scores_or_dp_t, probs_or_ds_t, walk);
    }
    release(s.kv_empty, lane);
  }

  DEVICE void run() {
    PipelineState<2> slot;
    while (true) {
      barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
      const int4 item = s.item[slot.index];
      release(s.item_empty[slot.index], lane);
      slot.advance();
      if (item.x < 0) break;
      float gradient[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) gradient[i] = 0.f;
      if (item.z < item.w)
        accumulate(item, gradient);
      else if (p.store == kAddFloat)
        continue;
      const i64 key = item.x + row;
      const bool valid[2] = {row < item_rows(item), row + 8 < item_rows(item)};
      const int head_kv = item_head(item) / p.group;
      const i64 row_stride = kOfValues ? p.dv_row : p.dk_row, head_stride = kOfValues ? p.dv_head : p.dk_head;
      store_gradient<T, kColumns>(p.store, kOfValues ? p.dv : p.dk, key * row_stride + head_kv * head_stride,
                                  8 * row_stride, valid, gradient, kOfValues ? 1.f : p.scale, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_backward_keys(const __grid_constant__ BackwardPartParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.kv_full, s.kv_empty, 4 * kGroups);
    init_buffers(s.q_full, s.q_empty, 4 * kGroups);
    init_buffers(s.dout_full, s.dout_empty, 4 * kGroups);
    init_buffers(s.probs_full, s.probs_empty, 1);
    init_buffers(s.item_full, s.item_empty, 4 * kGroups);
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, s);
  } else {
    registers_grow<kConsumerRegisters>();
    if (uniform(threadIdx.x / kWarpgroupThreads) == 1)
      Consumer<true>(p, s).run();
    else
      Consumer<false>(p, s).run();
  }
}
