// The configuration inside gemma.cpp's model files.
#ifndef GEMMA_SBS_CONFIG_H
#define GEMMA_SBS_CONFIG_H

#include "config.h"
#include "sbs_fields.h"

namespace gemma {

// The numbers of the blob "config". Which Gemma it is follows from its norms, as the file's own number does not say.
//
// gemma.cpp computes some published models with numbers that are not theirs; for those the published ones are taken:
// all Gemma 3 rotate the keys of global layers by a base of 10^6, those of 4B and above at an eighth of the position,
// and 27B scales by the square root of its width for a head.
//
// Errors: a value that is out of its range, and whatever no Gemma 1, 2 or 3 has: experts, embeddings for each layer,
// layers that differ in their sizes, several windows, biases, other rotations, other tokenizers.
Config read_sbs_config(const Blob& blob, const std::string& where);

}  // namespace gemma

#endif  // GEMMA_SBS_CONFIG_H
