// Reads a Gemma 3 from a GGUF file, as llama.cpp's convert_hf_to_gguf.py and its quantizer write them:
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
//
// What differs from a Hugging Face folder: norm weights have the 1 that Gemma adds in them already, matrices may be
// blocks of codes with scales, and the tokenizer is an array of pieces. The library checks the file's structure; what
// the values mean is checked here.
#ifndef GEMMA_GGUF_MODEL_H
#define GEMMA_GGUF_MODEL_H

#include <nvbackend.hpp>
#include <string>

#include "config.h"
#include "tensor_map.h"

namespace gemma {

// Owns the mapped file that its tensors point into.
struct GgufModel {
  nvb::gguf file;
  Config config;
  TensorMap tensors;      // by GGUF's names
  std::string tokenizer;  // a SentencePiece model, for Tokenizer
};

// Whether --model means a GGUF file: its name ends in ".gguf".
bool is_gguf(const std::string& path);

// Errors: a file that is missing, cut short or contradicts itself; an architecture other than gemma3; metadata that is
// missing or out of its range; a tokenizer other than SentencePiece's.
GgufModel open_gguf(const std::string& path);

}  // namespace gemma

#endif  // GEMMA_GGUF_MODEL_H
