// Attention forward for sm_90a: one work item is 128 query rows of one head, computed completely.
//
// A producer warp streams keys and values through shared memory; two consumer warpgroups own 64 rows each and
// take turns at the tensor cores, so that the softmax of one hides under the products of the other. The mask of
// a tile is a list of passes: a range of key blocks, and for each row the keys it sees. Only blocks outside the
// sub-range that all rows see completely apply the mask.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, BLOCK_N, STAGES, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V, kBlockN = BLOCK_N;
constexpr int kStages = STAGES;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kRows = 64;   // query rows of a warpgroup
using T = DTYPE;

struct ForwardParams {
  TensorMap q, k, v;
  TilePlan plan;
  void* out;
  float* lse;
  float* max_logits;      // of each head as ordered integers, or null
  const float* sink_lse;  // or null
  int* counter;           // two words, zero before and after
  i64 out_row, out_head;  // strides, elements
  i64 lse_row, lse_head;
  i64 sink_row, sink_head;
  int num_tiles, num_heads, group, head_section;
  float scale_log2;      // softmax scale * log2 e, or softcap * log2 e
  float softcap_factor;  // softmax scale / softcap
  float logit_scale;     // of max_logits
  int accumulate, out_fp32;
};

struct Shared {
  alignas(1024) u16 q[kGroups][kHeadDim / kPanel][kRows][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kBlockN][kPanel];
  u16 v[kStages][kHeadDimV / kPanel][kBlockN][kPanel];
  u64 q_full[kGroups], q_empty[kGroups];
  u64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  u64 item_full[2], item_empty[2];
  int4 item[2];
};

constexpr u32 kBytesQ = sizeof(Shared::q) / kGroups;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStages;

DEVICE int4 decode_item(const ForwardParams& p, int item) {
  if (item >= p.num_tiles * p.num_heads) return make_int4(-1, 0, 0, 0);
  const int per_section = p.num_tiles * p.head_section;
  const int section = item / per_section, rest = item - section * per_section;
  const int tile = rest / p.head_section;
  const int head = section * p.head_section + rest - tile * p.head_section;
  return pack_item(__ldg(p.plan.tiles + tile), head);
}

// ---- producer: one thread ----

DEVICE void load_block(const TensorMap* map, u32 smem, int panels, int row, int head, u32 bar, u32 bytes) {
  barrier_expect_bytes(bar, bytes);
  for (int i = 0; i < panels; ++i) load_box(smem + i * kBlockN * 128, map, i * kPanel, head, row, bar);
}

DEVICE void produce(const ForwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  Ring<kStages> rk, rv;
  u32 q_parity = 1;
  auto load_k = [&](int key, int head) {
    barrier_wait(smem_address(&s.k_empty[rk.index]), rk.parity ^ 1);
    load_block(&p.k, smem_address(s.k[rk.index]), kHeadDim / kPanel, key, head, smem_address(&s.k_full[rk.index]),
               kBytesK);
    rk.advance();
  };
  auto load_v = [&](int key, int head) {
    barrier_wait(smem_address(&s.v_empty[rv.index]), rv.parity ^ 1);
    load_block(&p.v, smem_address(s.v[rv.index]), kHeadDimV / kPanel, key, head, smem_address(&s.v_full[rv.index]),
               kBytesV);
    rv.advance();
  };
  int4 item = decode_item(p, blockIdx.x);
  Ring<2> slot;
  while (true) {
    barrier_wait(smem_address(&s.item_empty[slot.index]), slot.parity ^ 1);
    s.item[slot.index] = item;
    barrier_arrive(smem_address(&s.item_full[slot.index]));
    slot.advance();
    if (item.x < 0) break;
    int4 next_item;
    bool fetched = false;
    auto fetch_next = [&] {  // early enough to hide how long it takes
      if (!fetched) next_item = decode_item(p, gridDim.x + atomicAdd(p.counter, 1));
      fetched = true;
    };
    const int head = item_head(item), head_kv = head / p.group;
    int previous = -1;
    for (int pass = item.z; pass < item.w; ++pass) {
      const int4 range = __ldg(p.plan.passes + 2 * pass);
      for (int n = 0; n < range.y; ++n) {
        const int key = range.x + n * static_cast<int>(p.plan.step);
        load_k(key, head_kv);
        if (previous < 0) {
          for (int w = 0; w < kGroups; ++w) {
            barrier_wait(smem_address(&s.q_empty[w]), q_parity);
            const u32 bar = smem_address(&s.q_full[w]);
            barrier_expect_bytes(bar, kBytesQ);
            for (int i = 0; i < kHeadDim / kPanel; ++i)
              load_box(smem_address(s.q[w][i]), &p.q, i * kPanel, head, item.x + w * kRows, bar);
          }
          q_parity ^= 1;
          fetch_next();
        } else {
          load_v(previous, head_kv);
        }
        previous = key;
      }
    }
    if (previous >= 0) load_v(previous, head_kv);
    fetch_next();
    item = next_item;
  }
  leave(p.counter);
}

// ---- consumers ----

