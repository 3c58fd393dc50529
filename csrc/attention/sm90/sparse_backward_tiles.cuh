// Shared by the kernels of the sparse backward whose work item is a tile of 128 accumulator rows (sparse_tiles.cuh) and
// that accumulate its dQ.
#pragma once

#include "sparse_tiles.cuh"

struct SparseBackwardParams {
  TensorMap q, k, v, dout;
  SparseTiles tiles;
  const u16 *keys, *values;  // from which single keys are gathered
  const float *lse, *delta;  // [rows, heads]
  u16* dq;
  // Of single keys. Sums of dK, without the softmax scale, and dV, [key heads, sum_rows, columns], whose columns are
  // permuted: in every 16, those of thread t of a row (2t, 2t + 1, 2t + 8, 2t + 9) are adjacent.
  float *dk_sums, *dv_sums;
  // Or with STORED what each query gives to dV and dK, with the softmax scale, of each key of its list, summed over the
  // heads of a pack: [packs, rows, list_places, 2, columns]. In every 32 columns those of thread t (8j + 2t, 8j + 2t +
  // 1, j = 0 to 3) are adjacent.
  u16* given;
  int k_row, v_row;                                                               // strides, elements
  i64 k_head, v_head, lse_row, lse_head, delta_row, delta_head, dq_row, dq_head;  // strides, elements
  i64 sum_rows;
  int list_places;  // length of a list, rounded up to steps
  float scale, scale_log2;
};

// Shared memory of both kernels: the tile, and kStages buffers of keys and of values.
template <int kHeadDim, int kGroups, int kStep, int kStages>
struct TileBuffers {
  alignas(kSwizzleAtomBytes) u16 q[kGroups][kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 dout[kGroups][kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kStep][kPanel];
  u16 v[kStages][kHeadDim / kPanel][kStep][kPanel];
  u64 rows_full, rows_empty;
  u64 full[kStages], empty[kStages];
  StepInfo info[kStages];

  // Initializes the mbarriers, by one thread; `arrivals`: of the full barriers of keys and values; `row_readers`: warps
  // that release queries and dO.
  DEVICE void init(u32 arrivals, u32 row_readers = 4 * kGroups) {
    init_buffer(rows_full, rows_empty, row_readers);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&full[i]), arrivals);
      barrier_init(smem_address(&empty[i]), 4 * kGroups);
    }
    barrier_init_fence();
  }
};

// Loads queries and dO of a tile once those of the previous tile are released. Called by one thread.
template <int kHeadDim, int kGroups, int kStep, int kStages>
DEVICE void load_queries(const SparseBackwardParams& p, TileBuffers<kHeadDim, kGroups, kStep, kStages>& s,
                         const Tile& tile, u32 parity) {
  const u32 bar = smem_address(&s.rows_full), bytes = sizeof(s.q) + sizeof(s.dout);
  barrier_wait(smem_address(&s.rows_empty), parity);
  barrier_expect_bytes(bar, bytes);
#pragma unroll
  for (int w = 0; w < kGroups; ++w) {
    load_tile_rows<kHeadDim>(&p.q, smem_address(s.q[w]), p.tiles, tile, w, bar);
    load_tile_rows<kHeadDim>(&p.dout, smem_address(s.dout[w]), p.tiles, tile, w, bar);
  }
}

// The two accumulator rows of a thread in a tile.
struct BackwardThreadRows : SparseThreadRows {
  float lse[2], delta[2];

  using SparseThreadRows::SparseThreadRows;

  // lse is inf, so that all probabilities are 0, for rows outside the tile and for rows that see no keys.
  DEVICE void load_stats(const SparseBackwardParams& p, int first_row, int head_rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 at_row = first_row + row[r], at_head = (head_rows & 0xffff) + head[r];
      lse[r] = kInfinity, delta[r] = 0.f;
      if (row[r] < head_rows >> 16) {
        const float x = __ldg(p.lse + at_row * p.lse_row + at_head * p.lse_head);
        lse[r] = x == -kInfinity ? kInfinity : x * kLog2e;
        delta[r] = __ldg(p.delta + at_row * p.delta_row + at_head * p.delta_head);
      }
    }
  }

  template <typename T, int kHeadDim>
  DEVICE void store_dq(const SparseBackwardParams& p, const float (&dq)[kHeadDim / 2], int first_row, int head_rows,
                       int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u16* to = p.dq + (first_row + row[r]) * p.dq_row + ((head_rows & 0xffff) + head[r]) * p.dq_head;
#pragma unroll
      for (int g = 0; g < kHeadDim / 32; ++g) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = dq + 4 * (4 * g + j) + 2 * r;
          word[j] = T::pack(x[0] * p.scale, x[1] * p.scale);
        }
        transpose_quad(word, lane);
        if (row[r] < head_rows >> 16)
          *reinterpret_cast<uint4*>(to + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
};
