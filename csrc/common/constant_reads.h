// What an operation reads that nothing writes while its kernel may already have begun: kernels load it before they wait
// for the grid before them (programmatic_launch.cuh).
//
// A kernel that begins early runs beside the grids before it, any of which may be unfinished. Eager calls therefore may
// load no tensor before their wait: an earlier call, or a kernel of the engine's, may still be writing it. They may ask
// for it in L2, which has what was written whoever did, and they may load weights in the library's own memory, whose
// making was waited for (`settled` of nvb_linear_params). In a list that is captured as a graph the writers are known.
// What no node of the list writes is constant for all of its nodes: each grid of a replay begins after the replay's
// first one has begun, and that one follows all earlier work of its stream by a full edge.
//
// Whoever captures such a list says so for each operation on the thread that calls its launcher.
#pragma once

#include <stdint.h>

enum nvb_constant_reads : uint32_t {
  NVB_CONSTANT_WEIGHTS = 1,    // weights, their scales, biases, factors of norms
  NVB_CONSTANT_POSITIONS = 2,  // positions, sequences, page tables
  // What a cache holds, but for the rows at the operation's positions, which it appends itself or others did before it.
  NVB_CONSTANT_OLDER_KEYS = 4,
  NVB_CONSTANT_KEYS = 8,  // all that a cache holds
};

// Of the operations that this thread launches from now on, bits of nvb_constant_reads; 0 at first.
extern "C" void nvb_cuda_set_constant_reads(uint32_t reads) noexcept;
extern "C" uint32_t nvb_cuda_constant_reads() noexcept;
