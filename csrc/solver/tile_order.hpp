// The order of tiles, and times by which items are ordered; functions are equivalent to those of the same names in
// megatron_magi/backends/tiles/tiles.py and megatron_magi/backends/sm90/schedule.py.
#pragma once

#include <cstdlib>
#include <numeric>
#include <queue>

#include "bands.hpp"

namespace magi {

// Tables of a `TilePlan`: views of arrays of the caller.
struct TilesView {
  const std::int32_t* tiles;   // [num_tiles, 4]: first row, passes from and to, rows
  const std::int32_t* passes;  // [num_passes, 8]: first column, blocks, and others
  const Int* costs;            // [num_tiles]
  Int num_tiles, block_n;

  Int begin(Int tile) const { return tiles[4 * tile + 1]; }
  Int past(Int tile) const { return tiles[4 * tile + 2]; }
  Int column(Int pass) const { return passes[8 * pass]; }
  Int blocks(Int pass) const { return passes[8 * pass + 1]; }
};

// Earliest start of each tile without waiting, in blocks.
inline std::vector<double> first_needed(const TilesView& plan, Int first, Int num_arriving, Int late) {
  const double rate = static_cast<double>(late) / static_cast<double>(std::max<Int>(num_arriving, 1));
  std::vector<double> needs(plan.num_tiles, 0.0);
  for (Int tile = 0; tile < plan.num_tiles; ++tile) {
    Int before = 0;
    for (Int pass = plan.begin(tile); pass < plan.past(tile); before += plan.blocks(pass++)) {
      if (plan.column(pass) < first) continue;
      for (const Int end : {std::min<Int>(plan.blocks(pass), 1), plan.blocks(pass)}) {
        const Int there = std::clamp<Int>(plan.column(pass) + end * plan.block_n - first, 0, num_arriving);
        needs[tile] = std::max(needs[tile], static_cast<double>(there) * rate - static_cast<double>(before + end - 1));
      }
    }
  }
  return needs;
}

inline Ints local_first(const TilesView& plan, Int first, Int num_arriving, Int late, Int lead) {
  const std::vector<double> needs = first_needed(plan, first, num_arriving, late);
  Ints by_need(plan.num_tiles), order;
  std::iota(by_need.begin(), by_need.end(), Int{0});
  std::stable_sort(by_need.begin(), by_need.end(), [&](Int a, Int b) { return needs[a] < needs[b]; });
  std::erase_if(by_need, [&](Int tile) { return plan.costs[tile] <= 0; });
  std::priority_queue<Int, Ints, std::greater<Int>> there;
  std::vector<bool> is_front(plan.num_tiles, false);
  const std::size_t count = by_need.size();
  Int done = 0;
  for (std::size_t at = 0; done < lead && at < count;) {
    for (; at < count && needs[by_need[at]] * static_cast<double>(lead) <= static_cast<double>(done * late); ++at)
      there.push(by_need[at]);
    if (there.empty()) there.push(by_need[at++]);
    order.push_back(there.top()), is_front[there.top()] = true, done += plan.costs[there.top()];
    there.pop();
  }
  for (Int tile = 0; tile < plan.num_tiles; ++tile)
    if (!is_front[tile]) order.push_back(tile);
  return order;
}

inline double median(Ints values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  if (values.size() % 2) return static_cast<double>(values[half]);
  return static_cast<double>(values[half - 1] + values[half]) / 2;
}

inline void drift(const TilesView& plan, double* out) {
  Ints tiles;
  for (Int tile = 0; tile < plan.num_tiles; ++tile)
    if (plan.begin(tile) < plan.past(tile)) tiles.push_back(tile);
  std::sort(tiles.begin(), tiles.end(), [&](Int a, Int b) { return plan.tiles[4 * a] < plan.tiles[4 * b]; });
  Ints starts, ends, first, last;
  for (const Int tile : tiles) {
    const Int pass = plan.past(tile) - 1;
    first.push_back(plan.column(plan.begin(tile)));
    last.push_back(plan.column(pass) + plan.blocks(pass) * plan.block_n);
  }
  for (std::size_t i = 1; i < tiles.size(); ++i)
    if (first[i] < last[i - 1] && first[i - 1] < last[i])
      starts.push_back(std::abs(first[i] - first[i - 1])), ends.push_back(std::abs(last[i] - last[i - 1]));
  out[0] = starts.empty() ? 0.0 : median(starts), out[1] = ends.empty() ? 0.0 : median(ends);
}

// Each item goes to the SM that is free first: the root of a heap, which then sinks.
inline Int makespan(const Int* costs, Int count, Int num_sms) {
  const Int size = std::max<Int>(1, num_sms);
  Ints busy(size, 0);
  Int most = 0;
  for (Int i = 0; i < count; ++i) {
    const Int end = busy[0] + costs[i];
    Int at = 0;
    for (Int below = 1; below < size; at = below, below = 2 * at + 1) {
      if (below + 1 < size && busy[below + 1] < busy[below]) ++below;
      if (busy[below] >= end) break;
      busy[at] = busy[below];
    }
    busy[at] = end, most = std::max(most, end);
  }
  return most;
}

}  // namespace magi
