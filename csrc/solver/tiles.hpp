// Tiles of a mask for the attention kernels; functions are equivalent to those of the same names in
// megatron_magi/backends/sm90/tiles.py and cuts.py.
#pragma once

#include <numeric>

#include "bands.hpp"

namespace magi {

constexpr Int kEverything = Int{1} << 30;

inline Int total(const Ranges& ranges) {
  return std::accumulate(ranges.begin(), ranges.end(), Int{0},
                         [](Int sum, const Range& range) { return sum + range.end - range.begin; });
}

// Columns in both, of two unions.
inline Int common(const Ranges& a, const Ranges& b) {
  Int sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size(); a[i].end < b[j].end ? ++i : ++j)
    sum += std::max<Int>(0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
  return sum;
}

// Joins rectangles of the same rows with adjacent columns.
inline Bands join_columns(const Bands& bands) {
  Bands sorted = bands;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Band& a, const Band& b) {
    return a.q0 != b.q0 ? a.q0 < b.q0 : a.q1 != b.q1 ? a.q1 < b.q1 : a.k0 < b.k0;
  });
  Bands out;
  const Band* before = nullptr;
  for (const Band& band : sorted) {
    if (before && band.q0 == before->q0 && band.q1 == before->q1 && band.k0 == before->k1 &&
        before->d_hi == kNoDiagonal && band.d_lo == -kNoDiagonal) {
      out.back().k1 = band.k1, out.back().d_hi = band.d_hi;
    } else {
      out.push_back(band);
    }
    before = &band;
  }
  return out.size() == bands.size() ? bands : out;
}

struct Columns {
  Ints length, shared;
};

// For the rows between two breaks: number of columns that they see, and of those that the preceding rows see too.
inline Columns segment_columns(const Bands& bands, const Ints& breaks) {
  const Int count = static_cast<Int>(breaks.size()) - 1;
  Columns out{Ints(count), Ints(count)};
  if (!std::all_of(bands.begin(), bands.end(), [](const Band& band) { return band.is_rectangle(); })) {
    std::vector<Ranges> seen(count);
    cut_rows(bands, breaks, [&](const Band& piece, Int i) { seen[i].push_back({piece.k0, piece.k1}); });
    for (Int i = 0; i < count; ++i) {
      seen[i] = merged(std::move(seen[i]));
      out.length[i] = total(seen[i]);
      out.shared[i] = i ? common(seen[i], seen[i - 1]) : 0;
    }
    return out;
  }
  // With disjoint rectangles, only those that end or begin change at a break.
  Ints begun(count + 1), ended(count + 1);
  std::vector<Ranges> changed(count + 1);
  for (const Band& band : bands) {
    const auto at = [&](Int row) { return std::lower_bound(breaks.begin(), breaks.end(), row) - breaks.begin(); };
    const Int from = at(band.q0), to = at(band.q1);
    begun[from] += band.k1 - band.k0, ended[to] += band.k1 - band.k0;
    changed[from].push_back({band.k0, band.k1}), changed[to].push_back({band.k0, band.k1});
  }
  for (Int i = 0, length = 0; i < count; ++i) {
    length += begun[i] - ended[i];
    out.length[i] = length;
    out.shared[i] = length + ended[i] - total(merged(std::move(changed[i])));
  }
  return out;
}

// First rows of the tiles.
inline Ints tile_starts(const Bands& bands, Int num_rows, Int block_m, Int tile_cost_columns, double masked_cost) {
  Ints breaks{0, num_rows};
  for (const Band& band : bands) breaks.push_back(band.q0), breaks.push_back(band.q1);
  std::sort(breaks.begin(), breaks.end());
  breaks.erase(std::unique(breaks.begin(), breaks.end()), breaks.end());
  Ints starts;
  if (breaks.size() <= 2) {
    for (Int row = 0; row < num_rows; row += block_m) starts.push_back(row);
    return starts;
  }
  const Columns of = segment_columns(bands, breaks);
  const std::size_t count = of.length.size();
  starts.push_back(0);
  Int first = 0;  // row of the open tile
  for (std::size_t i = 0; i < count; ++i) {
    const Int begin = breaks[i], end = breaks[i + 1], columns = of.length[i];
    const Int room = block_m - (begin - first), rows = end - begin;
    if (begin != first && rows > room) {
      const bool goes_on = i + 1 < count && 2 * of.shared[i + 1] > columns;
      const Int whole = ceil_div(rows, block_m) + floor_div(room - rows, block_m);
      // Tiles, if the open one is closed here.
      const double more =
          goes_on ? static_cast<double>(room) / static_cast<double>(block_m) : static_cast<double>(whole);
      const double masked = of.shared[i] || goes_on ? 0 : masked_cost * static_cast<double>(columns);
      if (more * static_cast<double>(columns + tile_cost_columns) <=
          static_cast<double>(columns - of.shared[i]) + masked) {
        first = begin;
        starts.push_back(begin);
      }
    }
    for (; end - first > block_m; first += block_m) starts.push_back(first + block_m);
  }
  return starts;
}

