// A ring of two buffers between one thread that fills them and a warp that reads them, as small as it can be: what
// racecheck says of it, it says of every kernel built like this.
//
// Compile-time: MODE. 0: ordinary stores and an ordinary arrival at the barrier. 1: ordinary stores, and an arrival
// that expects no bytes (arrive.expect_tx). 2: TMA fills the buffer.

#include "../csrc/common/ptx.cuh"

constexpr int kWords = 32, kStages = 2;

struct RingParams {
  const u32* in;  // [rounds, kWords]
  u32* out;       // [kWords]
  int rounds;
};

extern "C" __global__ void __launch_bounds__(64) ffa_sanitize_ring(const __grid_constant__ RingParams p) {
  __shared__ alignas(128) u32 buffer[kStages][kWords];
  __shared__ u64 full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int n = 0; n < p.rounds; ++n) {
      const int i = n % kStages;
      const u32 bar = smem_address(&full[i]);
      barrier_wait(smem_address(&empty[i]), n / kStages % 2 ^ 1);
      if (MODE == 2) {
        barrier_expect_bytes(bar, sizeof(buffer[i]));
        load_bytes(smem_address(buffer[i]), p.in + n * kWords, sizeof(buffer[i]), bar);
        continue;
      }
      for (int j = 0; j < kWords; ++j) buffer[i][j] = p.in[n * kWords + j];
      if (MODE == 1)
        barrier_expect_bytes(bar, 0);
      else
        barrier_arrive(bar);
    }
  } else if (threadIdx.x >= 32) {
    const int lane = threadIdx.x % 32;
    u32 sum = 0;
    for (int n = 0; n < p.rounds; ++n) {
      const int i = n % kStages;
      barrier_wait(smem_address(&full[i]), n / kStages % 2);
      sum += buffer[i][lane];
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&empty[i]));
    }
    p.out[lane] = sum;
  }
}
