// Keeps SMs, one for each thread block, until the host lets them go or the time is over. For tests of kernels whose
// blocks wait for each other while most SMs are taken.

#include "../../../csrc/common/ptx.cuh"

struct HoldParams {
  volatile u32* held;       // page-locked memory of the host: [blocks], 1 for each that is on an SM
  volatile const u32* let;  // likewise: not 0 once they may go
  i64 most_ns;
};

extern "C" __global__ void hold_sms(const __grid_constant__ HoldParams p) {
  if (threadIdx.x) return;
  p.held[blockIdx.x] = 1;
  const i64 begin = now_ns();
  while (*p.let == 0 && now_ns() - begin < p.most_ns) sleep_ns(1000);
}
