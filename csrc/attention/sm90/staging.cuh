// Results by way of shared memory: a warp lays down its 16 rows of accumulators, and TMA stores them from
// there while the warp goes on. From registers, each store of a warp would be of pieces of eight rows, and take
// shuffles.
#pragma once

#include "tiles.cuh"

// Where so many warps lay them down: panels, as a tensor map with boxes of 16 rows has them.
template <int kColumns, int kWarps>
struct Staging {
  alignas(1024) u16 rows[kWarps][kColumns / kPanel][16][kPanel];
  DEVICE u32 of_warp(int index) const { return uniform(smem_address(rows[index])); }
};

// No room.
template <int kColumns>
struct Staging<kColumns, 0> {
  DEVICE u32 of_warp(int) const { return 0; }
};

// Stores factor * acc of this warp's 16 rows. `row`, `head`: where the box begins, in thread 0; all 16 rows are
// written.
template <typename T, int kColumns>
DEVICE void store_staged(const TensorMap* map, u32 staging, u32 panel_bytes, const float (&acc)[kColumns / 2],
                         const float (&factor)[2], int row, int head, int lane) {
  if (lane == 0) bulk_wait_read();  // what was there before
  __syncwarp();
  const u32 at = staging + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    const float* x = acc + 8 * i;
    store_matrices_x4((at ^ (i % 4 << 5)) + i / 4 * panel_bytes, T::pack(x[0] * factor[0], x[1] * factor[0]),
                      T::pack(x[2] * factor[1], x[3] * factor[1]), T::pack(x[4] * factor[0], x[5] * factor[0]),
                      T::pack(x[6] * factor[1], x[7] * factor[1]));
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kColumns / kPanel; ++i) store_box(map, staging + i * panel_bytes, i * kPanel, head, row);
    bulk_commit();
  }
}
