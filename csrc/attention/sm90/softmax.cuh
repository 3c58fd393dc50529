// Online softmax and masks on the accumulators of a wgmma.
//
// Layout: of a 64 x N accumulator, a thread holds two columns of every 8 in rows `lane / 4` and `lane / 4 + 8` of its
// warp's 16 rows: element i is in its row (i >> 1) & 1, column 8 * (i / 4) + 2 * (lane % 4) + (i & 1).
#pragma once

#include "../../common/ptx.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

// A mask with a bit set for each element of a row that is at column `column` or later, of `columns` columns.
DEVICE u32 bits_from(int column, int columns) {
  const int c = min(max(column, 0), columns);
  u32 bits;
  asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(0xffffffffu), "r"(2 * (c / 8) + min(c % 8, 2)));  // none from 32 on
  return bits;
}

// Sets logits outside the bounds [lo, hi) of each row to -inf. `base`: column of the first element of this thread. With
// bit masks ptxas moves seven bits at a time to predicates: half the instructions of comparing columns.
template <int N>
DEVICE void apply_mask(float (&s)[N], int base, const int2 (&bounds)[2]) {
  static_assert(N <= 64);  // elements of two rows
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 visible = bits_from(bounds[r].x - base, 2 * N) & ~bits_from(bounds[r].y - base, 2 * N);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& x = s[4 * (i / 2) + 2 * r + i % 2];
      x = visible & (1u << i) ? x : -kInfinity;
    }
  }
}

// tanh accurate to fp16 precision, which tanh.approx is not.
DEVICE float tanh_exact(float x) { return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.f * kLog2e * x)); }

template <int N>
DEVICE void apply_softcap(float (&s)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = tanh_exact(s[i] * factor);
}

// log(exp(a) + exp(b)): -inf if both are -inf; inf if either is, as with an infinite sink.
DEVICE float log_add(float a, float b) {
  const float top = fmaxf(a, b);
  if (top == -kInfinity || top == kInfinity) return top;
  return top + kLn2 * log2_fast(exp2_fast((a - top) * kLog2e) + exp2_fast((b - top) * kLog2e));
}

// exp(part - total): what a partial result with this lse contributes to the total.
DEVICE float weight(float part, float total) {
  if (part == -kInfinity) return 0.f;
  return part == total ? 1.f : exp2_fast((part - total) * kLog2e);  // avoids inf - inf
}

DEVICE void atomic_max_logit(float* address, float value) {
  // Positive floats order like integers, negative ones like unsigned integers reversed.
  if (value >= 0.f)
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<u32*>(address), __float_as_uint(value));
}

// Maximum over the 4 threads that share a row.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Online softmax with lazy rescaling: exponentials are relative to a reference, an earlier maximum of the row, which is
// raised only when they become large. So most blocks need no maximum and the output is rarely rescaled. Relative
// precision does not depend on the reference, and sums stay far from overflow (2^13 also fits fp16).
constexpr float kLarge = 8192.f, kTooLarge = 1e36f;
constexpr float kGrowth = 8.f;  // the same limit where the maximum is computed, as an exponent of 2

struct Softmax {
  float max[2];        // largest raw logit in this thread's columns, of the blocks whose maximum was computed
  float reference[2];  // exponentials are exp2(logit * scale_log2 - reference); -inf: not set yet
  float sum[2];        // of the exponentials in this thread's columns
  bool ready;          // all rows of the warp have a reference

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -kInfinity;
      reference[r] = -kInfinity;
      sum[r] = 0.f;
    }
    ready = false;
  }

  // Replaces logits by exponentials. `look`: always update `max`. `again` recomputes the logits, for the rare case that
  // an exponential exceeds kTooLarge. Returns whether the output must be multiplied by `rescale`; uniform in a warp.
  template <int N, typename Again>
  DEVICE bool update(float (&s)[N], float scale_log2, float (&rescale)[2], bool look, Again again) {
    float part[2];
    if (ready && !look) {
      exponentiate(s, scale_log2, part);
      if (!__any_sync(0xffffffffu, !(fmaxf(part[0], part[1]) < kLarge))) {
        sum[0] += part[0], sum[1] += part[1];
        return false;
      }
      if (!__any_sync(0xffffffffu, !(fmaxf(part[0], part[1]) < kTooLarge))) {
        lower(s, part, rescale);
        return true;
      }
      again(s);
    }
    const bool grown = raise(s, scale_log2, rescale);
    exponentiate(s, scale_log2, part);
    sum[0] += part[0], sum[1] += part[1];
    return grown;
  }

 private:
  template <int N>
  DEVICE void exponentiate(float (&s)[N], float scale_log2, float (&part)[2]) const {
    float shift[2], two[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = reference[r] == -kInfinity ? 0.f : -reference[r];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int r = (i >> 1) & 1, c = i & 1;
      s[i] = exp2_fast(fmaf(s[i], scale_log2, shift[r]));
      two[r][c] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) part[r] = two[r][0] + two[r][1];
  }

  template <int N>
  DEVICE static void find_max(const float (&s)[N], float (&top)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], s[i]);
  }

  // Raises the references of all rows to their maxima if any is exceeded by more than kGrowth.
  template <int N>
  DEVICE bool raise(const float (&s)[N], float scale_log2, float (&rescale)[2]) {
    find_max(s, max);
    float top[2] = {max[0], max[1]};
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) grows |= top[r] * scale_log2 > reference[r] + kGrowth;
    if (!__any_sync(0xffffffffu, grows)) return false;
    bool unset = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(quad_max(top[r]) * scale_log2, reference[r]);
      rescale[r] = reference[r] == -kInfinity ? 0.f : exp2_fast(reference[r] - next);
      reference[r] = next;
      sum[r] *= rescale[r];
      unset |= next == -kInfinity;
    }
    ready = !__any_sync(0xffffffffu, unset);
    return true;
  }

  // Raises the reference of rows with large exponentials, by a power of two, and scales these down, exactly.
  template <int N>
  DEVICE void lower(float (&s)[N], const float (&part)[2], float (&rescale)[2]) {
    float top[2] = {1.f, 1.f};
    find_max(s, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float powers = floorf(log2_fast(quad_max(top[r])));
      rescale[r] = exp2_fast(-powers);
      reference[r] += powers;
      sum[r] = (sum[r] + part[r]) * rescale[r];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= rescale[(i >> 1) & 1];
  }
};
