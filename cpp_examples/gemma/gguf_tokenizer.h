// The tokenizer of a GGUF file as a SentencePiece model.
#ifndef GEMMA_GGUF_TOKENIZER_H
#define GEMMA_GGUF_TOKENIZER_H

#include <string>

#include "gguf_metadata.h"

namespace gemma {

// The bytes of a tokenizer.model with the pieces, scores and types of `tokenizer.ggml.*`, so that text is cut by
// SentencePiece itself. Message and field numbers:
// https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
// Errors: a tokenizer that is not SentencePiece's ("llama"), arrays that differ in length, scores that are not finite.
std::string sentencepiece_model(const Metadata& metadata);

}  // namespace gemma

#endif  // GEMMA_GGUF_TOKENIZER_H
