// group_cast: puts long rows by TMA; receivers copy them. See put.cuh.
//
// Compile-time: UNIT (bytes of an access to rows that are sent or copied), 16.

#include "put_kernel.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_put_rows_bulk(const __grid_constant__ PutParams p) {
  put<BulkSender<true>, RowCopier<UnitOf<UNIT>::Type>>(p);
}
