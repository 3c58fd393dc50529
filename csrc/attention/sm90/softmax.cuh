// Online softmax and masks on the accumulators of a warpgroup product.
//
// Of a 64 x N accumulator, a thread holds rows `lane / 4` and `lane / 4 + 8` of its warp's 16 rows, and of each
// 8 columns two: element i is row (i >> 1) & 1, column 8 * (i / 4) + 2 * (lane % 4) + (i & 1).
#pragma once

#include "../../common/ptx.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

// Hides what is outside [lo, hi) of each row. `base`: column of the first element of this thread.
template <int N>
DEVICE void apply_mask(float (&s)[N], int base, const int2 (&bounds)[2]) {
  int lo[2], hi[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    lo[r] = bounds[r].x - base;
    hi[r] = bounds[r].y - base;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int r = (i >> 1) & 1, column = 8 * (i / 4) + (i & 1);
    s[i] = (column >= lo[r] && column < hi[r]) ? s[i] : -kInfinity;
  }
}

// tanh without the error of tanh.approx: it must hold at fp16 precision.
DEVICE float tanh_exact(float x) { return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.f * kLog2e * x)); }

template <int N>
DEVICE void apply_softcap(float (&s)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = tanh_exact(s[i] * factor);
}

// Rows grow their reference only when the maximum passes it by this many powers of two: sums stay far from
// overflow, and the output is rarely rescaled.
constexpr float kGrowth = 8.f;

// Of the 4 threads that share a row.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

struct Softmax {
  float max[2];        // largest raw logit of this thread's columns
  float reference[2];  // in powers of two: exponentials are of logit * scale - reference
  float sum[2];        // of this thread's columns

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -kInfinity;
      reference[r] = -kInfinity;
      sum[r] = 0.f;
    }
  }

  // Turns logits into exponentials. Returns whether the output must be rescaled by `rescale` (uniform in a warp).
  template <int N>
  DEVICE bool update(float (&s)[N], float scale_log2, float (&rescale)[2]) {
    float top[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r][0] = max[r], top[r][1] = s[2 * r];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int r = (i >> 1) & 1, c = i & 1;
      top[r][c] = fmaxf(top[r][c], s[i]);
    }
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = fmaxf(top[r][0], top[r][1]);
      grows |= max[r] * scale_log2 > reference[r] + kGrowth;
    }
    // Only growth needs the maximum of the whole row; the threads of a row then agree on a new reference.
    const bool any = __any_sync(0xffffffffu, grows);
    if (any) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = quad_max(max[r]) * scale_log2;
        rescale[r] = reference[r] == -kInfinity ? 0.f : exp2_fast(reference[r] - next);
        reference[r] = next;
        sum[r] *= rescale[r];
      }
    }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = reference[r] == -kInfinity ? 0.f : -reference[r];
    float part[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int r = (i >> 1) & 1, c = i & 1;
      s[i] = exp2_fast(fmaf(s[i], scale_log2, shift[r]));
      part[r][c] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += part[r][0] + part[r][1];
    return any;
  }
};