DEVICE void issue_qk(float (&acc)[kBlockN / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i)
    Wgmma<T, kBlockN>::template ss<0, 0>(acc, a.at((i / 4) * kRows * 128 + (i % 4) * 32),
                                         b.at((i / 4) * kBlockN * 128 + (i % 4) * 32), i > 0);
  wgmma_commit();
}

DEVICE void issue_pv(float (&acc)[kHeadDimV / 2], const u32 (&probs)[kBlockN / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i) Wgmma<T, kHeadDimV>::template rs<1>(acc, probs + 4 * i, b.at(i * 16 * 128), 1);
  wgmma_commit();
}

DEVICE void pack_probs(u32 (&probs)[kBlockN / 4], const float (&s)[kBlockN / 2]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 4; ++i) probs[i] = T::pack(s[2 * i], s[2 * i + 1]);
}

// The logits of this thread by ordinary arithmetic: slow, for the rare blocks whose exponentials overflow.
DEVICE void recompute_logits(float (&s)[kBlockN / 2], u32 q, u32 k, int row, int lane) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) s[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < kHeadDim / 2; ++i) {
    // Word i of a row, in the swizzled panels that the copy engine wrote.
    const int panel = i / 32, piece = i % 32 / 4, word = i % 4 * 4;
    u32 a[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      a[r] = load_shared(q + (panel * kRows + row + 8 * r) * 128 + ((piece ^ (row % 8)) << 4) + word);
#pragma unroll
    for (int j = 0; j < kBlockN / 4; ++j) {
      const int key = 8 * (j / 2) + 2 * (lane % 4) + j % 2;
      const u32 b = load_shared(k + (panel * kBlockN + key) * 128 + ((piece ^ (key % 8)) << 4) + word);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& sum = s[4 * (j / 2) + 2 * r + j % 2];
        sum = fmaf(T::low(a[r]), T::low(b), fmaf(T::high(a[r]), T::high(b), sum));
      }
    }
  }
  __syncwarp();  // before one thread releases the keys for all
}

DEVICE void store_output(const ForwardParams& p, float (&acc)[kHeadDimV / 2], const float (&factor)[2],
                         const float (&prior)[2], int row, int end_row, int head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + 8 * r;
    const bool valid = at < end_row;
    const i64 offset = at * p.out_row + head * p.out_head;
    float* out32 = static_cast<float*>(p.out) + offset + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(p.out) + offset;
#pragma unroll
    for (int g = 0; g < kHeadDimV / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 32 * g + 8 * j, i = 4 * (4 * g + j) + 2 * r;
        float x = acc[i] * factor[r], y = acc[i + 1] * factor[r];
        if (prior[r] > 0.f) {  // else the old output may be anything
          if (p.out_fp32) {
            const float2 old = *reinterpret_cast<float2*>(out32 + column);
            x += old.x * prior[r], y += old.y * prior[r];
          } else {
            const u32 old = *reinterpret_cast<u32*>(out16 + column + 2 * (lane % 4));
            x += T::low(old) * prior[r], y += T::high(old) * prior[r];
          }
        }
        if (p.out_fp32) {
          if (valid) *reinterpret_cast<float2*>(out32 + column) = make_float2(x, y);
        } else {
          word[j] = T::pack(x, y);
        }
      }
      if (!p.out_fp32) {
        transpose_quad(word, lane);  // now each thread stores 16 bytes
        if (valid)
          *reinterpret_cast<uint4*>(out16 + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// log(exp(a) + exp(b)), -inf where both are.
DEVICE float log_add(float a, float b) {
  const float top = fmaxf(a, b);
  if (top == -kInfinity) return top;
  return top + kLn2 * log2_fast(exp2_fast((a - top) * kLog2e) + exp2_fast((b - top) * kLog2e));
}

DEVICE float weight(float part, float total) { return part == -kInfinity ? 0.f : exp2_fast((part - total) * kLog2e); }

DEVICE void atomic_max_logit(float* address, float value) {
  // Positive floats order like integers, negative ones like unsigned integers reversed.
  if (value >= 0.f)
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<u32*>(address), __float_as_uint(value));
}

DEVICE void finish(const ForwardParams& p, float (&acc)[kHeadDimV / 2], Softmax& softmax, int row, int end_row,
                   int head, int lane) {
  float factor[2], prior[2];
  float top = -kInfinity;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool any = sum > 0.f;
    const int at = row + 8 * r;
    const bool valid = at < end_row;
    const float own = any ? (softmax.reference[r] + log2_fast(sum)) * kLn2 : -kInfinity;
    factor[r] = any ? reciprocal_fast(sum) : 0.f;
    prior[r] = 0.f;
    float total = own;
    float* lse = p.lse + at * p.lse_row + head * p.lse_head;
    if (valid) {
      if (p.sink_lse) total = log_add(total, __ldg(p.sink_lse + at * p.sink_row + head * p.sink_head));
      if (p.accumulate) {
        const float before = *lse;
        total = log_add(total, before);
        prior[r] = weight(before, total);
      }
      top = fmaxf(top, softmax.max[r]);
    }
    __syncwarp();  // all threads of a row have read before one writes
    if (valid && lane % 4 == 0) *lse = total;
    factor[r] *= weight(own, total);
  }
  if (p.max_logits) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    if (lane == 0 && top > -kInfinity) atomic_max_logit(p.max_logits + head, top * p.logit_scale);
  }
  store_output(p, acc, factor, prior, row, end_row, head, lane);
}

