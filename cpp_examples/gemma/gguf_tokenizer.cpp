#include "gguf_tokenizer.h"

#include <array>
#include <cmath>
#include <cstring>

#include "error.h"

namespace gemma {
namespace {

// GGUF's numbers of element types.
constexpr uint32_t kI32 = 5;
constexpr uint32_t kF32 = 6;

// Types of pieces, the same in GGUF and SentencePiece: normal 1, unknown 2, control 3, user-defined 4, unused 5,
// byte 6.
constexpr int32_t kControl = 3;
constexpr int32_t kUserDefined = 4;
constexpr int32_t kByte = 6;

// A protocol-buffer message under construction: https://protobuf.dev/programming-guides/encoding/
class Message {
 public:
  void integer(uint32_t field, uint64_t value) {
    varint(field << 3);
    varint(value);
  }

  void real(uint32_t field, float value) {
    varint(field << 3 | 5);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 4; ++i) bytes_ += static_cast<char>(bits >> 8 * i & 255);
  }

  void bytes(uint32_t field, std::string_view value) {
    varint(field << 3 | 2);
    varint(value.size());
    bytes_ += value;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void varint(uint64_t value) {
    for (; value >= 128; value >>= 7) bytes_ += static_cast<char>((value & 127) | 128);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// Spaces as SentencePiece spells them. Converters write user-defined pieces with plain ones.
std::string with_space_marks(std::string_view piece) {
  std::string result;
  for (const char character : piece) {
    if (character == ' ') {
      result += "\xE2\x96\x81";  // U+2581
    } else {
      result += character;
    }
  }
  return result;
}

// The tokens that stand for no text. Converters call every token control that looks like one, among them
// <start_of_turn>, which a prompt may spell; in the tokenizers that Gemma comes with it is user-defined.
bool stands_for_no_text(const std::array<int64_t, 4>& special, size_t token) {
  for (const int64_t id : special) {
    if (id == static_cast<int64_t>(token)) return true;
  }
  return false;
}

}  // namespace

std::string sentencepiece_model(const Metadata& metadata) {
  const std::string kind = metadata.text("tokenizer.ggml.model", "");
  if (kind != "llama") {
    fail(metadata.path(), ": tokenizer.ggml.model is \"", kind, "\"; \"llama\", SentencePiece's, is supported");
  }
  const std::vector<std::string_view> pieces = metadata.texts("tokenizer.ggml.tokens");
  const auto scores = metadata.numbers<float>("tokenizer.ggml.scores", kF32, pieces.size());
  const auto types = metadata.numbers<int32_t>("tokenizer.ggml.token_type", kI32, pieces.size());
  const auto id = [&metadata](const char* name) {
    return metadata.integer("tokenizer.ggml." + std::string(name) + "_token_id", -1, -1, INT32_MAX);
  };
  const std::array<int64_t, 4> special = {id("bos"), id("eos"), id("padding"), id("unknown")};

  Message model;
  bool byte_fallback = false;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!std::isfinite(scores[i]) || types[i] < 1 || types[i] > kByte) {
      fail(metadata.path(), ": token ", i, " has the score ", scores[i], " and the type ", types[i],
           "; a finite score and a type from 1 to ", kByte, " are needed");
    }
    int32_t type = types[i];
    if (type == kControl && !stands_for_no_text(special, i)) type = kUserDefined;
    byte_fallback = byte_fallback || type == kByte;
    Message piece;
    piece.bytes(1, type == kUserDefined ? with_space_marks(pieces[i]) : pieces[i]);
    piece.real(2, scores[i]);
    piece.integer(3, static_cast<uint64_t>(type));
    model.bytes(1, piece.bytes());
  }
  Message trainer;
  trainer.integer(3, 2);  // model_type: BPE
  trainer.integer(35, byte_fallback ? 1 : 0);
  model.bytes(2, trainer.bytes());
  Message normalizer;
  normalizer.bytes(1, "identity");
  const auto prefix = metadata.integer("tokenizer.ggml.add_space_prefix", 1, 0, 1);
  normalizer.integer(3, static_cast<uint64_t>(prefix));  // add_dummy_prefix
  normalizer.integer(4, 0);                              // remove_extra_whitespaces
  model.bytes(3, normalizer.bytes());
  return model.bytes();
}

}  // namespace gemma
