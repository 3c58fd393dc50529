// For each key the places where lists name it, in no order.
//
// Compile-time: PART. 0: counts the places of each key, from 0. 1: given the running sums of these counts, writes the
// places; the sums become starts.

#include "../../common/ptx.cuh"

struct SparsePlacesParams {
  const int* entries;        // of the lists: keys; invalid ones are skipped
  i64 head_step, list_step;  // strides of entries between heads and between lists
  int* ends;                 // [lists, keys], and one more
  int* places;               // row * list_places + number in the list
  int width, list_places, num_lists, num_rows, num_keys;
};

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // entries that a thread loads at once

extern "C" __global__ void __launch_bounds__(kThreads) ffa_sparse_places(const __grid_constant__ SparsePlacesParams p) {
  await_earlier_kernels();
  for (int item = blockIdx.x; item < p.num_lists * p.num_rows; item += gridDim.x) {
    const int list = item / p.num_rows, row = item % p.num_rows;
    const int* entries = p.entries + list * p.head_step + row * p.list_step;
    int* ends = p.ends + static_cast<i64>(list) * p.num_keys;
    for (int first = threadIdx.x; first < p.width; first += kAhead * kThreads) {
      int key[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int at = first + j * kThreads;
        key[j] = at < p.width ? __ldg(entries + at) : -1;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (static_cast<u32>(key[j]) >= static_cast<u32>(p.num_keys)) continue;
        if (PART == 0)
          atomicAdd(ends + key[j], 1);
        else
          p.places[atomicSub(ends + key[j], 1) - 1] = row * p.list_places + first + j * kThreads;
      }
    }
  }
}
