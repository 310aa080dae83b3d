// Which kernel of linear_quantized_decode.cuh takes a product of up to 16 tokens, and how it is divided: tables by
// tokens, rows and k.
//
// They come from the times of every kernel and division on an H200, for 1, 4, 8 and 16 tokens and 54 to 126 shapes from
// 1152 x 1024 to 28672 x 14336, bf16, in groups of 32, weights rotated past L2, calls overlapping in a graph, alone and
// in turn with a norm: the rectangles of a decision tree, with the shapes of Gemma 3 and Llama 3 counted three times.
// On average they are 1 to 2.5 % slower than the best choice for each shape, where tables for the shapes of Gemma 3
// alone were 11 to 27 %.
//
// Exceptions, all for few tokens. Int4 of 14336 x 4096 for one token takes 11.4 µs alone and 14.8 behind a norm,
// where two blocks a multiprocessor take 11.9 and 13.3. Long rows stay with kRegisters, though clusters take 7.5 µs
// instead of 8.4 for 2560 x 10240: Gemma 3 4B, where such a product follows one that fills shared memory, made 614
// tokens/s with clusters and 626 without, on two machines. For one token the first lines
// were chosen in a graph with the other kernels of a layer and a stand-in for attention, in µs a layer, three times in
// turn: 2560 x 10240 31.1 for 31.8; 1152 x 6912 20.6 for 21.6; 3840 x 15360 and 8192 x 3840 together 49.5 for 54.0. So
// was the first line of Int8: 1152 x 6912 23.9 for 24.5. Its next three come from whole steps (decode_step_whole.sh),
// µs a layer with the head's share: 2560 x 2048 and 4096 x 2560 together 54.4 for 55.7, 13824 x 1152 35.9 for 36.3.
#pragma once

#include <array>
#include <cstddef>

