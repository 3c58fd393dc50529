// Turns the sums of dK and dV into gradients. Compile-time: HEAD_DIM, DTYPE, GATED (see backward.cu).

#include "finish_keys.cuh"

extern "C" __global__ void __launch_bounds__(256) ffa_finish_keys(const __grid_constant__ FinishKeysParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  finish_keys(p, blockIdx.x);
}
