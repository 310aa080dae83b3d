// Reads a Gemma 1, 2 or 3 from gemma.cpp's model file, which holds configuration, tokenizer and weights. What it is
// made of is described in docs/engines.md.
//
// What differs from a Hugging Face folder: keys and values of the heads alternate in one matrix, gate and up may lie in
// one, the output projection may be kept head by head, and elements may be SFP or I8.
#ifndef GEMMA_SBS_MODEL_H
#define GEMMA_SBS_MODEL_H

#include <string>

#include "config.h"
#include "sbs_blob_store.h"
#include "sbs_tensors.h"
#include "tensor_map.h"

namespace gemma {

// Owns the mapped file and the memory that its tensors point into.
struct SbsModel {
  BlobStore file;
  SbsMemory memory;
  Config config;
  TensorMap tensors;      // by gemma.cpp's base names, "layer N." before those of a layer
  std::string tokenizer;  // a SentencePiece model, for Tokenizer
};

// Whether --model means a file of gemma.cpp: its name ends in ".sbs".
bool is_sbs(const std::string& path);

// Errors: a file that is missing, cut short or contradicts itself; one of before 2025, which has no configuration in
// it; what read_sbs_config refuses; a tensor that is missing, has another shape, or is of a type other than F32, BF16,
// SFP and I8; no tokenizer.
SbsModel open_sbs(const std::string& path);

}  // namespace gemma

#endif  // GEMMA_SBS_MODEL_H
