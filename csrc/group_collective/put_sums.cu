// group_reduce: puts rows by ordinary stores; receivers add them. See put.cuh.
//
// Compile-time: UNIT (bytes of an access to rows that are sent), FROM, INTO (element types of the addends and of the
// results), VECTOR (elements of an access).

#include "put_kernel.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_put_sums(const __grid_constant__ PutParams p) {
  put<StoreSender<UnitOf<UNIT>::Type>, RowAdder<FROM, INTO, VECTOR>>(p);
}
