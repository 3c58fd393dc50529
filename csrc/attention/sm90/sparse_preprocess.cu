// Prepares the kernel for dK and dV: transposes lse and delta to [packs, queries, heads of a pack], with each block of
// queries at a multiple of 16 bytes, and zeroes the sums of dQ or the counters of parts of lists.

#include "../../common/ptx.cuh"

struct SparsePreprocessParams {
  const float *lse, *delta;
  float *lse_out, *delta_out;  // [packs, rows, heads of a pack]: lse times log2 e
  float4* sums;                // to be zeroed
  i64 num_sums, lse_row, lse_head, delta_row, delta_head;
  i64 count;  // of values, packs * rows * heads
  int num_rows, rows, query_block, stats_block, log2_heads;
};

extern "C" __global__ void __launch_bounds__(256)
    ffa_sparse_preprocess(const __grid_constant__ SparsePreprocessParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  const i64 first = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x, step = static_cast<i64>(gridDim.x) * 256;
  for (i64 i = first; i < p.count; i += step) {
    const i64 at = i >> p.log2_heads;
    const int pack = static_cast<int>(at / p.rows), row_out = static_cast<int>(at % p.rows);
    const int in_block = row_out % p.stats_block, row = row_out / p.stats_block * p.query_block + in_block;
    const int head = (pack << p.log2_heads) + static_cast<int>(i & (1 << p.log2_heads) - 1);
    float lse = 0.f, delta = 0.f;
    if (in_block < p.query_block && row < p.num_rows) {
      lse = p.lse[row * p.lse_row + head * p.lse_head] * 1.4426950408889634f;
      if (lse == __int_as_float(0xff800000)) lse = -lse;  // all probabilities of a row that sees nothing are 0
      delta = p.delta[row * p.delta_row + head * p.delta_head];
    }
    p.lse_out[i] = lse, p.delta_out[i] = delta;
  }
  for (i64 i = first; i < p.num_sums; i += step) p.sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}
