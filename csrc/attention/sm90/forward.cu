// Attention forward for sm_90a: one work item is 128 or 192 query rows of one head, or fewer of several that share
// their keys (row_tiles.cuh), computed completely.
//
// A producer streams keys and values through shared memory, a prefetch thread fetches the queries of the next item
// (row_tiles.cuh). Two or three consumer warpgroups own 64 rows each. Neither waits for the other: the softmax of one
// hides under the products of the other, and what stands alone at the ends of an item under products of the next: its
// first logits are computed while the output is written, which goes through shared memory (staging.cuh).
//
// The mask of a tile is a list of passes: a range of key blocks, and for each row the keys it sees. Only blocks outside
// the sub-range that all rows see completely apply the mask.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, GROUPS (of consumers), BLOCK_N, STAGES, Q_STAGES (of queries), STAGED (0 or 1:
// output leaves through the place of its queries, which takes two stages of them), DTYPE (Bf16 or Fp16), SOFTCAP (0 or
// 1), GATED (0 or 1: keys from a number on lie elsewhere, and arrive while the kernel runs: arrivals.cuh), CAPTURED (0
// or 1: mask_numbers.cuh).

constexpr int kGroups = GROUPS;  // consumer warpgroups

#include "../../common/wgmma.cuh"
#include "row_tiles.cuh"
#include "softmax.cuh"
#include "staging.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQStages = Q_STAGES;
constexpr int kRows = 64;         // query rows of a warpgroup
constexpr int kBehind = 1 << 30;  // a key behind the last: TMA writes zeros
using T = DTYPE;

#include "row_products.cuh"

struct ForwardParams {
  TensorMap q, k, v;
#if GATED
  TensorMap k_remote, v_remote;
#endif
  TensorMap out_map;
  TilePlan plan;
  void* out;
  float* lse;
  float* max_logits;      // of each head as ordered integers, or null
  const float* sink_lse;  // or null
  int* counter;           // three words, zero before and after
  i64 out_row, out_head;  // strides, elements
  i64 lse_row, lse_head;
  i64 sink_row, sink_head;
  // num_heads, group and head_section count heads packed together as one.
  int num_tiles, num_heads, group, head_section;
  float scale_log2;      // softmax scale * log2 e, or softcap * log2 e
  float softcap_factor;  // softmax scale / softcap
  float logit_scale;     // of max_logits
  int accumulate, out_fp32;
  int log2_packed;  // see row_tiles.cuh
  int long_blocks;  // of which the keys and values exceed the L2 cache
#if GATED
  Gate gate;
#endif
};

struct Shared {
  alignas(1024) u16 q[kQStages][kGroups][kHeadDim / kPanel][kRows][kPanel];  // and output on its way out
  u16 k[kStages][kHeadDim / kPanel][kBlockN][kPanel];
  u16 v[kStages][kHeadDimV / kPanel][kBlockN][kPanel];
  u64 q_full[kQStages][kGroups], q_empty[kQStages][kGroups];
  u64 v_full[kStages], v_empty[kStages];
  BlockBoard<kStages> blocks;
  PassBoard passes;
};

constexpr u32 kBytesQ = sizeof(Shared::q) / (kQStages * kGroups);
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStages;

// ---- producer: one thread ----

struct Loader {
  const ForwardParams& p;
  Shared& s;
  Ring<kStages> rk, rv;
  int previous = 0, previous_head = -1;  // block whose values have yet to be loaded; -1: none
#if GATED
  Arrivals arrivals;
#endif

  DEVICE void load_v(int key, int head) {
    const u32 bar = smem_address(&s.v_full[rv.index]);
    barrier_wait(smem_address(&s.v_empty[rv.index]), rv.parity ^ 1);
    barrier_expect_bytes(bar, kBytesV);
    load_panels<kHeadDimV / kPanel>(&OF_KEY(p, key, v), smem_address(s.v[rv.index]), kBlockN * 128, row_of_key(p, key),
                                    head, bar);
    rv.advance();
  }

  // Values follow the keys of the next block, be it of the next item, for they are used after them.
  DEVICE void later(int key, int head) {
    if (previous_head >= 0) load_v(previous, previous_head);
    previous = key, previous_head = head;
  }

  DEVICE void block(int key, int head_kv, int flags, int pass, const int4& item) {
    const u32 bar = announce_keys(s.blocks, rk, p, key, flags, pass, item, kBytesK);
#if GATED
    arrivals.await(p.gate, key - p.gate.first + kBlockN);
#endif
    load_panels<kHeadDim / kPanel>(&OF_KEY(p, key, k), smem_address(s.k[rk.index]), kBlockN * 128, row_of_key(p, key),
                                   head_kv, bar);
    rk.advance();
    later(key, head_kv);
  }

