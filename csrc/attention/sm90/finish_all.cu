// Turns the sums of dK and dV, and those of dQ, into gradients, where neither lie where the others are written.
// Compile-time: HEAD_DIM, DTYPE, GATED (see backward.cu).

#include "finish_dq.cuh"
#include "finish_keys.cuh"

struct FinishAllParams {
  FinishKeysParams keys;
  FinishParams rest;
  i64 key_blocks;  // the first so many finish keys
};

extern "C" __global__ void __launch_bounds__(256) ffa_finish_all(const __grid_constant__ FinishAllParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  const int number = blockIdx.x, key_blocks = static_cast<int>(p.key_blocks);
  if (number < key_blocks)
    finish_keys(p.keys, number);
  else
    finish_dq(p.rest, number - key_blocks);
}
