// Numbers of a mask: where kernels read what depends on the mask beside its tables.
#pragma once

// Where a CUDA graph is replayed for other masks than it was captured with, parameters stay: such launches (CAPTURED)
// read these numbers from memory.
#ifndef CAPTURED
#define CAPTURED 0
#endif

struct MaskNumbers {
  int num_tiles, num_items, num_split;  // num_split: tiles, the first so many, whose dK and dV are sums in memory
  int step, heads_inner;
  int unused[3];
};

// Of parameters `p` that hold a TilePlan named plan.
#if CAPTURED
#define OF_MASK(p, name) (__ldg(&(p).plan.numbers->name))
#define STEP_OF(plan) (__ldg(&(plan).numbers->step))
#else
#define OF_MASK(p, name) ((p).name)
#define STEP_OF(plan) (static_cast<int>((plan).step))
#endif