  // A block whose keys are what lies there.
  DEVICE void skip_k(int flags, const int4& item) {
    const u32 bar = announce(s.blocks, rk, 0, flags, item);
    if (flags & kMasked) {  // no row sees anything
      for (int i = 0; i < kTilePlaces; ++i) s.blocks.bounds[rk.index][i] = make_int2(0, 0);
      fence_async_proxy();
    }
    barrier_arrive(bar);
    rk.advance();
  }

  DEVICE void nothing(const int4& item) {
    skip_k(kMasked | kLast, item);
    later(kBehind, 0);  // zeros times zeros
  }
};

DEVICE void produce(const ForwardParams& p, Shared& s) {
  prefetch_map(&p.k);
  prefetch_map(&p.v);
#if GATED
  prefetch_map(&p.k_remote);
  prefetch_map(&p.v_remote);
#endif
  Loader loader{p, s};
  walk_blocks(p, s.passes, loader);
  loader.later(0, -1);
  loader.skip_k(kEnd, make_int4(0, 0, 0, 0));  // what is computed of it is not used
  if (GATED) await_earlier_kernels();          // what follows this kernel follows that which brings rows, too
}

// The prefetch thread's part: queries of an item as soon as there is place. Without `load`: they are what lies there.
struct QueryLoader {
  const ForwardParams& p;
  Shared& s;
  Ring<kQStages> ring;

  DEVICE void operator()(int row, int head, bool load) {
#pragma unroll 1
    for (int w = 0; w < kGroups; ++w) {
      const u32 bar = smem_address(&s.q_full[ring.index][w]);
      barrier_wait(smem_address(&s.q_empty[ring.index][w]), ring.parity ^ 1);
      if (load) {
        barrier_expect_bytes(bar, kBytesQ);
        load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[ring.index][w]), kRows * 128, row, head, bar);
        row += tile_rows(p) / kGroups;
      } else {
        barrier_arrive(bar);
      }
    }
    ring.advance();
  }
};

DEVICE void find_queries(const ForwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.out_map);
  QueryLoader load{p, s};
  prefetch_items(p, s.passes, load);
}

// ---- consumers ----

