// Additions of accumulators to fp32 sums in device memory, in any order. Columns of sums are permuted: in every 16,
// those of thread t of a row (2t, 2t + 1, 2t + 8, 2t + 9) are adjacent.
#pragma once

#include "../../common/ptx.cuh"

// For sums, to which many add: the L2 cache evicts what is read once before them.
DEVICE u64 evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Predicated: in a branch ptxas would wait for the wgmmas in flight.
DEVICE void add_global_v4(bool adds, float* p, const float (&x)[4], u64 policy) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %0, 0;\n"
      "@adds red.global.add.L2::cache_hint.v4.f32 [%1], {%2, %3, %4, %5}, %6;\n}" ::"r"(static_cast<int>(adds)),
      "l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "l"(policy)
      : "memory");
}

// Adds 32 columns of two rows. A lane has one of them, and the lane that differs in bit 2 the other one: they exchange
// half of what they hold, so that eight lanes add 128 bytes of one row, whose sums are a line of the L2 cache.
// `x`: accumulators of this lane's row, 0, 1, 4, 5, 8, 9, 12, 13. `to`: these columns in the sums of row 0; `rows`: the
// even one and the odd one, negative for none, where nothing is added.
DEVICE void add_lines(float* to, int stride, const int (&rows)[2], const float* x, int lane, u64 policy) {
  const bool odd = lane & 4;
  float found[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float left = x[i % 2 + 4 * (i / 2)], right = x[8 + i % 2 + 4 * (i / 2)];
    const float got = __shfl_xor_sync(0xffffffffu, odd ? left : right, 4);
    found[0][i] = odd ? got : left, found[1][i] = odd ? right : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    add_global_v4(rows[i] >= 0, to + static_cast<i64>(rows[i]) * stride + 4 * (lane % 8), found[i], policy);
}
