// Bands, ranges, and how they are cut; equal to megatron_magi/mask/bands.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace magi {

using Int = std::int64_t;
using Ints = std::vector<Int>;

constexpr Int kNoDiagonal = Int{1} << 40;

struct Band {
  Int q0, q1, k0, k1, d_lo, d_hi;

  bool is_rectangle() const { return d_lo == -kNoDiagonal && d_hi == kNoDiagonal; }

  // Makes the band tight; false if it is empty.
  bool tighten() {
    if (d_lo >= d_hi) return false;
    q0 = std::max(q0, k0 - d_hi + 1);
    q1 = std::min(q1, k1 - d_lo);
    k0 = std::max(k0, q0 + d_lo);
    k1 = std::min(k1, q1 - 1 + d_hi);
    if (q0 >= q1 || k0 >= k1) return false;
    if (q1 - 1 + d_lo <= k0) d_lo = -kNoDiagonal;
    if (q0 + d_hi >= k1) d_hi = kNoDiagonal;
    return true;
  }
};
using Bands = std::vector<Band>;

struct Range {
  Int begin, end;
  bool operator<(const Range& other) const { return begin < other.begin; }
};
using Ranges = std::vector<Range>;

inline Int floor_div(Int a, Int b) { return a / b - (a % b < 0); }
inline Int ceil_div(Int a, Int b) { return -floor_div(-a, b); }

// The union, sorted.
inline Ranges merged(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  Ranges out;
  for (const Range& range : ranges) {
    if (out.empty() || range.begin > out.back().end) {
      out.push_back(range);
    } else {
      out.back().end = std::max(out.back().end, range.end);
    }
  }
  return out;
}

// Sum of first + i for start <= i < stop.
inline Int ramp(Int first, Int start, Int stop) {
  return (stop - start) * first + (stop - start) * (start + stop - 1) / 2;
}

// Number of visible pairs of a tight band, or of a part of its keys; at least one.
inline Int area(const Band& b) {
  const Int q0 = std::max(b.q0, b.k0 - b.d_hi + 1), rows = std::min(b.q1, b.k1 - b.d_lo) - q0;
  const Int high = std::max<Int>(0, b.k1 - b.d_hi - q0), low = std::min(rows, b.k0 - b.d_lo - q0);
  const Int ends = ramp(q0 + b.d_hi, 0, high) + (rows - high) * b.k1;
  const Int begins = low * b.k0 + ramp(q0 + b.d_lo, low, rows);
  return ends - begins;
}

// Cuts bands at rows; `visit` gets each piece, tight, and its segment, by bands and then by segments.
template <typename Visit>
void cut_rows(const Bands& bands, const Ints& bounds, Visit visit) {
  const Int last = static_cast<Int>(bounds.size()) - 1;
  for (const Band& band : bands) {
    Int i = std::upper_bound(bounds.begin() + 1, bounds.end(), band.q0) - bounds.begin() - 1;
    for (; i < last && bounds[i] < band.q1; ++i) {
      Band piece = band;
      piece.q0 = std::max(band.q0, bounds[i]), piece.q1 = std::min(band.q1, bounds[i + 1]);
      if (piece.tighten()) visit(piece, i);
    }
  }
}

}  // namespace magi
