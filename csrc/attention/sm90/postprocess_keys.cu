// Converts the fp32 sums of dK and dV, of tiles whose query heads were split into several items, to gradients: dK times
// the softmax scale.
//
// Compile-time: HEAD_DIM, DTYPE, STREAM_KV (see backward.cu), CAPTURED (mask_numbers.cuh; the grid may then have more
// blocks than there are tiles).

#include "gradients.cuh"

constexpr int kColumns = HEAD_DIM / 2;  // of a piece

struct PostprocessKeysParams {
  const float4* sums;  // [tiles, key heads, dk and dv, 2 halves, 8 units] pieces
  const int4* tiles;   // x: first row; w: number of rows
  void *dk, *dv;
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  int heads_kv, store;
  float scale;
#if STREAM_KV
  int store_remote;
  void *dk_remote, *dv_remote;
  ArrivalBarrier arrival_barrier;
#endif
#if CAPTURED
  const MaskNumbers* numbers;
#endif
};

// One thread block: half the columns of one tile and head, of dk or of dv.
extern "C" __global__ void __launch_bounds__(256)
    ffa_postprocess_keys(const __grid_constant__ PostprocessKeysParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int half = blockIdx.x % 2, values = blockIdx.x / 2 % 2, tile_head = blockIdx.x / 4;
#if CAPTURED
  if (tile_head / p.heads_kv >= __ldg(&p.numbers->num_split)) return;
#endif
  const int head = tile_head % p.heads_kv;
  const int4 tile = __ldg(p.tiles + tile_head / p.heads_kv);
  const i64 piece = static_cast<i64>(blockIdx.x) * 8 + warp;
  const int row = warp * 16 + lane / 4;
  const bool valid[2] = {row < tile.w, row + 8 < tile.w};
  const i64 row_stride = values ? p.dv_row : p.dk_row;
  const i64 at = (row_of_key(p, tile.x) + row) * row_stride + head * (values ? p.dv_head : p.dk_head) + half * kColumns;
  postprocess_piece<DTYPE, kColumns>(p.sums + piece * (kColumns / 8 * 32),
                                     values ? OF_KEY(p, tile.x, dv) : OF_KEY(p, tile.x, dk), at, row_stride, valid,
                                     OF_KEY(p, tile.x, store), values ? 1.f : p.scale, lane);
}
