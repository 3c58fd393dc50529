// The unit in which rows are copied, of kBytes bytes, which divide all widths, strides and addresses.
#pragma once

#include "../common/ptx.cuh"

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
