// Work items of the backward and their order; functions are equivalent to those of the same names in
// megatron_magi/backends/sm90/schedule.py, which says why items are ordered so.
#pragma once

#include <array>
#include <limits>

#include "tile_order.hpp"

namespace magi {

// Thresholds of megatron_magi/backends/sm90/tuning.py, and constants of schedule.py.
struct ScheduleTuning {
  Int long_blocks, long_blocks_uneven, item_cost, part_cost, piece_blocks, most_blocks_in_step, most_pieces,
      section_tiles, last_items, last_of_many_items, least_piece_blocks, enough_items, falling_cost_most_items,
      l2_bytes, queries, slack, query_bytes;
  double balanced, falling_cost_gain;
};

// Arguments of `make_schedule`, and of `local_first`: rows before `own_rows` are own; -1 where nothing arrives.
struct ScheduleWork {
  Int num_tiles, heads_kv, group, num_sms, max_split, long_tile, narrow, own_rows, lead;
};

using Item = std::array<std::int32_t, 4>;
using Items = std::vector<Item>;

class Schedule {
 public:
  Items items;
  Int num_split = 0;

  Schedule(const std::int32_t* starts, const Int* costs, const ScheduleWork& work, const ScheduleTuning& tuning)
      : starts_(starts), costs_(costs, costs + work.num_tiles), work_(work), tuning_(tuning), place_(work.num_tiles) {
    std::iota(place_.begin(), place_.end(), Int{0});
    std::stable_sort(place_.begin(), place_.end(), [&](Int a, Int b) { return starts[a] < starts[b]; });
    make_near();
    if (!work.max_split && size() <= tuning.falling_cost_most_items * work.num_sms) {
      Ints all(work.num_tiles);
      std::iota(all.begin(), all.end(), Int{0});
      Items falling;
      add_section(falling, all, first_heads(), work.group);
      const Int near = time_of(items).first, time = time_of(falling).first;
      if (static_cast<double>(time) < tuning.falling_cost_gain * static_cast<double>(near)) items = std::move(falling);
    }
    if (work.own_rows >= 0) local_first();
  }

 private:
  struct Piece {
    Int blocks = 0;
    bool is_cached = false;
  };
  struct Division {
    Int num_long, num_split, width;
    Piece piece;
  };

  const std::int32_t* starts_;
  Ints costs_;
  const ScheduleWork work_;
  const ScheduleTuning tuning_;
  Ints place_;  // tiles in the order of their rows
  std::vector<Ints> documents_;

  Int size() const { return static_cast<Int>(items.size()); }

  static Ints heads_of(Int past, Int step) {
    Ints out;
    for (Int head = 0; head < past; head += step) out.push_back(head);
    return out;
  }
  Ints first_heads() const { return heads_of(work_.heads_kv * work_.group, work_.group); }

  Int blocks_of(const Item& item) const { return item[3] > 0 ? item[3] : costs_[item[0]]; }

  Int cost_of(const Item& item) const {
    const Int heads = item[1] >> 16;
    return blocks_of(item) * heads + (heads < work_.group ? tuning_.part_cost : tuning_.item_cost);
  }

  // Makespan, and the sum of costs.
  std::pair<Int, Int> time_of(const Items& of) const {
    Ints costs;
    costs.reserve(of.size());
    for (const Item& item : of) costs.push_back(cost_of(item));
    const Int sum = std::accumulate(costs.begin(), costs.end(), Int{0});
    return {makespan(costs.data(), static_cast<Int>(costs.size()), work_.num_sms), sum};
  }

  void make_near() {
    const Int width = work_.max_split ? 1 : work_.group, count = work_.num_tiles;
    const bool splits = width < work_.group;
    const Int most = splits ? work_.max_split : count;
    Ints candidates{work_.long_tile};
    if (splits)
      for (const Int least : {tuning_.long_blocks_uneven, Int{1}})
        if (std::find(candidates.begin(), candidates.end(), least) == candidates.end()) candidates.push_back(least);
    if (splits && work_.long_tile == tuning_.long_blocks_uneven) find_documents();
    if (work_.narrow && documents_.size() == 1) documents_.clear();
    const Piece piece = splits ? piece_of(!documents_.empty()) : Piece{};
    if (piece.blocks) documents_.clear();
    Items best;
    Int best_split = 0, shortest = -1;
    for (const Int least : candidates) {
      const auto less = std::find_if(costs_.begin(), costs_.end(), [&](Int cost) { return cost < least; });
      const Int num_long = less - costs_.begin();
      divide({num_long, std::min(most, num_long), width, piece});
      if (candidates.size() == 1 || (shortest < 0 && size() > tuning_.enough_items * work_.num_sms)) return;
      const auto [time, sum] = time_of(items);
      if (shortest < 0 || static_cast<double>(time) < 0.98 * static_cast<double>(shortest))
        best = items, best_split = num_split, shortest = time;
      if (static_cast<double>(shortest * work_.num_sms) <= tuning_.balanced * static_cast<double>(sum)) break;
    }
    items = std::move(best), num_split = best_split;
  }

