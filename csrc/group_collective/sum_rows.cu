// Adds arriving rows to the rows they belong to: each result is read once, its contributions are added in their order,
// and it is written once. FROM, INTO: types of what arrives and of results. VECTOR: elements of an access.

#include "rows.cuh"

struct SumParams {
  RowTensors rows;     // from: what arrives; to: results
  const i64* into;     // [num_rows]: row of the result
  const i64* starts;   // [num_rows + 1]: contributions of the i-th are sources[starts[i]] to sources[starts[i + 1] - 1]
  const i64* sources;  // rows of what arrives
  i64 num_rows;
};

struct BFloat {
  u16 bits;
};
struct Half {
  u16 bits;
};

DEVICE float widen(BFloat x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float widen(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

template <class To, class Wide>
struct Narrow {
  static DEVICE To of(Wide x) { return static_cast<To>(x); }
};
template <>
struct Narrow<BFloat, float> {
  static DEVICE BFloat of(float x) {
    BFloat y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <>
struct Narrow<Half, float> {
  static DEVICE Half of(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};

template <class T>
struct alignas(VECTOR * sizeof(T)) Vector {
  T at[VECTOR];
};

template <bool kWide>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<true> {
  using Type = double;
};
using Sum = SumOf<sizeof(FROM) == 8 || sizeof(INTO) == 8>::Type;

DEVICE void add_row(const RowTensors& t, int i, i64 into, const i64* sources, i64 count, int unit) {
  auto* result = reinterpret_cast<Vector<INTO>*>(t.to[i] + into * t.to_stride[i]) + unit;
  const Vector<INTO> before = *result;
  Sum sum[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) sum[j] = widen(before.at[j]);
  for (i64 k = 0; k < count; ++k) {
    const auto part = reinterpret_cast<const Vector<FROM>*>(t.from[i] + sources[k] * t.from_stride[i])[unit];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[j] += widen(part.at[j]);
  }
  Vector<INTO> after;
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
