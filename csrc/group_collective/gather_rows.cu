// Copies rows: row i of each result is row index[i] of its source.
//
// Compile-time: UNIT (bytes of an access; divides all widths, strides and addresses).

#include "rows.cuh"
#include "units.cuh"

using Unit = UnitOf<UNIT>::Type;

struct GatherParams {
  RowTensors rows;
  const i64* index;  // null: identity
  i64 num_rows;
};

DEVICE void copy_row(Unit* to, const Unit* from, int units, int lane, int lanes) {
  for (int unit = lane; unit < units; unit += kInFlight * lanes) {
    Unit value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (unit + i * lanes < units) value[i] = from[unit + i * lanes];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (unit + i * lanes < units) to[unit + i * lanes] = value[i];
  }
}

extern "C" __global__ void __launch_bounds__(256) magi_gather_rows(const __grid_constant__ GatherParams p) {
  const RowTensors& t = p.rows;
  const RowWalk walk = my_rows(t.log2_lanes);
  for (i64 row = walk.row; row < p.num_rows; row += walk.step) {
    const i64 source = p.index != nullptr ? p.index[row] : row;
#pragma unroll
    for (int i = 0; i < kMaxTensors; ++i)
      if (i < t.num_tensors)
        copy_row(reinterpret_cast<Unit*>(t.to[i] + row * t.to_stride[i]),
                 reinterpret_cast<const Unit*>(t.from[i] + source * t.from_stride[i]), t.units[i], walk.lane,
                 walk.lanes);
  }
}
