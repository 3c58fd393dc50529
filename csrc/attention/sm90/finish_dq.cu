// Turns the sums of dQ into the gradient of q. Compile-time: HEAD_DIM, DTYPE.

#include "finish_dq.cuh"

extern "C" __global__ void __launch_bounds__(256) ffa_finish_dq(const __grid_constant__ FinishParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  finish_dq(p, blockIdx.x);
}
