// The unit in which rows are copied. Compile-time: UNIT (its bytes; divides all widths, strides and addresses).
#pragma once

#include "rows.cuh"

template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<1> {
  using Type = u8;
};
template <>
struct UnitOf<2> {
  using Type = u16;
};
template <>
struct UnitOf<4> {
  using Type = u32;
};
template <>
struct UnitOf<8> {
  using Type = u64;
};
template <>
struct UnitOf<16> {
  using Type = uint4;
};
using Unit = UnitOf<UNIT>::Type;
