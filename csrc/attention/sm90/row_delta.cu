// delta = rowsum(dout * out). Compile-time: HEAD_DIM_V, DTYPE.

#include "row_dots.cuh"

using Dots = RowDots<DTYPE, HEAD_DIM_V>;

struct RowDeltaParams {
  const u32* dout;
  const u32* out;
  float* delta;                                // [num_rows, num_heads]
  i64 dout_row, dout_head, out_row, out_head;  // strides, elements
  int num_rows, num_heads;
};

// One thread block: Dots::kBlockRows pairs of a row and a head, in row-major order.
extern "C" __global__ void __launch_bounds__(kThreads) ffa_row_delta(const __grid_constant__ RowDeltaParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  // 32 bits are enough: 2^32 pairs of a row and a head do not fit in the memory of a device.
  const u32 heads = p.num_heads;
  Dots::compute(
      {p.dout, p.out, p.dout_row, p.dout_head, p.out_row, p.out_head}, blockIdx.x * (Dots::kBlockRows),
      p.num_rows * heads, [&](u32 item, i64& row, i64& head) { row = item / heads, head = item % heads; },
      [&](u32 item, float sum) { p.delta[item] = sum; });
}