// Stores the rows of this thread, the second `step` after the first: factor * acc, and where kAdd, prior * what is
// there.
template <bool kFloat, bool kAdd>
DEVICE void store_rows(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const float (&factor)[2],
                       const float (&prior)[2], int row, int step, int end_row, int head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + step * r;
    const bool valid = at < end_row;
    const bool add = kAdd && prior[r] > 0.f;  // else the old output may be anything
    const i64 offset = at * p.out_row + head * p.out_head;
    float* out32 = static_cast<float*>(p.out) + offset + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(p.out) + offset;
#pragma unroll
    for (int g = 0; g < kHeadDimV / 32; ++g) {
      u32 word[4];
      float2 old[4];
#pragma unroll
      for (int j = 0; j < (kAdd ? 4 : 0); ++j) {
        const int column = 32 * g + 8 * j;
        u32 both = 0;
        old[j] = make_float2(0.f, 0.f);
        if (kFloat && add) old[j] = *reinterpret_cast<float2*>(out32 + column);
        if (!kFloat && add) both = *reinterpret_cast<u32*>(out16 + column + 2 * (lane % 4));
        if (!kFloat) old[j] = make_float2(T::low(both), T::high(both));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 32 * g + 8 * j, i = 4 * (4 * g + j) + 2 * r;
        float x = acc[i] * factor[r], y = acc[i + 1] * factor[r];
        if (kAdd) x += old[j].x * prior[r], y += old[j].y * prior[r];
        if (!kFloat)
          word[j] = T::pack(x, y);
        else if (valid)
          *reinterpret_cast<float2*>(out32 + column) = make_float2(x, y);
      }
      if (!kFloat) {
        transpose_quad(word, lane);  // now each thread stores 16 bytes
        if (valid)
          *reinterpret_cast<uint4*>(out16 + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// The choice is made once, not for each element: an item of few blocks would spend a fifth of its time on branches.
DEVICE void store_output(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const float (&factor)[2],
                         const float (&prior)[2], int row, int step, int end_row, int head, int lane) {
  if (!p.accumulate && !p.out_fp32)
    store_rows<false, false>(p, acc, factor, prior, row, step, end_row, head, lane);
  else if (!p.accumulate)
    store_rows<true, false>(p, acc, factor, prior, row, step, end_row, head, lane);
  else if (!p.out_fp32)
    store_rows<false, true>(p, acc, factor, prior, row, step, end_row, head, lane);
  else
    store_rows<true, true>(p, acc, factor, prior, row, step, end_row, head, lane);
}

// `staging`: where this warp's output goes through, if not 0: then all of its rows are the tile's.
DEVICE void finish(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const Softmax& softmax, u32 staging,
                   int row, int step, int end_row, int head, int lane) {
  float factor[2], lse[2], prior[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool any = sum > 0.f;
    lse[r] = any ? (softmax.reference[r] + log2_fast(sum)) * kLn2 : -kInfinity;
    factor[r] = any ? reciprocal_fast(sum) : 0.f;
  }
  if (p.sink_lse || p.accumulate) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + step * r;
      const float own = lse[r];
      if (at < end_row) {
        if (p.sink_lse) lse[r] = log_add(lse[r], __ldg(p.sink_lse + at * p.sink_row + head * p.sink_head));
        if (p.accumulate) {
          const float before = p.lse[at * p.lse_row + head * p.lse_head];
          lse[r] = log_add(lse[r], before);
          prior[r] = weight(before, lse[r]);
        }
      }
      factor[r] *= weight(own, lse[r]);
    }
    __syncwarp();  // all threads of a row have read before one writes
  }
  if (staging) store_staged<T, kHeadDimV>(&p.out_map, staging, kRows * 128, acc, factor, row, head, lane);
  if (lane % 4 == 0) {
    float* to = p.lse + row * p.lse_row + head * p.lse_head;
    if (row < end_row) *to = lse[0];
    if (row + step < end_row) to[step * p.lse_row] = lse[1];
  }
  if (p.max_logits) {
    float top = row < end_row ? softmax.max[0] : -kInfinity;
    if (row + step < end_row) top = fmaxf(top, softmax.max[1]);
    const int heads_end = 4 << p.log2_packed;  // of the threads before it, every four have a head of their own
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, i);
      if (i >= heads_end || i < 4) top = fmaxf(top, other);
    }
    if (lane < heads_end && lane % 4 == 0 && top > -kInfinity)
      atomic_max_logit(p.max_logits + head, top * p.logit_scale);
  }
  if (!staging) store_output(p, acc, factor, prior, row, step, end_row, head, lane);
}

