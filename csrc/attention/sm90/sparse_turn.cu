// Turns lists around: for each column the rows whose lists name it, in rising order and as often as they do. A counting
// sort, whose result does not depend on time. Rows are cut in chunks, one a thread block.
//
// Compile-time: PART. 0: counts of the columns of each chunk. 1: of these, for each column, how many of earlier chunks,
// and where the columns' lists begin. 2: the rows in their places.

#include "../../common/ptx.cuh"
#include "sparse_offsets.cuh"

struct SparseTurnParams {
  const int* entries;        // of the lists: columns; what is none is passed over
  const int* offsets;        // [lists, rows + 1]: where the list of a row begins; or null: each has `width` entries
  i64 head_step, list_step;  // without offsets: from a head's lists to the next's; from one list to the next
  int* counts;               // [lists, chunks, columns]
  int* starts;               // [lists * columns + 1]
  int* rows;
  int* counter;  // two words, zero before and after
  int width, num_lists, num_rows, num_columns, chunks, chunk_rows;
  int num_entries, num_places;  // that offsets may point to; of `rows`
};

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // entries of a row that a thread has before the row's turn

struct Row {
  const int* entries;
  int count;

  DEVICE Row(const SparseTurnParams& p, int list, int row) {
    if (p.offsets) {
      const int* at = p.offsets + static_cast<i64>(list) * (p.num_rows + 1) + row;
      const int begin = load_offset(at, p.num_entries);
      entries = p.entries + begin, count = load_offset(at + 1, p.num_entries) - begin;
    } else {
      entries = p.entries + list * p.head_step + row * p.list_step, count = p.width;
    }
  }
  DEVICE int load(int at) const { return at < count ? __ldg(entries + at) : -1; }
  // From `first` on, of this thread.
  DEVICE void load(int (&to)[kAhead], int first) const {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) to[j] = load(first + j * kThreads + static_cast<int>(threadIdx.x));
  }
};

// Parts 0 and 2: so many columns at a time.
constexpr int kWindow = 8192;

DEVICE void count_or_place(const SparseTurnParams& p) {
  __shared__ int columns[kWindow];
  const int list = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int first_row = chunk * p.chunk_rows, past_row = min(p.num_rows, first_row + p.chunk_rows);
  for (int first = 0; first < p.num_columns; first += kWindow) {
    const u32 window = min(kWindow, p.num_columns - first);
    int* counts = p.counts + static_cast<i64>(blockIdx.x) * p.num_columns + first;
    const int* starts = p.starts + static_cast<i64>(list) * p.num_columns + first;
    for (int i = threadIdx.x; i < window; i += kThreads) columns[i] = PART ? starts[i] + counts[i] : 0;
    __syncthreads();
    if (PART == 0) {  // a warp a row
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
    } else if (first_row < past_row) {  // row after row
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
            if (place < p.num_places) p.rows[place] = row;  // not of lists that share entries
          }
        }
        __syncthreads();
      }
    }
    __syncthreads();
  }
}

constexpr int kColumns = 8, kSlices = kThreads / kColumns;  // of a block: columns of all lists, and slices of chunks
constexpr int kMostChunks = 17;                             // of a slice; see sparse_lists.py

// For each thread the sum of the numbers of those before it; `sums`: one word a warp.
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

// The last block to be done adds up the columns.
DEVICE void scan(const SparseTurnParams& p) {
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

extern "C" __global__ void __launch_bounds__(kThreads) ffa_sparse_turn(const __grid_constant__ SparseTurnParams p) {
  await_earlier_kernels();
  let_next_kernel_start();
#if PART == 1
  scan(p);
#else
  count_or_place(p);
#endif
}