  void find_documents() {
    const auto end = [&](Int tile) { return starts_[tile] + tuning_.queries * costs_[tile]; };
    std::vector<Ints> found{{}};
    for (std::size_t i = 0; i < place_.size(); ++i) {
      const Int tile = place_[i];
      if (!found.back().empty() && std::abs(end(tile) - end(found.back().front())) > tuning_.slack) {
        if (starts_[tile] < end(place_[i - 1]) - tuning_.slack) return;
        found.push_back({});
      }
      found.back().push_back(tile);
    }
    documents_ = std::move(found);
  }

  Piece piece_of(bool in_sections) const {
    Int limit = std::numeric_limits<Int>::max();
    if (in_sections || work_.long_tile == tuning_.long_blocks)
      limit = tuning_.most_blocks_in_step;
    else if (work_.long_tile == tuning_.long_blocks_uneven)
      limit = 5 * tuning_.piece_blocks / 4;
    const Int longest = costs_.empty() ? 0 : *std::max_element(costs_.begin(), costs_.end());
    const Int sum = std::accumulate(costs_.begin(), costs_.end(), Int{0});
    Piece piece{longest > limit ? tuning_.piece_blocks : 0};
    if (work_.long_tile == tuning_.long_blocks_uneven && !in_sections && longest) {
      const Int head_bytes = longest * tuning_.queries * tuning_.query_bytes;
      const Int held = tuning_.l2_bytes * sum / (work_.num_sms * head_bytes);
      piece.is_cached = longest > 2 * held;
      if (piece.is_cached) {
        const Int most = std::max(held, tuning_.long_blocks);
        piece.blocks = piece.blocks ? std::min(piece.blocks, most) : most;
      }
    }
    if (piece.blocks) piece.blocks = std::max(piece.blocks, sum * work_.heads_kv * work_.group / tuning_.most_pieces);
    return piece;
  }

  // Sets `items` and `num_split`.
  void divide(const Division& of) {
    const Int count = work_.num_tiles, past = work_.heads_kv * work_.group;
    Ints split, unsplit, rest;
    for (const Int tile : place_) (tile < of.num_split ? split : tile >= of.num_long ? rest : unsplit).push_back(tile);
    const bool is_whole = of.width == work_.group;
    const bool are_many = is_whole && count * work_.heads_kv > tuning_.falling_cost_most_items * work_.num_sms;
    const Int of_sm = are_many ? tuning_.last_of_many_items : tuning_.last_items;
    const Int num_last = ceil_div(of_sm * work_.num_sms, work_.heads_kv);
    const bool ends_short = !of.num_long || (are_many && static_cast<Int>(rest.size()) >= num_last);
    Ints some, last;
    for (const Int tile : rest) (ends_short && tile >= count - num_last ? last : some).push_back(tile);
    std::sort(last.begin(), last.end());
    std::vector<Ints> sections = sections_of(of.num_split);
    if (!sections.empty()) split = std::move(sections.back()), sections.pop_back();
    items.clear();
    const auto add_short = [&] {
      is_whole ? add_section(items, some, first_heads(), work_.group)
               : add_by_head(items, some, first_heads(), work_.group);
      add_section(items, last, first_heads(), work_.group);
    };
    if (!ends_short) add_short();
    const Ints heads = heads_of(past, of.width);
    add_by_head(items, unsplit, first_heads(), work_.group);
    for (const Ints& tiles : sections) add_by_head(items, tiles, heads, of.width);
    add_split(split, heads, of);
    if (ends_short) add_short();
    if (!is_whole && of.num_split == count && !of.piece.blocks) cut_last();
    num_split = is_whole ? 0 : of.num_split;
  }

