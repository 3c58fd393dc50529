// Offsets of lists in their entries.
#pragma once

#include "../../common/ptx.cuh"

// An offset, clamped so that invalid offsets cause no access out of bounds.
DEVICE int load_offset(const int* at, int num_entries) { return max(0, min(__ldg(at), num_entries)); }