namespace nvb {
namespace quantized {

enum class DecodeKernel {
  kStream,
  kStream3,    // the same with rings of three stages: FP8 of up to 8 tokens, whose decoding a short ring does not cover
  kRegisters,  // skinny, 16 warps share a block of 16 rows; 8 for more than 8 tokens
  kRegisters4,  // skinny, 4 warps and up to seven blocks a multiprocessor: Int4 without zero points, up to 8 tokens
  kStationary,  // Int4
};

struct DecodeChoice {
  int tokens;           // up to
  int from, below;      // blocks of 16 rows
  int k_from, k_below;  // in chunks of 64
  DecodeKernel kernel;
  int cluster_shift, warps, warps_k, blocks_per_sm;  // of a stationary kernel the first and the last
  int groups = 1;                                    // of warps, of a stationary kernel
};
constexpr int kAny = 1 << 30;

// One list after the other.
template <size_t First, size_t Second>
constexpr std::array<DecodeChoice, First + Second> join(const DecodeChoice (&first)[First],
                                                        const DecodeChoice (&second)[Second]) {
  std::array<DecodeChoice, First + Second> all{};
  for (size_t i = 0; i < First + Second; ++i) all[i] = i < First ? first[i] : second[i - First];
  return all;
}

constexpr DecodeChoice kInt4Own[] = {
    {1, 69, 83, 90, 143, DecodeKernel::kStationary, 2, 0, 0, 2, 2},
    {1, 143, 176, 143, 190, DecodeKernel::kStream, 2, 12, 4, 2},
    {1, 215, 286, 190, 284, DecodeKernel::kStationary, 2, 0, 0, 2},
    {1, 443, 665, 54, 72, DecodeKernel::kStationary, 0, 0, 0, 2},
    {8, 286, 400, 44, 60, DecodeKernel::kStream, 2, 14, 2, 2},
    {4, 880, 1071, 54, 72, DecodeKernel::kStationary, 0, 0, 0, 1},
    {4, 0, 68, 90, 143, DecodeKernel::kStationary, 2, 0, 0, 2, 2},
    {4, 0, 68, 143, kAny, DecodeKernel::kStationary, 2, 0, 0, 2},
    {4, 0, 286, 0, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 286, 771, 0, 17, DecodeKernel::kRegisters4, 0, 0, 0, 0},
    {4, 286, 443, 17, 54, DecodeKernel::kStream, 1, 16, 2, 1},
    {4, 443, 771, 17, 54, DecodeKernel::kStream, 0, 12, 4, 2},
    {4, 286, 771, 54, 72, DecodeKernel::kStationary, 1, 0, 0, 2},
    {4, 771, 1071, 0, 44, DecodeKernel::kRegisters4, 0, 0, 0, 0},
    {4, 1071, kAny, 0, 44, DecodeKernel::kStream, 0, 14, 2, 2},
    {4, 771, kAny, 44, 72, DecodeKernel::kStationary, 0, 0, 0, 2},
    {4, 286, kAny, 72, 143, DecodeKernel::kStationary, 1, 0, 0, 2},
    {4, 286, kAny, 143, 232, DecodeKernel::kStationary, 2, 0, 0, 2},
    {4, 286, kAny, 232, kAny, DecodeKernel::kStationary, 3, 0, 0, 2},
    {8, 0, 286, 0, 143, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 286, 1071, 0, 24, DecodeKernel::kRegisters4, 0, 0, 0, 0},
    {8, 286, 443, 24, 90, DecodeKernel::kStream, 1, 12, 4, 2},
    {8, 443, 1071, 24, 90, DecodeKernel::kStream, 1, 14, 2, 2},
    {8, 1071, kAny, 0, 54, DecodeKernel::kStream, 1, 14, 1, 2},
    {8, 1071, kAny, 54, 72, DecodeKernel::kStationary, 1, 0, 0, 2, 2},
    {8, 1071, kAny, 72, 90, DecodeKernel::kStationary, 1, 0, 0, 2},
    {8, 286, kAny, 90, 143, DecodeKernel::kStationary, 2, 0, 0, 2, 2},
    {8, 0, kAny, 143, 284, DecodeKernel::kStationary, 3, 0, 0, 2, 2},
    {8, 0, kAny, 284, kAny, DecodeKernel::kStationary, 3, 0, 0, 2},
    {16, 143, 215, 24, 36, DecodeKernel::kStream, 2, 12, 4, 2},
    {16, 0, 443, 0, 36, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {16, 443, kAny, 0, 24, DecodeKernel::kStream, 1, 14, 1, 2},
    {16, 443, kAny, 24, 36, DecodeKernel::kStationary, 0, 0, 0, 2},
    {16, 0, 83, 90, 143, DecodeKernel::kStream, 3, 12, 4, 2},
    {16, 0, kAny, 36, 44, DecodeKernel::kStationary, 0, 0, 0, 1},
    {16, 0, 443, 44, 72, DecodeKernel::kStationary, 1, 0, 0, 1},
    {16, 443, kAny, 44, 72, DecodeKernel::kStationary, 1, 0, 0, 2},
    {16, 0, kAny, 72, 143, DecodeKernel::kStationary, 1, 0, 0, 1},
    {16, 0, kAny, 143, 284, DecodeKernel::kStationary, 2, 0, 0, 1},
    {16, 0, kAny, 284, kAny, DecodeKernel::kStationary, 3, 0, 0, 1},
};
constexpr DecodeChoice kInt4ZeroPointsOwn[] = {
    {8, 286, 400, 44, 60, DecodeKernel::kStream, 2, 14, 2, 2},
    {4, 286, 665, 24, 72, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 286, kAny, 0, 24, DecodeKernel::kStream, 0, 14, 2, 2},
    {4, 665, kAny, 24, 72, DecodeKernel::kStationary, 0, 0, 0, 2},
    {4, 286, kAny, 72, 143, DecodeKernel::kStationary, 1, 0, 0, 2},
    {4, 286, kAny, 143, kAny, DecodeKernel::kStationary, 3, 0, 0, 2},
    {4, 0, kAny, 0, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 0, 286, 0, 189, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 286, 665, 0, 60, DecodeKernel::kStream, 1, 14, 2, 2},
    {8, 286, 665, 60, 189, DecodeKernel::kStationary, 2, 0, 0, 2, 2},
    {8, 665, kAny, 0, 24, DecodeKernel::kStream, 1, 14, 1, 2},
    {8, 665, kAny, 24, 62, DecodeKernel::kStationary, 1, 0, 0, 2, 2},
    {8, 665, kAny, 62, 189, DecodeKernel::kStationary, 1, 0, 0, 2},
    {8, 0, 143, 189, kAny, DecodeKernel::kStationary, 3, 0, 0, 2},
    {8, 143, kAny, 189, 284, DecodeKernel::kStationary, 2, 0, 0, 2},
    {8, 143, kAny, 284, kAny, DecodeKernel::kStationary, 3, 0, 0, 2},
    {16, 0, 286, 0, 44, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {16, 286, 665, 0, 17, DecodeKernel::kStream, 1, 14, 2, 2},
    {16, 665, kAny, 0, 17, DecodeKernel::kStationary, 0, 0, 0, 2, 2},
    {16, 286, kAny, 17, 32, DecodeKernel::kStationary, 1, 0, 0, 2, 2},
    {16, 286, kAny, 32, 60, DecodeKernel::kStationary, 1, 0, 0, 1, 2},
    {16, 0, 665, 44, 72, DecodeKernel::kStationary, 1, 0, 0, 1},
    {16, 665, kAny, 60, 72, DecodeKernel::kStationary, 1, 0, 0, 1, 2},
    {16, 0, 286, 72, 118, DecodeKernel::kStationary, 2, 0, 0, 1, 2},
    {16, 286, kAny, 72, 143, DecodeKernel::kStationary, 1, 0, 0, 1},
    {16, 286, kAny, 72, 143, DecodeKernel::kStationary, 2, 0, 0, 1, 2},
    {16, 0, 248, 118, kAny, DecodeKernel::kStationary, 2, 0, 0, 1},
    {16, 248, 286, 118, 143, DecodeKernel::kStationary, 2, 0, 0, 1, 2},
    {16, 248, 1267, 143, 232, DecodeKernel::kStationary, 2, 0, 0, 1},
    {16, 248, 1267, 143, 232, DecodeKernel::kStationary, 3, 0, 0, 1, 2},
    {16, 248, 415, 232, kAny, DecodeKernel::kStationary, 3, 0, 0, 1},
    {16, 0, kAny, 143, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
};
// What fits in more cases than the above, and at last in all.
constexpr DecodeChoice kInt4Rest[] = {
    {16, 0, kAny, 0, kAny, DecodeKernel::kStream, 1, 14, 1, 2},
    {16, 0, kAny, 0, kAny, DecodeKernel::kStream, 2, 14, 2, 2},
    {16, 0, kAny, 0, kAny, DecodeKernel::kStream, 3, 8, 1, 2},
    {16, 0, kAny, 0, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
};
// These are for up to 8 tokens.
constexpr DecodeChoice kInt8Few[] = {
    {1, 68, 83, 90, 143, DecodeKernel::kStream, 3, 14, 2, 2},
    {1, 143, 176, 24, 36, DecodeKernel::kStream, 2, 14, 2, 2},
    {1, 248, 286, 36, 44, DecodeKernel::kStream, 1, 12, 4, 2},
    {1, 771, 1071, 17, 24, DecodeKernel::kStream, 1, 14, 2, 2},
    {4, 0, 68, 72, kAny, DecodeKernel::kStream, 1, 12, 4, 2},
    {4, 0, 286, 0, 54, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 0, 68, 54, 72, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 286, 443, 0, 54, DecodeKernel::kStream, 1, 14, 2, 2},
    {4, 68, 83, 54, kAny, DecodeKernel::kStream, 3, 12, 4, 2},
    {4, 143, 175, 54, kAny, DecodeKernel::kStream, 2, 12, 4, 2},
    {4, 83, 443, 54, kAny, DecodeKernel::kStream, 1, 12, 4, 2},
    {4, 443, kAny, 0, 39, DecodeKernel::kStream, 0, 14, 2, 2},
    {4, 443, 1515, 39, kAny, DecodeKernel::kStream, 1, 14, 2, 2},
    {4, 1515, kAny, 39, kAny, DecodeKernel::kStream, 1, 12, 4, 2},
    {4, 0, kAny, 54, kAny, DecodeKernel::kStream, 2, 14, 2, 2},
    {8, 0, 286, 0, 82, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 286, kAny, 0, 24, DecodeKernel::kStream, 0, 14, 2, 2},
    {8, 286, kAny, 24, 82, DecodeKernel::kStream, 1, 14, 2, 2},
    {8, 0, 68, 82, kAny, DecodeKernel::kStream, 3, 16, 2, 1},
    {8, 68, 83, 82, kAny, DecodeKernel::kStream, 3, 12, 4, 2},
    {8, 83, 143, 82, kAny, DecodeKernel::kStream, 3, 8, 1, 2},
    {8, 143, 175, 82, kAny, DecodeKernel::kStream, 2, 12, 4, 2},
    {8, 175, 215, 82, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 215, kAny, 82, 232, DecodeKernel::kStream, 1, 16, 2, 1},
    {8, 215, 359, 232, kAny, DecodeKernel::kStream, 3, 12, 4, 2},
    {8, 359, kAny, 232, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
};
constexpr DecodeChoice kFp8Few[] = {
    {4, 0, 215, 0, 72, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 143, 176, 143, 190, DecodeKernel::kStream, 2, 14, 2, 2},
    {4, 0, 83, 72, kAny, DecodeKernel::kStream3, 2, 8, 4, 3},
    {4, 83, 215, 72, kAny, DecodeKernel::kStream3, 1, 8, 4, 3},
    {4, 215, 248, 0, kAny, DecodeKernel::kStream, 2, 14, 2, 2},
    {4, 248, 286, 0, 54, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {4, 286, 443, 0, 54, DecodeKernel::kStream, 1, 14, 2, 2},
    {4, 443, kAny, 0, 54, DecodeKernel::kStream, 0, 14, 2, 2},
    {4, 215, 1515, 54, kAny, DecodeKernel::kStream, 1, 14, 2, 2},
    {4, 1515, kAny, 54, kAny, DecodeKernel::kStream, 1, 12, 4, 2},
    {4, 0, kAny, 54, kAny, DecodeKernel::kStream, 2, 14, 2, 2},
    {8, 0, 175, 0, 82, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 0, 143, 82, 118, DecodeKernel::kStream, 3, 12, 4, 2},
    {8, 0, 143, 118, 143, DecodeKernel::kStream3, 3, 8, 2, 2},
    {8, 0, 68, 143, kAny, DecodeKernel::kStream, 3, 16, 2, 1},
    {8, 68, 143, 143, kAny, DecodeKernel::kStream, 3, 8, 1, 2},
    {8, 143, 175, 82, kAny, DecodeKernel::kStream, 2, 12, 4, 2},
    {8, 175, 286, 0, 232, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {8, 175, 286, 232, kAny, DecodeKernel::kStream, 3, 14, 1, 2},
    {8, 286, kAny, 0, 24, DecodeKernel::kStream, 0, 14, 2, 2},
    {8, 286, kAny, 24, 82, DecodeKernel::kStream, 1, 14, 2, 2},
    {8, 286, kAny, 82, 232, DecodeKernel::kStream, 1, 16, 2, 1},
    {8, 286, 359, 232, kAny, DecodeKernel::kStream, 3, 14, 2, 2},
    {8, 359, kAny, 232, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
};
// These are for more tokens, and fit in all cases.
constexpr DecodeChoice kByteRest[] = {
    {16, 0, 443, 0, 54, DecodeKernel::kRegisters, 0, 0, 0, 0},
    {16, 443, kAny, 0, 44, DecodeKernel::kStream, 1, 14, 1, 2},
    {16, 443, kAny, 44, 54, DecodeKernel::kStream, 1, 16, 2, 1},
    {16, 0, 68, 54, 143, DecodeKernel::kStream, 3, 8, 1, 2},
    {16, 0, 68, 143, kAny, DecodeKernel::kStream, 3, 16, 2, 1},
    {16, 68, 83, 54, kAny, DecodeKernel::kStream, 3, 12, 4, 2},
    {16, 83, 215, 54, 143, DecodeKernel::kStream, 3, 8, 1, 2},
    {16, 215, 248, 54, kAny, DecodeKernel::kStream, 2, 16, 2, 1},
    {16, 248, kAny, 54, 143, DecodeKernel::kStream, 1, 16, 2, 1},
    {16, 0, kAny, 0, kAny, DecodeKernel::kRegisters, 0, 0, 0, 0},
};

// The first choice that takes the shape and fits shared memory is taken; the last ones take everything.
constexpr auto kInt4Choices = join(kInt4Own, kInt4Rest);
constexpr auto kInt4ZeroPointsChoices = join(kInt4ZeroPointsOwn, kInt4Rest);
constexpr auto kInt8Choices = join(kInt8Few, kByteRest);
constexpr auto kFp8Choices = join(kFp8Few, kByteRest);

}  // namespace quantized
}  // namespace nvb