struct TileShape {
  Int num_rows, block_m, block_n, align, hide_tail, parts, tile_cost_columns;
  double pass_cost, masked_cost;
};

// The plan of a mask, step by step.
struct Tiles {
  TileShape shape;
  Ints starts;
  Bands pieces;  // cut at the borders of tiles; once in passes sorted by (pass, first row)
  Ints tile;     // of each piece; later of each pass
  Ints pass_of_piece;

  Tiles(const Band* bands, Int count, const TileShape& of) : shape(of) {
    Bands tight;
    for (Int i = 0; i < count; ++i) {
      Band band = bands[i];
      if (band.tighten()) tight.push_back(band);
    }
    tight = join_columns(tight);
    starts = tile_starts(tight, shape.num_rows, shape.block_m, shape.tile_cost_columns, shape.masked_cost);
    Ints bounds = starts;
    bounds.push_back(shape.num_rows);
    cut_rows(tight, bounds, [&](const Band& piece, Int i) { pieces.push_back(piece), tile.push_back(i); });
  }

  Int num_tiles() const { return static_cast<Int>(starts.size()); }
  Int num_pieces() const { return static_cast<Int>(pieces.size()); }
  Int num_passes() const { return pass_of_piece.empty() ? 0 : pass_of_piece.back() + 1; }

