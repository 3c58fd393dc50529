// Transposes lists: for each column, the rows whose lists contain it, ascending, with multiplicity. A deterministic
// counting sort. Rows are divided into chunks, one for each thread block.
//
// Compile-time: PART. 0: counts the entries of each column in each chunk. 1: prefix sums of these counts over chunks,
// and the starts of the columns' lists. 2: writes the rows to their places.

#include "../../common/ptx.cuh"
#include "sparse_offsets.cuh"

struct SparseTransposeParams {
  const int* entries;        // of the lists: columns; invalid ones are skipped
  const int* offsets;        // [lists, rows + 1]: start of the list of each row; or null: each has `width` entries
  i64 head_step, list_step;  // without offsets: strides of entries between heads and between lists
  int* counts;               // [lists, chunks, columns]
  int* starts;               // [lists * columns + 1]
  int* rows;
  int* counter;  // zero between launches
  int width, num_lists, num_rows, num_columns, chunks, chunk_rows;
  int num_entries, num_places;  // sizes of `entries` and of `rows`
};

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // entries of the next row that a thread prefetches

struct Row {
  const int* entries;
  int count;

  DEVICE Row(const SparseTransposeParams& p, int list, int row) {
    if (p.offsets) {
      const int* at = p.offsets + static_cast<i64>(list) * (p.num_rows + 1) + row;
      const int begin = load_offset(at, p.num_entries);
      entries = p.entries + begin, count = load_offset(at + 1, p.num_entries) - begin;
    } else {
      entries = p.entries + list * p.head_step + row * p.list_step, count = p.width;
    }
  }
  DEVICE int load(int at) const { return at < count ? __ldg(entries + at) : -1; }
  // This thread's entries from `first` on.
  DEVICE void load(int (&to)[kAhead], int first) const {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) to[j] = load(first + j * kThreads + static_cast<int>(threadIdx.x));
  }
};

// Parts 0 and 2: columns processed at a time.
constexpr int kWindow = 8192;

DEVICE void count_or_place(const SparseTransposeParams& p) {
  __shared__ int columns[kWindow];
  const int list = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int first_row = chunk * p.chunk_rows, past_row = min(p.num_rows, first_row + p.chunk_rows);
  for (int first = 0; first < p.num_columns; first += kWindow) {
    const u32 window = min(kWindow, p.num_columns - first);
    int* counts = p.counts + static_cast<i64>(blockIdx.x) * p.num_columns + first;
    const int* starts = p.starts + static_cast<i64>(list) * p.num_columns + first;
    for (int i = threadIdx.x; i < window; i += kThreads) columns[i] = PART ? starts[i] + counts[i] : 0;
    __syncthreads();
    if (PART == 0) {  // one warp for each row
      for (int row = first_row + threadIdx.x / 32; row < past_row; row += kThreads / 32) {
        const Row now(p, list, row);
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < now.count; i += 32) {
          const u32 column = now.load(i) - first;
          if (column < window) atomicAdd(columns + column, 1);
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < window; i += kThreads) counts[i] = columns[i];
    } else if (first_row < past_row) {  // one row at a time, so that rows are in ascending order
      int ahead[kAhead];
      Row(p, list, first_row).load(ahead, 0);
      for (int row = first_row; row < past_row; ++row) {
        const Row now(p, list, row);
        int entries[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) entries[j] = ahead[j];
        if (row + 1 < past_row) Row(p, list, row + 1).load(ahead, 0);
        for (int i = 0; i < now.count; i += kAhead * kThreads) {
          if (i) now.load(entries, i);
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            const u32 column = entries[j] - first;
            if (column >= window) continue;
            const u32 place = atomicAdd(columns + column, 1);
            if (place < p.num_places) p.rows[place] = row;  // overlapping lists may have more entries in total
          }
        }
        __syncthreads();
      }
    }
    __syncthreads();
  }
}

constexpr int kColumns = 8, kSlices = kThreads / kColumns;  // of a thread block: columns of all lists, slices of chunks
constexpr int kMostChunks = 17;                             // chunks of a slice; see sparse_lists.py

// Exclusive prefix sum over the threads of the block; `sums`: shared, one word for each warp.
DEVICE int sum_before(int number, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = number;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  sum -= number;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += i < warp ? sums[i] : 0;
  return sum;
}

// Part 1. The last thread block to finish turns the counts of columns into starts.
DEVICE void scan(const SparseTransposeParams& p) {
  __shared__ int sums[kThreads];
  __shared__ bool last;
  const int at = threadIdx.x % kColumns, slice = threadIdx.x / kColumns, all = p.num_lists * p.num_columns;
  const int column = blockIdx.x * kColumns + at, list = column / p.num_columns;
  const int per_slice = (p.chunks + kSlices - 1) / kSlices, first = slice * per_slice;
  const int num = column < all ? min(p.chunks, first + per_slice) - first : 0;
  int* counts = p.counts + (static_cast<i64>(list) * p.chunks + first) * p.num_columns + column % p.num_columns;
  int count[kMostChunks], sum = 0;
#pragma unroll
  for (int i = 0; i < kMostChunks; ++i) count[i] = i < num ? counts[static_cast<i64>(i) * p.num_columns] : 0;
#pragma unroll
  for (int i = 0; i < kMostChunks; ++i) sum += count[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  int before = 0;
#pragma unroll
  for (int i = 0; i < kSlices; ++i) before += i < slice ? sums[kColumns * i + at] : 0;
  if (column < all && slice == kSlices - 1) p.starts[column + 1] = before + sum;
#pragma unroll
  for (int i = 0; i < kMostChunks; ++i) {
    if (i < num) counts[static_cast<i64>(i) * p.num_columns] = before;
    before += count[i];
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(p.counter, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int each = (all + kThreads - 1) / kThreads, begin = threadIdx.x * each, end = min(all, begin + each);
  sum = 0;
#pragma unroll 8
  for (int i = begin; i < end; ++i) sum += __ldcg(p.starts + i + 1);
  sum = sum_before(sum, sums);
#pragma unroll 8
  for (int i = begin; i < end; ++i) {
    sum += __ldcg(p.starts + i + 1);
    p.starts[i + 1] = sum;
  }
  if (threadIdx.x == 0) p.starts[0] = 0, *p.counter = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    ffa_sparse_transpose(const __grid_constant__ SparseTransposeParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
#if PART == 1
  scan(p);
#else
  count_or_place(p);
#endif
}
