// Reads rows that peers publish, and puts them in their place: row i of the result is that at places[i]; NaN where a
// rank does not come.

#include "peers.cuh"
#include "units.cuh"

struct PullParams {
  Peers peers;
  SlotRows to;
  const i64* places;
  const i64* count;
  i64 chunk_shift;
};

constexpr int kLoads = 8;

extern "C" __global__ void __launch_bounds__(512, 2) magi_pull_rows(const __grid_constant__ PullParams p) {
  const SlotRows& s = p.to;
  const u32 call = p.peers.control[p.peers.rank]->calls_pulled + 1;
  const RowWalk walk = my_rows(s.log2_lanes);
  const i64 num_rows = *p.count;
  const int run = length_of_runs(walk, num_rows);
  const SideBySide runs(p.peers, (num_rows + run - 1) / run);
  Pull pull(p.peers, call, static_cast<int>(p.chunk_shift), s.row_bytes);
  bool failed = false;
  for (i64 i = walk.row; i < runs.end(); i += walk.step) {
    const i64 first = runs.at(i) * run, end = first + run < num_rows ? first + run : num_rows;
    i64 place = first < end ? p.places[first] : 0;
    for (i64 row = first; row < end; ++row) {
      const u64 address = failed ? 0 : pull.await_row(place);
      failed = address == 0;
      if (row + 1 < end) place = p.places[row + 1];
      const Unit* from = reinterpret_cast<const Unit*>(address);
      for (int unit = walk.lane; unit < s.units; unit += kLoads * walk.lanes) {
        Unit value[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (unit + i * walk.lanes < s.units) value[i] = failed ? poison() : from[unit + i * walk.lanes];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (unit + i * walk.lanes < s.units)
            *reinterpret_cast<Unit*>(address_of(s, row, unit + i * walk.lanes, UNIT)) = value[i];
      }
    }
  }
  end_pull(p.peers, call);
}
