// Epilogue through shared memory: a warp writes its 16 rows of accumulators to a staging buffer, and TMA stores them to
// global memory while the warp continues. Direct stores from registers would need shuffles, and each would touch eight
// rows.
#pragma once

#include "tiles.cuh"

// Staging buffers of kWarps warps: swizzled panels, as in a tensor map with boxes of 16 rows.
template <int kColumns, int kWarps>
struct Staging {
  alignas(kSwizzleAtomBytes) u16 rows[kWarps][kColumns / kPanel][16][kPanel];
  DEVICE u32 of_warp(int index) const { return uniform(smem_address(rows[index])); }
};

// No staging.
template <int kColumns>
struct Staging<kColumns, 0> {
  DEVICE u32 of_warp(int) const { return 0; }
};

// Stores factor * acc of this warp's 16 rows, all of which are written. `row`, `head`: start of the box, read from lane
// 0.
template <typename T, int kColumns>
DEVICE void store_staged(const TensorMap* map, u32 staging, u32 panel_bytes, const float (&acc)[kColumns / 2],
                         const float (&factor)[2], int row, int head, int lane) {
  if (lane == 0) bulk_wait_read();  // the previous store has read the buffer
  __syncwarp();
  const u32 at = staging + lane % 16 * kPanelRowBytes + ((lane / 16 ^ lane % 8) << 4);
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