DEVICE void consume(const ForwardParams& p, Shared& s, int warpgroup) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row = warpgroup * kRows + (thread / 32) * 16 + lane / 4;
  Ring<kStages> rk, rv;
  Ring<2> slot;
  u32 q_parity = 0;
  const u32 my_turn = 1 + warpgroup, other_turn = 2 - warpgroup;
  if (warpgroup == 1) named_arrive(other_turn, 256);
  auto release = [&](u64& barrier) {
    if (lane == 0) barrier_arrive(smem_address(&barrier));
  };
  BlockWalk<true> walk(p.plan, warpgroup, row);
  auto take_item = [&] {
    barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
    const int4 item = s.item[slot.index];
    __syncwarp();
    release(s.item_empty[slot.index]);
    slot.advance();
    walk.start(item.z, item.w);
    return item;
  };
  int4 item = take_item();
  while (item.x >= 0) {
    float out[kHeadDimV / 2];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) out[i] = 0.f;
    Softmax softmax;
    softmax.reset();
    if (item.z < item.w) {
      float logits[kBlockN / 2];
      u32 probs[kBlockN / 4];
      float rescale[2];
      const u32 q_at = smem_address(s.q[warpgroup]);
      const Operand q(q_at);
      auto keys = [&] { return Operand(smem_address(s.k[rk.index])); };
      auto values = [&] { return Operand(smem_address(s.v[rv.index]), kBlockN * 128); };
      auto shape = [&](float (&x)[kBlockN / 2]) {
        if (SOFTCAP) apply_softcap(x, p.softcap_factor);
        if (walk.masked()) apply_mask(x, walk.column + 2 * (lane % 4), walk.bounds);
      };
      auto again = [&](float (&x)[kBlockN / 2]) {
        recompute_logits(x, q_at, smem_address(s.k[rk.index]), row % kRows, lane);
        shape(x);
      };
      const bool look = p.max_logits != nullptr;

      barrier_wait(smem_address(&s.q_full[warpgroup]), q_parity);
      q_parity ^= 1;
      barrier_wait(smem_address(&s.k_full[rk.index]), rk.parity);
      issue_qk(logits, q, keys());
      wgmma_wait<0>();
      pin(logits);
      shape(logits);
      softmax.update(logits, p.scale_log2, rescale, look, again);
      release(s.k_empty[rk.index]);
      rk.advance();
      pack_probs(probs, logits);

      while (walk.advance()) {
        const Operand k = keys(), v = values();
        barrier_wait(smem_address(&s.k_full[rk.index]), rk.parity);
        named_sync(my_turn, 256);
        issue_qk(logits, q, k);
        barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
        issue_pv(out, probs, v);
        named_arrive(other_turn, 256);
        wgmma_wait<1>();
        pin(logits);
        shape(logits);
        const bool grown = softmax.update(logits, p.scale_log2, rescale, look, again);
        hold(softmax.sum[0] + softmax.sum[1]);
        release(s.k_empty[rk.index]);
        rk.advance();
        wgmma_wait<0>();
        pin(out);
        pin(probs);
        release(s.v_empty[rv.index]);
        rv.advance();
        if (grown) {
#pragma unroll
          for (int i = 0; i < kHeadDimV / 2; ++i) out[i] *= rescale[(i >> 1) & 1];
        }
        pack_probs(probs, logits);
      }
      release(s.q_empty[warpgroup]);
      barrier_wait(smem_address(&s.v_full[rv.index]), rv.parity);
      issue_pv(out, probs, values());
      wgmma_wait<0>();
      pin(out);
      release(s.v_empty[rv.index]);
      rv.advance();
    }
    const int first_row = item.x, end_row = first_row + item_rows(item), head = item_head(item);
    item = take_item();  // its tables arrive while the output is written
    finish(p, out, softmax, first_row + row, end_row, head, lane);
  }
  if (warpgroup == 0) named_sync(my_turn, 256);
}

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(smem_address(&s.q_full[i]), 1);
      barrier_init(smem_address(&s.q_empty[i]), 4);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&s.k_full[i]), 1);
      barrier_init(smem_address(&s.v_full[i]), 1);
      barrier_init(smem_address(&s.k_empty[i]), 4 * kGroups);
      barrier_init(smem_address(&s.v_empty[i]), 4 * kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&s.item_full[i]), 1);
      barrier_init(smem_address(&s.item_empty[i]), 4 * kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();  // 24 * 128 + 240 * 256 is all that the block was launched with
    if (threadIdx.x == 0) produce(p, s);
  } else {
    registers_grow<240>();
    consume(p, s, uniform(threadIdx.x / 128) - 1);
  }
}