DEVICE void consume(const ForwardParams& p, Shared& s, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const PlaceOfThread place(p, warpgroup);
  u32 leads = lane == 0;
  keep(leads);
  auto release = [&](u32 barrier) {
    if (leads) barrier_arrive(barrier);
  };
  Ring<kStages> rk, rv;
  Ring<kQStages> rq;
  // Sums of 32 bits, which stay in uniform registers.
  auto nth = [](const void* first, u32 bytes, int index) { return smem_address(first) + index * bytes; };
  int flags;  // of the block whose logits were computed last
  float logits[kBlockN / 2];
  auto wait_k = [&] { barrier_wait(nth(s.blocks.full, 8, rk.index), rk.parity); };
  auto wait_v = [&] { barrier_wait(nth(s.v_full, 8, rv.index), rv.parity); };
  auto wait_q = [&] { barrier_wait(nth(s.q_full, 8, rq.index * kGroups + warpgroup), rq.parity); };
  auto release_k = [&] {
    release(nth(s.blocks.empty, 8, rk.index));
    rk.advance();
  };
  auto release_v = [&] {
    release(nth(s.v_empty, 8, rv.index));
    rv.advance();
  };
  auto queries = [&] { return nth(s.q, kBytesQ, rq.index * kGroups + warpgroup); };
  auto keys = [&] { return nth(s.k, kBytesK, rk.index); };
  auto values = [&] { return Operand(nth(s.v, kBytesV, rv.index), kBlockN * 128); };
  auto shape = [&](float (&x)[kBlockN / 2]) {
    if (SOFTCAP) apply_softcap(x, p.softcap_factor);
    if (flags & (1 << warpgroup)) {
      const int2* of_row = s.blocks.bounds[rk.index] + place.row;
      const int2 bounds[2] = {of_row[0], of_row[place.step]};
      apply_mask(x, s.blocks.info[rk.index].x + 2 * (lane % 4), bounds);
      __syncwarp();  // all have read before one thread releases the block
    }
  };
  auto again = [&](float (&x)[kBlockN / 2]) {
    recompute_logits<kHeadDim, kBlockN>(x, queries(), keys(), threadIdx.x % 128 / 32 * 16 + lane / 4, lane);
    shape(x);
  };
  const bool look = p.max_logits != nullptr;
  const bool stages = STAGED && !p.accumulate && !p.out_fp32;
  int leaving = -1;  // stage of queries from where output is on its way out
  auto release_q = [&] {
    if (leaving < 0) return;
    if (lane == 0) bulk_wait_read();
    __syncwarp();
    release(nth(s.q_empty, 8, leaving * kGroups + warpgroup));
    leaving = -1;
  };

  wait_k();
  wait_q();
  issue_logits<kHeadDim, kBlockN>(logits, Operand(queries()), Operand(keys()));
  __syncwarp();
  flags = uniform(s.blocks.info[rk.index].y);
  wgmma_wait<0>();
  pin(logits);
  while (!(flags & kEnd)) {
    // The logits of an item's first block are there.
    const int first_row = s.blocks.info[rk.index].z, head_rows = s.blocks.info[rk.index].w;
    __syncwarp();
    float out[kHeadDimV / 2], rescale[2];
    u32 probs[kBlockN / 4];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) out[i] = 0.f;
    Softmax softmax;
    softmax.reset();
    shape(logits);
    softmax.update(logits, p.scale_log2, rescale, look, again);
    release_k();
    release_q();
    pack_pairs(probs, logits);
    const Operand q(queries());
    while (true) {
      // This always ends the loop. As its condition it would be moved behind the body, and doubled before it, whereupon
      // the assembler finds too few registers and serialises the products.
      if (flags & kLast) {
        if (p.num_tiles >= 0) break;
        flags = uniform(flags + 1);
      }
      const Operand k(keys()), v = values();
      wait_k();
      issue_logits<kHeadDim, kBlockN>(logits, q, k);
      wait_v();
      issue_weighted<kHeadDimV, kBlockN>(out, probs, v);
      flags = uniform(s.blocks.info[rk.index].y);
      wgmma_wait<1>();
      pin(logits);
      shape(logits);
      const bool grown = softmax.update(logits, p.scale_log2, rescale, look, again);
      hold(softmax.sum[0] + softmax.sum[1]);
      release_k();
      wgmma_wait<0>();
      pin(out);
      pin(probs);
      release_v();
      if (grown) {
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) out[i] *= rescale[(i >> 1) & 1];
      }
      pack_pairs(probs, logits);
    }
    const int rows = head_rows >> 16;
    // Each warp puts its output where its own queries were, which no other warp's part of a product reads. What differs
    // by warp goes through `uniform`: behind branches that may differ by thread the assembler keeps rings and
    // descriptors out of uniform registers.
    const bool staged = uniform(stages && place.warp_within(p, rows));
    const u32 staging = staged ? queries() + uniform(threadIdx.x % 128 / 32) * 16 * 128 : 0;
    leaving = rq.index;
    if (!staging) release_q();
    rq.advance();
    const Operand v = values();
    wait_v();
    issue_weighted<kHeadDimV, kBlockN>(out, probs, v);
    const Operand next_q(queries()), next_k(keys());
    wait_k();
    wait_q();
    issue_logits<kHeadDim, kBlockN>(logits, next_q, next_k);
    flags = uniform(s.blocks.info[rk.index].y);
    wgmma_wait<1>();
    pin(out);
    pin(probs);
    release_v();
    finish(p, out, softmax, staging, first_row + place.row, place.step, first_row + rows,
           (head_rows & 0xffff) + place.head, lane);
    wgmma_wait<0>();
    pin(logits);
  }
  if (lane == 0) bulk_wait_read();
}

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) init_buffers(s.q_full[i], s.q_empty[i], 4);
    init_buffers(s.blocks.full, s.blocks.empty, 4 * kGroups);
    init_buffers(s.v_full, s.v_empty, 4 * kGroups);
    init_buffers(s.passes.full, s.passes.empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (!GATED) await_earlier_kernels();  // else what it reads was there before that which brings rows began
  if (threadIdx.x < 128) {
    registers_shrink<kGroups == 3 ? 32 : 24>();  // together all that the block was launched with
    if (threadIdx.x == 0) produce(p, s);
    if (threadIdx.x == 32) find_queries(p, s);
  } else {
    registers_grow<kGroups == 3 ? 160 : 240>();
    consume(p, s, uniform(threadIdx.x / 128) - 1);
  }
}
