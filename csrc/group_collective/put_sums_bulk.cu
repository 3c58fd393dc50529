// group_reduce: puts long rows by TMA; receivers add them. See put.cuh.
//
// Compile-time: FROM, INTO (element types of the addends and of the results), VECTOR (elements of an access).

#include "put_kernel.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_put_sums_bulk(const __grid_constant__ PutParams p) {
  put<BulkSender<false>, RowAdder<FROM, INTO, VECTOR>>(p);
}
