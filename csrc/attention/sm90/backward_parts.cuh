// What kernels of the backward in parts share, one for dK and dV and one for dQ: they compute the logits twice, and add
// nothing in device memory.
//
// Of a head of 256 columns, the gradients of 64 keys fill half of a processor's registers, and nothing is left for dQ.
// So dK with dV, and dQ, are computed by two kernels, which both need S and dP: seven products instead of five. In
// return all gradients stay in registers until they are written once: there are no sums in device memory, nothing is
// added through shared memory, and results repeat bit by bit.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1).
#pragma once

#include "../../common/wgmma.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kRows = 64;   // rows of a warpgroup's accumulators
using T = DTYPE;

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2, kAddHalf = 3 };

struct BackwardPartParams {
  TensorMap q, k, v, dout;
  TilePlan plan;       // of keys: the transposed mask; of queries: the mask
  const float* lse;    // [num_heads, stats_row]: times log2 e
  const float* delta;  // [num_heads, stats_row]: negated
  void *dq, *dk, *dv;
  int* counter;                                           // two words, zero before and after
  i64 dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;  // strides, elements
  int num_tiles, num_heads, group, stats_row, store;
  int splits;        // of a group of query heads, for keys
  int heads_inner;   // for keys: a block is visited for all query heads before the next block, not head by head
  int head_section;  // query heads that are worked on together, for queries
  float scale, scale_log2, softcap_factor;
};

// acc[64, kWidth] = a[64, kDepth] * b[kWidth, kDepth]^T
template <int kDepth, int kWidth>
DEVICE void issue_logits(float (&acc)[kWidth / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i)
    Wgmma<T, kWidth>::template ss<0, 0>(acc, a.at((i / 4) * kRows * 128 + (i % 4) * 32),
                                        b.at((i / 4) * kWidth * 128 + (i % 4) * 32), i > 0);
  wgmma_commit();
}

// acc[64, kColumns] += a[64, kDepth] * b[kDepth, kColumns]
template <int kColumns, int kDepth>
DEVICE void issue_gradient(float (&acc)[kColumns / 2], const u32 (&a)[kDepth / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) Wgmma<T, kColumns>::template rs<1>(acc, a + 4 * i, b.at(i * 16 * 128), 1);
  wgmma_commit();
}

// The derivative of the softcap where its tanh is x; 0 where x is -inf, that is hidden.
DEVICE float softcap_slope(float x) { return fmaxf(fmaf(-x, x, 1.f), 0.f); }

// Writes or adds the accumulators of 64 rows, times `factor`. `offset`: element of this thread's first row.
template <int kColumns>
DEVICE void store_gradient(int store, void* to, i64 offset, i64 row_stride, const bool (&valid)[2],
                           const float (&acc)[kColumns / 2], float factor, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 at = offset + 8 * r * row_stride;
    float* out32 = static_cast<float*>(to) + at + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(to) + at;
#pragma unroll
    for (int g = 0; g < kColumns / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = factor * acc[4 * (4 * g + j) + 2 * r], y = factor * acc[4 * (4 * g + j) + 2 * r + 1];
        const int column = 32 * g + 8 * j;
        if (store == kAddFloat) {
          if (valid[r]) add_global_v2(out32 + column, x, y);
        } else if (store == kStoreFloat) {
          if (valid[r]) *reinterpret_cast<float2*>(out32 + column) = make_float2(x, y);
        } else {
          if (store == kAddHalf && valid[r]) {
            const u32 old = *reinterpret_cast<const u32*>(out16 + column + 2 * (lane % 4));
            x += T::low(old), y += T::high(old);
          }
          word[j] = T::pack(x, y);
        }
      }
      if (store == kStoreHalf || store == kAddHalf) {
        transpose_quad(word, lane);
        if (valid[r])
          *reinterpret_cast<uint4*>(out16 + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// An arrival for the whole warp, after all of its threads' reads and writes.
DEVICE void release(u64& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(smem_address(&barrier));
}
