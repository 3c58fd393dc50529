// Converts the sums of sparse_backward.cu into the gradients of keys and values: dK times the softmax scale.
//
// Compile-time: HEAD_DIM, DTYPE (Bf16 or Fp16).

#include "../../common/ptx.cuh"

using T = DTYPE;
constexpr int kParts = HEAD_DIM / 16;  // of a row, one for each thread

struct SparsePostprocessParams {
  const float4 *dk_sums, *dv_sums;  // see SparseBackwardParams
  u16 *dk, *dv;
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  i64 sum_rows;
  int num_rows, heads;
  float scale;
};

DEVICE void postprocess_part(const float4* sums, u16* to, float factor) {
  float4 x[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) x[t] = __ldcs(sums + t);
  u32 low[4], high[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    low[t] = T::pack(x[t].x * factor, x[t].y * factor);
    high[t] = T::pack(x[t].z * factor, x[t].w * factor);
  }
  reinterpret_cast<uint4*>(to)[0] = make_uint4(low[0], low[1], low[2], low[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(high[0], high[1], high[2], high[3]);
}

extern "C" __global__ void __launch_bounds__(256)
    ffa_sparse_postprocess(const __grid_constant__ SparsePostprocessParams p) {
  await_earlier_kernels();
  const i64 item = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  const i64 row = item / kParts % p.num_rows, head = item / kParts / p.num_rows;
  const int part = item % kParts;
  if (head >= p.heads) return;
  const i64 from = (head * p.sum_rows + row) * (HEAD_DIM / 4) + 4 * part;
  postprocess_part(p.dk_sums + from, p.dk + row * p.dk_row + head * p.dk_head + 16 * part, p.scale);
  postprocess_part(p.dv_sums + from, p.dv + row * p.dv_row + head * p.dv_head + 16 * part, 1.f);
}
