// Vector types and conversions for sums, which are accumulated in fp32, or in fp64 if either type is fp64.
#pragma once

#include "../common/ptx.cuh"

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

// Elements of one access.
template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Vector {
  T at[kElements];
};

template <class T, int kElements>
DEVICE auto element(const Vector<T, kElements>& x, int i) {
  return widen(x.at[i]);
}
// Two bf16 elements share a register; each is extracted with one instruction.
template <int kElements>
DEVICE float element(const Vector<BFloat, kElements>& x, int i) {
  if constexpr (kElements > 1) {
    u32 pair;
    memcpy(&pair, x.at + i / 2 * 2, sizeof(pair));
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
  } else {
    return widen(x.at[i]);
  }
}

template <bool kWide>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<true> {
  using Type = double;
};
// The accumulator of sums of elements of From to elements of Into.
template <class From, class Into>
using Accumulator = typename SumOf<sizeof(From) == 8 || sizeof(Into) == 8>::Type;
