// wgmmas of 64 rows, those of a warpgroup, of elements of type T. Operands in shared memory are in swizzled panels of
// 64 columns.
#pragma once

#include "../../common/wgmma.cuh"

// acc[64, kWidth] = a[64, kDepth] * b[kWidth, kDepth]^T; kRowsOfA: rows of the panels that contain a.
template <typename T, int kDepth, int kWidth, int kRowsOfA = 64>
DEVICE void issue_scores(float (&acc)[kWidth / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i)
    Wgmma<T, kWidth>::template ss<0, 0>(acc, a.at(columns_step(i, kRowsOfA)), b.at(columns_step(i, kWidth)), i > 0);
  wgmma_commit();
}

// acc[64, kColumns] += a[64, kDepth] * b[kDepth, kColumns], a from registers.
template <typename T, int kColumns, int kDepth>
DEVICE void issue_weighted(float (&acc)[kColumns / 2], const u32 (&a)[kDepth / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) Wgmma<T, kColumns>::template rs<1>(acc, a + 4 * i, b.at(rows_step(i)), 1);
  wgmma_commit();
}

template <typename T, int kPairs>
DEVICE void pack_pairs(u32 (&to)[kPairs], const float (&from)[2 * kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) to[i] = T::pack(from[2 * i], from[2 * i + 1]);
}

// Of 32 columns of accumulators, lanes of two rows exchange half of what they hold, so that eight lanes add 128 bytes
// of one row: x[0] is of the even one of the two rows, x[1] of the odd one. `own`: this thread's first element of its
// row.
DEVICE void exchange_halves(float (&x)[2][4], const float* own, int lane) {
  const bool odd = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = own + i % 2 + 4 * (i / 2);
    const float got = __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[8], 4);
    x[0][i] = odd ? got : pair[0], x[1][i] = odd ? pair[8] : got;
  }
}

// Recomputes the scores of this thread without tensor cores: slow, for the rare blocks whose exponentials overflow.
template <typename T, int kDepth, int kWidth>
DEVICE void recompute_scores(float (&scores)[kWidth / 2], u32 q, u32 k, int row, int lane) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) scores[i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < kDepth / 2; ++i) {
    // Word i of a row, in swizzled panels.
    const int panel = i / 32, piece = i % 32 / 4, word = i % 4 * 4;
    u32 a[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      a[r] = load_shared(q + (panel * 64 + row + 8 * r) * kPanelRowBytes + ((piece ^ (row % 8)) << 4) + word);
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j) {
      const int key = 8 * (j / 2) + 2 * (lane % 4) + j % 2;
      const u32 b = load_shared(k + (panel * kWidth + key) * kPanelRowBytes + ((piece ^ (key % 8)) << 4) + word);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& sum = scores[4 * (j / 2) + 2 * r + j % 2];
        sum = fmaf(T::low(a[r]), T::low(b), fmaf(T::high(a[r]), T::high(b), sum));
      }
    }
  }
  __syncwarp();  // all lanes have read before one of them releases the keys
}