  // Documents with tiles that are split, long ones in equal sections, by decreasing cost.
  std::vector<Ints> sections_of(Int num_split) const {
    std::vector<Ints> runs;
    for (const Ints& document : documents_) {
      Ints tiles;
      for (const Int tile : document)
        if (tile < num_split) tiles.push_back(tile);
      const Int size = static_cast<Int>(tiles.size()), count = ceil_div(size, tuning_.section_tiles);
      for (Int i = 0, at = 0; i < count; ++i) {
        const Int length = size / count + (i < size % count);
        runs.emplace_back(tiles.begin() + at, tiles.begin() + at + length);
        at += length;
      }
    }
    Ints work, order(runs.size());
    for (const Ints& run : runs) {
      work.push_back(0);
      for (const Int tile : run) work.back() += costs_[tile];
    }
    std::iota(order.begin(), order.end(), Int{0});
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) { return work[a] > work[b]; });
    std::vector<Ints> out;
    for (const Int i : order) out.push_back(std::move(runs[i]));
    return out;
  }

  void add_split(const Ints& split, const Ints& heads, const Division& of) {
    Items of_one, of_last;
    of.piece.blocks ? add_pieces(of_one, split, of) : add_section(of_one, split, {0}, of.width);
    if (of.piece.is_cached) {
      of_last = of_one;
      std::stable_sort(of_last.begin(), of_last.end(), [](const Item& a, const Item& b) { return a[3] > b[3]; });
    } else {
      Ints falling = split;
      std::sort(falling.begin(), falling.end());
      add_section(of_last, falling, {0}, of.width);
    }
    const Int all = static_cast<Int>(heads.size());
    Int together = 0, sum = 0;
    for (const Item& item : of_last) sum += blocks_of(item);
    if (!of_last.empty()) together = std::min(all, ceil_div(2 * blocks_of(of_last.front()) * work_.num_sms, sum));
    const Int alone = all - together;
    const auto add = [&](Item item, Int head) {
      item[1] += static_cast<std::int32_t>(head);
      items.push_back(item);
    };
    for (Int i = 0; i < alone; ++i)
      for (const Item& item : of_one) add(item, heads[i]);
    for (const Item& item : of_last)
      for (Int i = alone; i < all; ++i) add(item, heads[i]);
  }

  static Item item_of(Int tile, Int head, Int num_heads) {
    return {static_cast<std::int32_t>(tile), static_cast<std::int32_t>(head + (num_heads << 16)), 0, 0};
  }

  static void add_section(Items& out, const Ints& tiles, const Ints& heads, Int num_heads) {
    for (const Int tile : tiles)
      for (const Int head : heads) out.push_back(item_of(tile, head, num_heads));
  }

  static void add_by_head(Items& out, const Ints& tiles, const Ints& heads, Int num_heads) {
    for (const Int head : heads)
      for (const Int tile : tiles) out.push_back(item_of(tile, head, num_heads));
  }

  void add_pieces(Items& out, const Ints& tiles, const Division& of) const {
    const auto count = [&](Int tile) {
      return std::max<Int>(1, floor_div(costs_[tile] - of.piece.blocks / 4 - 1, of.piece.blocks) + 1);
    };
    Int most = 1;
    for (const Int tile : tiles) most = std::max(most, count(tile));
    for (Int i = 0; i < most; ++i)
      for (const Int tile : tiles) {
        if (count(tile) <= i) continue;
        Item item = item_of(tile, 0, of.width);
        item[2] = static_cast<std::int32_t>(i * of.piece.blocks);
        item[3] =
            static_cast<std::int32_t>(count(tile) == i + 1 ? costs_[tile] - i * of.piece.blocks : of.piece.blocks);
        out.push_back(item);
      }
  }

  void cut_last() {
    const Int last = size() % work_.num_sms, blocks = costs_.empty() ? 0 : costs_.front();
    if (!last || size() < work_.num_sms) return;
    if (std::any_of(costs_.begin(), costs_.end(), [&](Int cost) { return cost != blocks; })) return;
    const auto rest = [&](Int pieces) {
      return ceil_div(last * pieces, work_.num_sms) * (ceil_div(blocks, pieces) + tuning_.part_cost);
    };
    Int pieces = 1;
    for (Int i = 2; i < std::max<Int>(2, blocks / tuning_.least_piece_blocks + 1); ++i)
      if (rest(i) < rest(pieces)) pieces = i;
    if (pieces == 1) return;
    const Items whole(items.end() - last, items.end());
    items.resize(items.size() - last);
    for (Item item : whole)
      for (Int i = 0; i < pieces; ++i) {
        item[2] = static_cast<std::int32_t>(i * blocks / pieces);
        item[3] = static_cast<std::int32_t>((i + 1) * blocks / pieces) - item[2];
        items.push_back(item);
      }
  }

  // Items of own keys to the front.
  void local_first() {
    Items front, behind;
    Int work = 0;
    for (const Item& item : items) {
      const bool is_own = starts_[item[0]] < work_.own_rows;
      (is_own && work < work_.lead ? front : behind).push_back(item);
      if (is_own) work += cost_of(item);
    }
    items = std::move(front);
    items.insert(items.end(), behind.begin(), behind.end());
  }
};

}  // namespace magi
