// Attention backward in parts for sm_90a, dK and dV. A work item is a tile of 64 keys of one key head, with some or all
// query heads of its group.
//
// The two consumer warpgroups share the 64 keys. One computes the transposed logits, P and dV, the other dP, dS and dK:
// each has a wgmma for 64 x WIDTH logits, and one for its gradient whose first operand is in registers. Only P in 16
// bits (times the derivative of the softcap) is passed between them, from each thread to the thread with the same
// elements. While one does elementwise work, the tensor cores work for the other.
//
// The tile plan is that of the transposed mask: rows are keys, columns are queries.
//
// Compile-time, in addition to those of backward_parts.cuh: WIDTH (queries of a block), STAGES (of q, and of dout).

#include "backward_parts.cuh"

constexpr int kQueries = WIDTH;
constexpr int kStages = STAGES;

struct Shared {
  alignas(1024) u16 k[kHeadDim / kPanel][kRows][kPanel];
  u16 v[kHeadDimV / kPanel][kRows][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kQueries][kPanel];
  u16 dout[kStages][kHeadDimV / kPanel][kQueries][kPanel];
  uint4 probs[kQueries / 16][128];  // P, from each thread of one warpgroup to the same thread of the other
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
    const int first_head = item_head(item), heads = p.group / p.splits, head_kv = first_head / p.group;
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    const u32 kv = smem_address(&s.kv_full);
    barrier_expect_bytes(kv, kBytesKV);
    load_panels<kHeadDim / kPanel>(&p.k, smem_address(s.k), kRows * 128, item.x, head_kv, kv);
    load_panels<kHeadDimV / kPanel>(&p.v, smem_address(s.v), kRows * 128, item.x, head_kv, kv);
    int pass = item.z, n = 0, h = 0;
    int4 range = __ldg(p.plan.passes + 2 * pass);
    while (true) {
      const int i = ring.index, row = range.x + n * STEP_OF(p.plan), head = first_head + h;
      u32 bar = smem_address(&s.q_full[i]);
      barrier_wait(smem_address(&s.q_empty[i]), ring.parity ^ 1);
      barrier_expect_bytes(bar, kBytesQ + kBytesRow);
      load_packed<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kQueries * 128, row, head, p.log2_packed, bar);
      const i64 at = static_cast<i64>(head) * p.stats_row + row;
      load_bytes(smem_address(s.lse[i]), p.lse + at, kBytesRow, bar);
      bar = smem_address(&s.dout_full[i]);
      barrier_wait(smem_address(&s.dout_empty[i]), ring.parity ^ 1);
      barrier_expect_bytes(bar, kBytesDout + kBytesRow);
      load_packed<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[i]), kQueries * 128, row, head, p.log2_packed, bar);
      load_bytes(smem_address(s.delta[i]), p.delta + at, kBytesRow, bar);
      ring.advance();
      if (OF_MASK(p, heads_inner)) {
        if (++h < heads) continue;
        h = 0;
      }
      if (++n < range.y) continue;
      n = 0;
      if (++pass == item.w) {
        if (OF_MASK(p, heads_inner) || ++h == heads) break;
        pass = item.z;
      }
      range = __ldg(p.plan.passes + 2 * pass);
    }
  }
  let_next_kernel_start();
  leave(p.counter);
}

// ---- consumers ----

// Iterates over the blocks of all passes of a tile.
struct BlockWalk {
  const TilePlan& plan;
  int pass, end_pass, row;
  int n, count, column, full_begin, full_end;  // n, column: index in the pass and first column of the block

