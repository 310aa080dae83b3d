// Recorded passes whose products run in FP8, and what that is worth.
#ifndef GEMMA_FP8_H
#define GEMMA_FP8_H

#include <nvbackend.hpp>

namespace gemma {

// Converts a recorded pass, whose outputs stay within `bound` of what they were (0: whatever the error), and writes
// what that came to to standard error: how many products, their bytes, the worst output's error, and the times of
// launches. Measures on what lies in memory. Waits.
void convert_fp8(nvb::graph& graph, nvb_stream* stream, float bound, const char* pass);

}  // namespace gemma

#endif  // GEMMA_FP8_H
