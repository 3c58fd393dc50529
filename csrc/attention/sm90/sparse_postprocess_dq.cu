// Converts the fp32 sums of dQ of sparse_backward_keys.cu to the gradient of q: times the softmax scale.
//
// Compile-time: HEAD_DIM, DTYPE (Bf16 or Fp16).

#include "gradients.cuh"

using T = DTYPE;
constexpr int kColumns = HEAD_DIM / 2;  // of a piece

struct SparsePostprocessDqParams {
  const float4* sums;  // [packs, 2 halves, units] pieces
  u16* dq;
  i64 dq_row, dq_head;  // strides, elements
  int num_rows, units, block_units, query_block, log2_heads;
  float scale;
};

// One warp: a piece. Four units a thread block.
extern "C" __global__ void __launch_bounds__(256)
    ffa_sparse_postprocess_dq(const __grid_constant__ SparsePostprocessDqParams p) {
  await_earlier_kernels();
  const int lane = threadIdx.x % 32, half = threadIdx.x / kWarpgroupThreads, blocks = (p.units + 3) / 4;
  const int pack = blockIdx.x / blocks, unit = blockIdx.x % blocks * 4 + threadIdx.x / 32 % 4;
  if (unit >= p.units) return;
  const int block = unit / p.block_units, first = (unit - block * p.block_units) * 16 + lane / 4;
  const float4* piece = p.sums + ((2 * pack + half) * static_cast<i64>(p.units) + unit) * (kColumns / 8 * 32);
#pragma unroll
  for (int g = 0; g < kColumns / 32; ++g) {
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcs(piece + (4 * g + j) * 32 + lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int acc_row = first + 8 * r, in_block = acc_row >> p.log2_heads, row = block * p.query_block + in_block;
      const int head = (pack << p.log2_heads) + (acc_row & (1 << p.log2_heads) - 1);
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = T::pack(p.scale * (r ? x[j].z : x[j].x), p.scale * (r ? x[j].w : x[j].y));
      transpose_quad(word, lane);
      if (in_block < p.query_block && row < p.num_rows)
        *reinterpret_cast<uint4*>(p.dq + row * p.dq_row + head * p.dq_head + half * kColumns + 32 * g +
                                  8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}
