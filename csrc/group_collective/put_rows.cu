// group_cast: puts rows by ordinary stores; receivers copy them. See put.cuh.
//
// Compile-time: UNIT (bytes of an access to rows that are sent or copied).

#include "put_kernel.cuh"
#include "units.cuh"

using Unit = UnitOf<UNIT>::Type;

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_put_rows(const __grid_constant__ PutParams p) {
  put<StoreSender<Unit>, RowCopier<Unit>>(p);
}
