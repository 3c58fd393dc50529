// Called by megatron_magi/backends/tiles/cpp_tiles.py: begins a plan, finds its passes or takes given ones, and writes
// the plan to memory of the caller, which ends it. Results are equal to those of the Python planner.
#include "tiles.hpp"

#include "host_plan.hpp"
#include "schedule.hpp"
#include "tile_order.hpp"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

using magi::Int;
using magi::Tiles;

static_assert(sizeof(magi::Band) == 6 * sizeof(Int));

// Must be incremented whenever results or arguments change, so that a library built from other sources is rejected.
MAGI_EXPORT Int magi_tiles_version() { return 6; }

// `counts` receives the number of tiles, of pieces, and of passes; -1 where these are to be given.
MAGI_EXPORT Tiles* magi_tiles_begin(const magi::Band* bands, Int count, const magi::TileShape* shape, Int* counts) {
  auto* tiles = new Tiles(bands, count, *shape);
  const bool done = tiles->assign();
  counts[0] = tiles->num_tiles(), counts[1] = tiles->num_pieces(), counts[2] = done ? tiles->num_passes() : -1;
  return tiles;
}

// The pieces of a plan whose passes are to be given, and their tiles.
MAGI_EXPORT void magi_tiles_pieces(const Tiles* tiles, magi::Band* pieces, Int* tile) {
  std::copy(tiles->pieces.begin(), tiles->pieces.end(), pieces);
  std::copy(tiles->tile.begin(), tiles->tile.end(), tile);
}

MAGI_EXPORT void magi_tiles_give(Tiles* tiles, const magi::Band* pieces, const Int* pass_of_piece, Int num_pieces,
                                 const Int* pass_tile, Int num_passes) {
  tiles->pieces.assign(pieces, pieces + num_pieces);
  tiles->pass_of_piece.assign(pass_of_piece, pass_of_piece + num_pieces);
  tiles->tile.assign(pass_tile, pass_tile + num_passes);
}

MAGI_EXPORT void magi_tiles_end(Tiles* tiles, std::int32_t* of_tiles, std::int32_t* passes, std::int32_t* bounds,
                                Int* costs) {
  tiles->write(of_tiles, passes, bounds, costs);
  delete tiles;
}

// `order` receives the tiles in the order of `local_first`.
MAGI_EXPORT void magi_tiles_local_first(const magi::TilesView* plan, Int first, Int num_arriving, Int late, Int lead,
                                        Int* order) {
  const auto found = magi::local_first(*plan, first, num_arriving, late, lead);
  std::copy(found.begin(), found.end(), order);
}

MAGI_EXPORT void magi_tiles_drift(const magi::TilesView* plan, double* out) { magi::drift(*plan, out); }

// Time until all items are done if each of `num_sms` takes the next one when it is free.
MAGI_EXPORT Int magi_tiles_makespan(const Int* costs, Int count, Int num_sms) {
  return magi::makespan(costs, count, num_sms);
}

// `out` receives the number of distinct first rows, and of visible pairs.
MAGI_EXPORT void magi_tiles_facts(const magi::Band* bands, Int count, Int* out) {
  magi::Ints rows;
  out[1] = 0;
  for (Int i = 0; i < count; ++i) {
    magi::Band band = bands[i];
    rows.push_back(band.q0);
    if (band.tighten()) out[1] += magi::area(band);
  }
  std::sort(rows.begin(), rows.end());
  out[0] = std::unique(rows.begin(), rows.end()) - rows.begin();
}

// `counts` receives the number of tiles and of passes, and the step from block to block. The result is null
// where passes have to be found by numpy. `drifts` receives two numbers.
MAGI_EXPORT magi::HostPlan* magi_host_plan_begin(const magi::Band* bands, Int count, const magi::HostShape* shape,
                                                 Int* counts, double* drifts) {
  auto* plan = new magi::HostPlan(bands, count, *shape);
  if (!plan->is_done) {
    delete plan;
    return nullptr;
  }
  counts[0] = plan->num_tiles(), counts[1] = plan->num_passes(), counts[2] = plan->step();
  std::copy(plan->drifts, plan->drifts + 2, drifts);
  return plan;
}

MAGI_EXPORT void magi_host_plan_end(magi::HostPlan* plan, std::int32_t* table, std::int32_t* starts, Int* costs) {
  plan->write(table, starts, costs);
  delete plan;
}

// `counts` receives the number of items, and of tiles that are split.
MAGI_EXPORT magi::Schedule* magi_schedule_begin(const std::int32_t* starts, const Int* costs,
                                                const magi::ScheduleWork* work, const magi::ScheduleTuning* tuning,
                                                Int* counts) {
  auto* schedule = new magi::Schedule(starts, costs, *work, *tuning);
  counts[0] = static_cast<Int>(schedule->items.size()), counts[1] = schedule->num_split;
  return schedule;
}

MAGI_EXPORT void magi_schedule_end(magi::Schedule* schedule, magi::Item* items) {
  std::copy(schedule->items.begin(), schedule->items.end(), items);
  delete schedule;
}
