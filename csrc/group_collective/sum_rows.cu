// Adds received rows to the rows of the result: each result is read once, its addends are added in a fixed order, and
// it is written once.
//
// Compile-time: FROM, INTO (element types of the addends and of the results), VECTOR (elements of an access).

#include "numbers.cuh"
#include "rows.cuh"

using From = Vector<FROM, VECTOR>;
using Into = Vector<INTO, VECTOR>;
using Sum = Accumulator<FROM, INTO>;

struct SumParams {
  RowTensors rows;     // from: received rows; to: results
  const i64* into;     // [num_rows]: row of the result
  const i64* starts;   // [num_rows + 1]: the addends of the i-th are sources[starts[i]] to sources[starts[i + 1] - 1]
  const i64* sources;  // received rows
  i64 num_rows;
};

DEVICE void add_row(const RowTensors& t, int i, i64 into, const i64* sources, i64 count, int unit) {
  auto* result = reinterpret_cast<Into*>(t.to[i] + into * t.to_stride[i]) + unit;
  const Into before = *result;
  Sum sum[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) sum[j] = widen(before.at[j]);
  for (i64 k = 0; k < count; ++k) {
    const auto part = reinterpret_cast<const From*>(t.from[i] + sources[k] * t.from_stride[i])[unit];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[j] += widen(part.at[j]);
  }
  Into after;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) after.at[j] = Narrow<INTO, Sum>::of(sum[j]);
  *result = after;
}

extern "C" __global__ void __launch_bounds__(256) magi_sum_rows(const __grid_constant__ SumParams p) {
  const RowTensors& t = p.rows;
  const RowWalk walk = my_rows(t.log2_lanes);
  for (i64 row = walk.row; row < p.num_rows; row += walk.step) {
    const i64 first = p.starts[row], count = p.starts[row + 1] - first, into = p.into[row];
#pragma unroll
    for (int i = 0; i < kMaxTensors; ++i)
      if (i < t.num_tensors)
        for (int unit = walk.lane; unit < t.units[i]; unit += walk.lanes)
          add_row(t, i, into, p.sources + first, count, unit);
  }
}
