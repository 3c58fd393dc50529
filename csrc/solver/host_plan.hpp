// The tables of a pass, in the form that is copied to a device: `make_host_plan` of
// megatron_magi/backends/sm90/plan.py.
#pragma once

#include "tile_order.hpp"
#include "tiles.hpp"

namespace magi {

// Arguments of `make_host_plan`. `own`: of the tiles, of a backward those of own keys where others arrive, whose tiles
// are then `later`. `first`: the first arriving key; -1 where none arrives.
struct HostShape {
  TileShape own, later;
  Int is_backward, packed, first, num_arriving, late, lead;
};

inline Band transposed(const Band& of) { return {of.k0, of.k1, of.q0, of.q1, 1 - of.d_hi, 1 - of.d_lo}; }

inline Band shifted_keys(Band of, Int by) {
  of.k0 += by, of.k1 += by;
  if (of.d_lo != -kNoDiagonal) of.d_lo += by;
  if (of.d_hi != kNoDiagonal) of.d_hi += by;
  return of;
}

class HostPlan {
 public:
  bool is_done = false;  // else passes have to be found by numpy
  double drifts[2] = {0.0, 0.0};

  HostPlan(const Band* bands, Int count, const HostShape& shape) : shape_(shape) {
    std::vector<Bands> of_parts(1);
    if (!shape.is_backward) {
      of_parts[0].assign(bands, bands + count);
    } else {
      of_parts.resize(shape.first < 0 ? 1 : 2);
      for (Int i = 0; i < count; ++i) {
        const bool arrives = shape.first >= 0 && bands[i].k0 >= shape.first;
        of_parts[arrives].push_back(transposed(arrives ? shifted_keys(bands[i], -shape.first) : bands[i]));
      }
    }
    for (std::size_t i = 0; i < of_parts.size(); ++i) {
      parts_.emplace_back(of_parts[i].data(), static_cast<Int>(of_parts[i].size()), i ? shape.later : shape.own);
      if (!parts_.back().assign()) return;
    }
    is_done = true;
    describe();
    const TilesView view{tiles_.data(), passes_.data(), costs_.data(), num_tiles(), shape.own.block_n};
    if (!shape.is_backward) {
      if (shape.first >= 0) reorder(magi::local_first(view, shape.first, shape.num_arriving, shape.late, shape.lead));
      return;
    }
    magi::drift(view, drifts);
    is_reversed_ = drifts[1] < drifts[0];
  }

  Int num_tiles() const { return static_cast<Int>(costs_.size()); }
  Int num_passes() const { return static_cast<Int>(passes_.size()) / 8; }
  Int step() const { return (is_reversed_ ? -1 : 1) * shape_.own.block_n * (shape_.is_backward ? shape_.packed : 1); }

  // `table` receives tiles, passes, bounds and four zeros; `starts` and `costs` those of tiles.
  void write(std::int32_t* table, std::int32_t* starts, Int* costs) const {
    const Int count = num_tiles(), num = num_passes(), block_m = shape_.own.block_m;
    const Int scale = shape_.is_backward ? shape_.packed : 1;
    std::copy(tiles_.begin(), tiles_.end(), table);
    std::copy(costs_.begin(), costs_.end(), costs);
    for (Int i = 0; i < count; ++i) starts[i] = tiles_[4 * i];
    std::int32_t *passes = table + 4 * count, *bounds = passes + 8 * num;
    std::vector<Ints> first;
    for (const Tiles& part : parts_) first.push_back(part.first_pieces());
    const Int before = parts_[0].num_passes();  // those of the first part
    for (Int tile = 0; tile < count; ++tile) {
      const Int begin = tiles_[4 * tile + 1], past = tiles_[4 * tile + 2];
      for (Int from = begin; from < past; ++from) {
        const Int to = is_reversed_ ? begin + past - 1 - from : from;
        write_pass(passes_.data() + 8 * from, scale, passes + 8 * to);
        const bool is_later = from >= before;
        parts_[is_later].write_bounds(first[is_later], from - is_later * before, scale, bounds + 2 * block_m * to);
      }
    }
    std::fill_n(bounds + 2 * block_m * num, 4, 0);
  }

 private:
  const HostShape shape_;
  std::vector<Tiles> parts_;
  std::vector<std::int32_t> tiles_, passes_;  // as in `TilePlan`
  Ints costs_;
  bool is_reversed_ = false;  // passes of a tile, and blocks of a pass, go from the last to the first

  // Tables of all parts side by side, by decreasing cost.
  void describe() {
    for (const Tiles& part : parts_) {
      const Int tiles = num_tiles(), passes = num_passes(), count = part.num_tiles();
      tiles_.resize(4 * (tiles + count)), costs_.resize(tiles + count),
          passes_.resize(8 * (passes + part.num_passes()));
      part.describe_all(part.first_pieces(), tiles_.data() + 4 * tiles, passes_.data() + 8 * passes,
                        costs_.data() + tiles);
      if (&part == &parts_.front()) continue;
      const std::int32_t more[] = {static_cast<std::int32_t>(shape_.first), static_cast<std::int32_t>(passes)};
      for (Int i = tiles; i < tiles + count; ++i)
        tiles_[4 * i] += more[0], tiles_[4 * i + 1] += more[1], tiles_[4 * i + 2] += more[1];
    }
    if (parts_.size() == 1) return;
    Ints order(num_tiles());
    std::iota(order.begin(), order.end(), Int{0});
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) { return costs_[a] > costs_[b]; });
    reorder(order);
  }

  void reorder(const Ints& order) {
    std::vector<std::int32_t> tiles;
    Ints costs;
    for (const Int i : order) {
      tiles.insert(tiles.end(), tiles_.begin() + 4 * i, tiles_.begin() + 4 * i + 4);
      costs.push_back(costs_[i]);
    }
    tiles_ = std::move(tiles), costs_ = std::move(costs);
  }

  void write_pass(const std::int32_t* from, Int scale, std::int32_t* to) const {
    std::copy(from, from + 8, to);
    const std::int32_t count = from[1];
    if (is_reversed_) {
      to[0] += (count - 1) * static_cast<std::int32_t>(shape_.own.block_n);
      for (int part = 2; part < 8; part += 2) to[part] = count - from[part + 1], to[part + 1] = count - from[part];
    }
    to[0] *= static_cast<std::int32_t>(scale);
  }
};

}  // namespace magi
