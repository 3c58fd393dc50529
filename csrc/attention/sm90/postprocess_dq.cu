// Converts the fp32 sums of dQ to the gradient of q: times the softmax scale.
//
// Compile-time: HEAD_DIM, DTYPE, CONCURRENT (0 or 1: a programmatic dependent that runs concurrently with the preceding
// kernel and uses none of its results: that kernel started after the sums were complete. This kernel ends after it, so
// that the next kernel on the stream follows both).

#include "gradients.cuh"

#ifndef CONCURRENT
#define CONCURRENT 0
#endif

constexpr int kColumns = HEAD_DIM / 2;  // of a piece

struct PostprocessDqParams {
  const float4* sums;  // [num_heads, 2 halves, units] pieces; for head dim 64 transposed, see backward.cu
  void* dq;
  i64 dq_row, dq_head;  // strides, elements
  int num_rows, blocks, units, store;
  float scale;
};

// One thread block: 64 rows of one head.
extern "C" __global__ void __launch_bounds__(256) ffa_postprocess_dq(const __grid_constant__ PostprocessDqParams p) {
  if (!CONCURRENT) await_earlier_kernels();
  let_next_kernel_start();
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, half = threadIdx.x / kWarpgroupThreads;
  const int head = blockIdx.x / p.blocks, block = blockIdx.x - head * p.blocks;
  const int row = block * 64 + warp * 16 + lane / 4;
  const bool valid[2] = {row < p.num_rows, row + 8 < p.num_rows};
  const i64 at = row * p.dq_row + head * p.dq_head + half * kColumns;
#if HEAD_DIM == 64
  __shared__ float rows[64][65];
  const float4* sums = p.sums + (static_cast<i64>(head) * p.units + 4 * block) * 256;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 x = __ldcs(sums + 256 * i + threadIdx.x);
    const int query = 16 * i + threadIdx.x / 32 % 2 * 8 + lane % 4 * 2, column = threadIdx.x / 64 * 16 + lane / 4;
    rows[query][column] = x.x, rows[query + 1][column] = x.y;
    rows[query][column + 8] = x.z, rows[query + 1][column + 8] = x.w;
  }
  __syncthreads();
  auto sums_of = [&](int i) {
    const float* first = rows[warp * 16 + lane / 4] + half * kColumns + 8 * i + lane % 4 * 2;
    const float* second = first + 8 * 65;
    return make_float4(first[0], first[1], second[0], second[1]);
  };
  postprocess_rows<DTYPE, kColumns>(sums_of, p.dq, at, p.dq_row, valid, p.store, p.scale, lane);
#else
  const i64 piece = (2 * static_cast<i64>(head) + half) * p.units + 4 * block + warp;
  postprocess_piece<DTYPE, kColumns>(p.sums + piece * (kColumns / 8 * 32), p.dq, at, p.dq_row, valid, p.store, p.scale,
                                     lane);
#endif
  if (CONCURRENT && blockIdx.x == gridDim.x - 1)
    await_earlier_kernels();  // one block is enough; the others free their SMs
}
