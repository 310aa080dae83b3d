// Text to tokens and back, by the SentencePiece model that comes with a Gemma.
#ifndef GEMMA_TOKENIZER_H
#define GEMMA_TOKENIZER_H

#include <sentencepiece_processor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemma {

class Tokenizer {
 public:
  // Errors: a file that is missing, larger than 64 MiB or no SentencePiece model.
  explicit Tokenizer(const std::string& path);

  // The bytes of such a file; `where` names them in errors.
  Tokenizer(const std::string& model, const std::string& where);

  // `bos` and the tokens of `text`. Errors: a token that the model's vocabulary does not hold.
  std::vector<int32_t> encode(const std::string& text, int32_t bos, int64_t vocabulary) const;

  const sentencepiece::SentencePieceProcessor& processor() const { return processor_; }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};

// Turns the tokens of one sequence into text as they come. A character that is spelled in byte tokens is held back
// until its last byte is there, so what comes out is valid UTF-8 at every step.
class TextStream {
 public:
  // The tokenizer outlives this.
  explicit TextStream(const Tokenizer& tokenizer) : processor_(tokenizer.processor()) {}

  // The text that this token completes; empty for control tokens such as eos.
  std::string add(int32_t token);

  // What is left at the end: bytes that never became a character, each as U+FFFD.
  std::string finish();

 private:
  std::string add_byte(uint8_t byte);

  const sentencepiece::SentencePieceProcessor& processor_;
  std::string bytes_;  // the beginning of one UTF-8 character
};

}  // namespace gemma

#endif  // GEMMA_TOKENIZER_H
