// Converts rows of a mask to lists of the columns that are set, ascending.

#include "../../common/ptx.cuh"

struct SparseListsParams {
  const u8* mask;
  int *entries, *counts;  // [heads, rows, columns], the first counts[head, row] are valid; [heads, rows]
  i64 head_stride, row_stride, column_stride;
  int num_rows, num_columns, num_lists;  // num_lists: heads * rows
};

// One warp for each row.
extern "C" __global__ void __launch_bounds__(256) ffa_sparse_lists(const __grid_constant__ SparseListsParams p) {
  constexpr int kAtOnce = 4;
  await_earlier_kernels();
  const int list = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (list >= p.num_lists) return;
  const u8* row = p.mask + list / p.num_rows * p.head_stride + list % p.num_rows * p.row_stride;
  int* to = p.entries + static_cast<i64>(list) * p.num_columns;
  int count = 0;
  for (int first = lane; first - lane < p.num_columns; first += 32 * kAtOnce) {
    bool set[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + 32 * i;
      set[i] = column < p.num_columns && row[column * p.column_stride];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const u32 found = __ballot_sync(0xffffffffu, set[i]);
      if (set[i]) to[count + __popc(found & (1u << lane) - 1)] = first + 32 * i;
      count += __popc(found);
    }
  }
  if (lane == 0) p.counts[list] = count;
}
