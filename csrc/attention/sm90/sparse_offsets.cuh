// Offsets of lists in their entries.
#pragma once

#include "../../common/ptx.cuh"

// An offset, cut to the entries: no other value leads out of them.
DEVICE int load_offset(const int* at, int num_entries) { return max(0, min(__ldg(at), num_entries)); }
