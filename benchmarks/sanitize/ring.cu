// A ring of two buffers between one thread that fills them and a warp that reads them, as small as it can be: what
// racecheck says of it, it says of every kernel built like this.
//
// Compile-time: MODE. 0: ordinary stores and an ordinary arrival at the barrier. 1: ordinary stores, and an arrival
// that expects no bytes (arrive.expect_tx). 2: TMA fills the buffer. 3: as 0, and each lane that reads arrives for
// itself, not one of them for all. 4: ordinary stores between named barriers of both warps. 5: as 4, and at each
// barrier one warp only arrives, and goes on.

#include "../../csrc/common/ptx.cuh"

constexpr int kWords = 32, kStages = 2;

struct RingParams {
  const u32* in;  // [rounds, kWords]
  u32* out;       // [kWords]
  int rounds;
};

// A named barrier of both warps. One that does not depend on the other need not wait.
DEVICE void meet(u32 barrier, bool depends) {
  if (MODE == 4 || depends)
    named_sync(barrier, 64);
  else
    named_arrive(barrier, 64);
}

// One buffer, filled and read between named barriers of two of the three warps.
DEVICE void pass_by_named_barriers(const RingParams& p, u32 (&buffer)[kWords]) {
  const bool reads = uniform(threadIdx.x / 32) == 1;
  u32 sum = 0;
  for (int n = 0; n < p.rounds; ++n) {
    meet(1, !reads);  // it has been read
    if (threadIdx.x == 0)
      for (int j = 0; j < kWords; ++j) buffer[j] = p.in[n * kWords + j];
    __syncwarp();
    meet(2, reads);  // it is full
    if (reads) sum += buffer[threadIdx.x % 32];
    __syncwarp();
  }
  if (reads) p.out[threadIdx.x % 32] = sum;
}

extern "C" __global__ void __launch_bounds__(96) ffa_sanitize_ring(const __grid_constant__ RingParams p) {
  __shared__ alignas(128) u32 buffer[kStages][kWords];
  __shared__ u64 full[kStages], empty[kStages];
  if (MODE >= 4) {
    if (threadIdx.x < 64) pass_by_named_barriers(p, buffer[0]);
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), MODE == 3 ? 32 : 1);
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
  } else if (threadIdx.x / 32 == 1) {
    const int lane = threadIdx.x % 32;
    u32 sum = 0;
    for (int n = 0; n < p.rounds; ++n) {
      const int i = n % kStages;
      barrier_wait(smem_address(&full[i]), n / kStages % 2);
      sum += buffer[i][lane];
      __syncwarp();
      if (MODE == 3 || lane == 0) barrier_arrive(smem_address(&empty[i]));
    }
    p.out[lane] = sum;
  }
}
