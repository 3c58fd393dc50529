// delta = rowsum(dout * out): a warp takes a row of a head. Compile-time: HEAD_DIM_V, DTYPE.

#include "../../common/ptx.cuh"

using T = DTYPE;
constexpr int kWords = HEAD_DIM_V / 64;  // of two elements, a thread

struct RowDeltaParams {
  const u32* dout;
  const u32* out;
  float* delta;                                // [num_rows, num_heads]
  i64 dout_row, dout_head, out_row, out_head;  // strides, elements
  int num_rows, num_heads;
};

extern "C" __global__ void __launch_bounds__(256) ffa_row_delta(const __grid_constant__ RowDeltaParams p) {
  const i64 item = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  const i64 row = item / p.num_heads;
  const int head = item - row * p.num_heads, lane = threadIdx.x % 32;
  if (row >= p.num_rows) return;
  const u32* a = p.dout + (row * p.dout_row + head * p.dout_head) / 2 + lane * kWords;
  const u32* b = p.out + (row * p.out_row + head * p.out_head) / 2 + lane * kWords;
  u32 x[kWords], y[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = a[i], y[i] = b[i];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float low = T::low(y[i]), high = T::high(y[i]);
    // An output of 0 counts as 0 whatever its gradient is.
    sum += (low == 0.f ? 0.f : low * T::low(x[i])) + (high == 0.f ? 0.f : high * T::high(x[i]));
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (lane == 0) p.delta[row * p.num_heads + head] = sum;
}
