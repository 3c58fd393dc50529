// Called by megatron_magi/plan/cpp_solver.py. Arrays are int64 and owned by the caller. Each function is equivalent to
// its counterpart in the Python planner, with bitwise equal results.
#include "swaps.hpp"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

using magi::Int;
using magi::Ints;

// Must be incremented whenever results or arguments change, so that a library built from other sources is rejected.
MAGI_EXPORT Int magi_solver_version() { return 8; }

// Each chunk's rank: largest chunk first to the least loaded rank, then swaps until no load is above `target`.
MAGI_EXPORT void magi_balance(Int num_chunks, Int cp_size, const Int* area, const Int* capacity, Int target,
                              const magi::Limits* limits, Int* rank) {
  magi::Shards shards(magi::min_heap(area, num_chunks, Ints(capacity, capacity + cp_size)), area, cp_size);
  magi::Repair(shards, nullptr, *limits).run(target, [] {});
  std::copy(shards.rank.begin(), shards.rank.end(), rank);
}

// Each row of `ranks` holds the even dispatch and receives the one that moves the fewest rows within a limit. A start
// is for limits of at least `least`.
MAGI_EXPORT void magi_search(const magi::Traffic* traffic, Int cp_size, const Int* area, const Int* capacity,
                             const Int* starts, const Int* most, const Int* least, Int num_starts, const Int* targets,
                             Int num_targets, const Int* loads, Int num_loads, const magi::Limits* limits, Int* ranks) {
  const Int num_chunks = traffic->num_chunks, tight = targets[num_targets - 1];
  const Ints balanced(ranks, ranks + num_chunks);
  magi::Holdings holdings(*traffic, cp_size);
  holdings.restart({}, balanced);
  Ints now = balanced, fewest(num_loads, holdings.fetched);
  const auto keep = [&](Int i, const magi::Shards& shards) {
    std::copy(shards.rank.begin(), shards.rank.end(), ranks + i * num_chunks), fewest[i] = holdings.fetched;
  };
  bool reached = false;
  for (Int i = 0; i < num_starts; ++i) {
    magi::Placing placing(*traffic, area, capacity, cp_size, starts + i * num_chunks);
    magi::Shards shards(placing.run(most[i]), area, cp_size);
    holdings.restart(now, shards.rank);
    magi::Repair repair(shards, &holdings, *limits);
    for (Int j = 0; j < num_targets; ++j) {
      repair.run(targets[j], [&] {
        for (Int k = 0; k < num_loads; ++k)
          if (holdings.fetched < fewest[k] && shards.max_load() <= loads[k] && least[i] <= loads[k]) keep(k, shards);
      });
    }
    reached |= most[i] == most[0] && shards.max_load() <= tight;
    now = shards.rank;
  }
  if (!reached) {
    magi::Shards shards(balanced, area, cp_size);
    holdings.restart(now, balanced);
    magi::gather(shards, holdings, tight, *limits);
    for (Int k = 0; k < num_loads; ++k)
      if (holdings.fetched < fewest[k]) keep(k, shards);
  }
}