  // Groups close pieces into passes; returns false, without changes, if a row would have two intervals in a pass.
  bool assign() {
    const Int count = num_pieces(), reach = shape.block_n / 2;
    Ints order(count), group(count);
    std::iota(order.begin(), order.end(), Int{0});
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) {
      return tile[a] != tile[b] ? tile[a] < tile[b] : pieces[a].k0 < pieces[b].k0;
    });
    Int current = -1, end = 0;
    for (Int n = 0; n < count; ++n) {
      const Int i = order[n];
      if (!n || tile[i] != tile[order[n - 1]] || pieces[i].k0 > end) ++current, end = pieces[i].k1 + reach;
      end = std::max(end, pieces[i].k1 + reach);
      group[i] = current;
    }
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) {
      return group[a] != group[b] ? group[a] < group[b] : pieces[a].q0 < pieces[b].q0;
    });
    Bands sorted(count);
    Ints pass(count), tile_of_pass(current + 1);
    for (Int n = 0; n < count; ++n) {
      const Int i = order[n];
      sorted[n] = pieces[i], pass[n] = group[i], tile_of_pass[group[i]] = tile[i];
      if (n && pass[n] == pass[n - 1] && sorted[n].q0 < sorted[n - 1].q1) return false;
    }
    pieces = std::move(sorted), pass_of_piece = std::move(pass), tile = std::move(tile_of_pass);
    return true;
  }

  Int num_rows(Int i) const { return (i + 1 < num_tiles() ? starts[i + 1] : shape.num_rows) - starts[i]; }

  // First piece of each pass, and the number of pieces.
  Ints first_pieces() const {
    Ints first;
    for (Int i = 0; i < num_pieces(); ++i)
      if (!i || pass_of_piece[i] != pass_of_piece[i - 1]) first.push_back(i);
    first.push_back(num_pieces());
    return first;
  }

  // Writes `TilePlan`: tiles by decreasing cost.
  void write(std::int32_t* tiles, std::int32_t* passes, std::int32_t* bounds, Int* costs) const {
    const Ints first = first_pieces();
    describe_all(first, tiles, passes, costs);
    for (Int i = 0; i < num_passes(); ++i) write_bounds(first, i, 1, bounds + i * shape.block_m * 2);
  }

  // The same but the bounds; `first`: of `first_pieces`.
  void describe_all(const Ints& first, std::int32_t* tiles, std::int32_t* passes, Int* costs) const {
    const Int count = num_tiles(), num = num_passes();
    Ints blocks(count), first_pass(count + 1), order(count);
    for (Int i = 0; i < num; ++i) ++first_pass[tile[i] + 1];
    std::partial_sum(first_pass.begin(), first_pass.end(), first_pass.begin());
    for (Int i = 0; i < num; ++i) {
      describe(first[i], first[i + 1], starts[tile[i]], num_rows(tile[i]), passes + 8 * i);
      blocks[tile[i]] += passes[8 * i + 1];
    }
    std::vector<double> cost(count);
    for (Int i = 0; i < count; ++i)
      cost[i] =
          static_cast<double>(blocks[i]) + shape.pass_cost * static_cast<double>(1 + first_pass[i + 1] - first_pass[i]);
    std::iota(order.begin(), order.end(), Int{0});
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) { return cost[a] > cost[b]; });
    for (Int n = 0; n < count; ++n) {
      const Int i = order[n], values[] = {starts[i], first_pass[i], first_pass[i + 1], num_rows(i)};
      std::copy(values, values + 4, tiles + 4 * n);
      costs[n] = blocks[i];
    }
  }

  // Columns of the rows of a pass, `scale` times as many; `first`: of `first_pieces`.
  void write_bounds(const Ints& first, Int pass, Int scale, std::int32_t* of_rows) const {
    const Int row0 = starts[tile[pass]];
    std::fill(of_rows, of_rows + 2 * shape.block_m, 0);
    for (Int j = first[pass]; j < first[pass + 1]; ++j) fill_bounds(pieces[j], row0, scale, of_rows);
    if (!shape.hide_tail)
      for (Int row = num_rows(tile[pass]); row < shape.block_m; ++row)
        of_rows[2 * row + 1] = static_cast<std::int32_t>(kEverything);
  }

 private:
  // A diagonal that is missing is replaced by a line so far away that it cuts nothing.
  static void fill_bounds(const Band& piece, Int row0, Int scale, std::int32_t* of_rows) {
    const bool has_lo = piece.d_lo != -kNoDiagonal, has_hi = piece.d_hi != kNoDiagonal;
    const auto lo = static_cast<std::int32_t>(has_lo ? piece.q0 + piece.d_lo : -kEverything);
    const auto hi = static_cast<std::int32_t>(has_hi ? piece.q0 + piece.d_hi : kEverything);
    const auto k0 = static_cast<std::int32_t>(piece.k0), k1 = static_cast<std::int32_t>(piece.k1);
    const auto count = static_cast<std::int32_t>(piece.q1 - piece.q0), times = static_cast<std::int32_t>(scale);
    std::int32_t* bound = of_rows + 2 * (piece.q0 - row0);
    for (std::int32_t row = 0; row < count; ++row) {
      bound[2 * row] = times * std::max(k0, lo + row);
      bound[2 * row + 1] = times * std::min(k1, hi + row);
    }
  }

  // A pass of the pieces from `begin` to `end`, of a tile of `height` rows.
  void describe(Int begin, Int end, Int row0, Int height, std::int32_t* pass) const {
    Int first = pieces[begin].k0, past = pieces[begin].k1;
    for (Int j = begin; j < end; ++j) first = std::min(first, pieces[j].k0), past = std::max(past, pieces[j].k1);
    first = floor_div(first, shape.align) * shape.align;
    const Int count = ceil_div(past - first, shape.block_n), part_rows = shape.block_m / shape.parts;
    pass[0] = static_cast<std::int32_t>(first), pass[1] = static_cast<std::int32_t>(count);
    for (Int part = 0; part < 3; ++part) {
      const Int offset = part % shape.parts * part_rows, from = row0 + offset;
      const Int rows = shape.hide_tail ? part_rows : std::clamp<Int>(height - offset, 0, part_rows);
      Int low = 0, high = kEverything, seen = 0;  // columns that all rows see, and rows that see any
      for (Int j = begin; j < end; ++j) {
        const Int a = std::max(pieces[j].q0, from), b = std::min(pieces[j].q1, from + rows);
        if (a >= b) continue;
        low = std::max({low, pieces[j].k0, b - 1 + pieces[j].d_lo});
        high = std::min({high, pieces[j].k1, a + pieces[j].d_hi}), seen += b - a;
      }
      if (seen < rows) high = 0;
      const Int full = std::clamp<Int>(ceil_div(low - first, shape.block_n), 0, count);
      pass[2 + 2 * part] = static_cast<std::int32_t>(full);
      pass[3 + 2 * part] = static_cast<std::int32_t>(std::clamp(floor_div(high - first, shape.block_n), full, count));
    }
  }
};

}  // namespace magi
