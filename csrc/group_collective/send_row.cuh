// Copies one row from its tensors into a slot.
#pragma once

#include "peers.cuh"

// `to`: address of the row in the slot. A thread has kLoads loads in flight.
template <typename Unit, int kLoads>
DEVICE void send_row(const SlotRows& s, i64 row, u64 to, int lane, int lanes) {
  Unit* out = reinterpret_cast<Unit*>(to);
  for (int unit = lane; unit < s.units; unit += kLoads * lanes) {
    Unit value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units)
        value[i] = *reinterpret_cast<const Unit*>(address_of(s, row, unit + i * lanes, sizeof(Unit)));
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units) out[unit + i * lanes] = value[i];
  }
}