  // `row`: first of this thread's two rows in the tile; the other is 8 below.
  DEVICE BlockWalk(const TilePlan& plan, int row) : plan(plan), row(row) {}
  DEVICE void start(int first_pass, int past_pass) {
    pass = uniform(first_pass);
    end_pass = uniform(past_pass);
    if (pass < end_pass) open();
  }
  DEVICE void open() {
    const int4 range = __ldg(plan.passes + 2 * pass);
    n = 0;
    column = uniform(range.x);
    count = uniform(range.y);
    full_begin = uniform(range.z);
    full_end = uniform(range.w);
  }
  DEVICE bool advance() {
    column += STEP_OF(plan);
    if (++n < count) return true;
    if (++pass >= end_pass) return false;
    open();
    return true;
  }
  DEVICE bool masked() const { return n < full_begin || n >= full_end; }
  DEVICE void load_bounds(int2 (&bounds)[2]) const {
    const int2* b = plan.bounds + static_cast<i64>(pass) * kRows + row;
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
  Ring<kStages> ring;
  u32 probs_parity = kOfValues ? 1 : 0, kv_parity = 0;

  DEVICE Consumer(const BackwardPartParams& p, Shared& s)
      : p(p),
        s(s),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        warp(uniform(threadIdx.x % 128 / 32)),
        row(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

  // Barriers and buffers of the operand of the logits, and of the operand of the gradient.
  DEVICE u64& logits_full(int i) { return kOfValues ? s.q_full[i] : s.dout_full[i]; }
  DEVICE u64& logits_empty(int i) { return kOfValues ? s.q_empty[i] : s.dout_empty[i]; }
  DEVICE u64& gradient_full(int i) { return kOfValues ? s.dout_full[i] : s.q_full[i]; }
  DEVICE u64& gradient_empty(int i) { return kOfValues ? s.dout_empty[i] : s.q_empty[i]; }
  DEVICE u32 logits_block(int i) { return kOfValues ? smem_address(s.q[i]) : smem_address(s.dout[i]); }
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

  DEVICE void form_probs(float (&x)[kQueries / 2], u32 (&probs)[kQueries / 4], const BlockWalk& walk) {
    if (SOFTCAP) apply_softcap(x, p.softcap_factor);
    if (walk.masked()) {
      int2 bounds[2];
      walk.load_bounds(bounds);
      apply_mask(x, walk.column + 2 * (lane % 4), bounds);
    }
    const float2* lse = reinterpret_cast<const float2*>(s.lse[ring.index]) + lane % 4;
    u32 sloped[kQueries / 4];
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 two = lse[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x0 = x[4 * j + 2 * r], x1 = x[4 * j + 2 * r + 1];
        const float p0 = exp2_fast(fmaf(x0, p.scale_log2, -two.x)), p1 = exp2_fast(fmaf(x1, p.scale_log2, -two.y));
        probs[2 * j + r] = T::pack(p0, p1);
        sloped[2 * j + r] = SOFTCAP ? T::pack(p0 * softcap_slope(x0), p1 * softcap_slope(x1)) : probs[2 * j + r];
      }
    }
    send(sloped);
  }

  DEVICE void form_ds(const float (&dp)[kQueries / 2], u32 (&ds)[kQueries / 4]) {
    barrier_wait(smem_address(&s.probs_full[warp]), probs_parity);
    probs_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
      const uint4 word = s.probs[i][thread];
      ds[4 * i] = word.x, ds[4 * i + 1] = word.y, ds[4 * i + 2] = word.z, ds[4 * i + 3] = word.w;
    }
    release(s.probs_empty[warp], lane);
    const float2* delta = reinterpret_cast<const float2*>(s.delta[ring.index]) + lane % 4;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 two = delta[4 * j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        ds[2 * j + r] = T::pack(T::low(ds[2 * j + r]) * (dp[i] + two.x), T::high(ds[2 * j + r]) * (dp[i + 1] + two.y));
      }
    }
  }

  DEVICE void form(float (&x)[kQueries / 2], u32 (&word)[kQueries / 4], const BlockWalk& walk) {
    if constexpr (kOfValues)
      form_probs(x, word, walk);
    else
      form_ds(x, word);
    release(logits_empty(ring.index), lane);
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
    float x[kQueries / 2];
    u32 word[kQueries / 4];
    BlockWalk walk(p.plan, row);
    walk.start(item.z, item.w);
    int h = 0;
    const Operand own(own_keys());
    barrier_wait(smem_address(&s.kv_full), kv_parity);
    kv_parity ^= 1;
    barrier_wait(smem_address(&logits_full(ring.index)), ring.parity);
    issue_logits<kDepth, kQueries>(x, own, Operand(logits_block(ring.index)));
    wgmma_wait<0>();
    pin(x);
    form(x, word, walk);
    // At the start of each iteration the first operand of the gradient is in registers and no wgmma is in flight: ptxas
    // serializes all wgmmas if one is in flight across the back edge of the loop.
    bool more = true;
    while (more) {
      const int now = ring.index;
      barrier_wait(smem_address(&gradient_full(now)), ring.parity);
      issue_weighted<kColumns, kQueries>(gradient, word, Operand(gradient_block(now), kQueries * 128));
      more = advance(walk, h, item);
      ring.advance();
      // After the last block these logits are computed from k or v and not used: ptxas would also serialize the wgmmas
      // if one were on one side of a branch.
      const Operand next(more ? logits_block(ring.index) : own_keys());
      if (more) barrier_wait(smem_address(&logits_full(ring.index)), ring.parity);
      issue_logits<kDepth, kQueries>(x, own, next);
      wgmma_wait<1>();
      pin(gradient);
      pin(word);
      release(gradient_empty(now), lane);
      wgmma_wait<0>();
      pin(x);
      if (more) form(x, word, walk);
    }
    release(s.kv_empty, lane);
  }

  DEVICE void run() {
    Ring<2> slot;
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

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_backward_keys(const __grid_constant__ BackwardPartParams p) {
  extern __shared__ __align__(1024) u8 memory[];
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
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // 24 * 128 + 240 * 256: all registers of the block
    if (threadIdx.x == 0) produce(p, s);
  } else {
    registers_grow<240>();
    if (uniform(threadIdx.x / 128) == 1)
      Consumer<true>(p, s).run();
    else
      Consumer<false>(p, s).run();
  }
}
