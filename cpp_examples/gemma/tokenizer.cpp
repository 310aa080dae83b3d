#include "tokenizer.h"

#include <algorithm>
#include <cstdlib>

#include "error.h"
#include "mapped_file.h"

namespace gemma {
namespace {

constexpr size_t kMaxModelBytes = 64 << 20;
constexpr const char* kReplacement = "\xEF\xBF\xBD";     // U+FFFD
constexpr const char* kUnknown = " \xE2\x81\x87 ";       // U+2047, as SentencePiece writes it
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581, SentencePiece's space

// Bytes of the UTF-8 character that this byte begins; 0 if it begins none.
size_t character_length(uint8_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return 2;
  if (first >= 0xE0 && first <= 0xEF) return 3;
  if (first >= 0xF0 && first <= 0xF4) return 4;
  return 0;
}

// Whether `byte` may be the second of a character with this first byte: no overlong forms, no surrogates, no character
// past U+10FFFF. Later bytes are 80 to BF. (Unicode Standard, table 3-7)
bool may_follow(uint8_t first, uint8_t byte) {
  const uint8_t lowest = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t highest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  return byte >= lowest && byte <= highest;
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path) : Tokenizer(read_text(path, kMaxModelBytes), path) {}

Tokenizer::Tokenizer(const std::string& model, const std::string& where) {
  const auto status = processor_.LoadFromSerializedProto(model);
  if (!status.ok()) fail(where, ": not a SentencePiece model: ", status.ToString());
}

std::vector<int32_t> Tokenizer::encode(const std::string& text, int32_t bos, int64_t vocabulary) const {
  std::vector<int> pieces;
  const auto status = processor_.Encode(text, &pieces);
  if (!status.ok()) fail("the prompt cannot be tokenised: ", status.ToString());
  std::vector<int32_t> tokens = {bos};
  tokens.insert(tokens.end(), pieces.begin(), pieces.end());
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocabulary) {
      fail("the tokenizer gives token ", token, "; the model's vocabulary has ", vocabulary);
    }
  }
  return tokens;
}

std::string TextStream::add(int32_t token) {
  // Gemma's embedding table has rows that no piece belongs to.
  if (token < 0 || token >= processor_.GetPieceSize()) return finish() + kReplacement;
  if (processor_.IsControl(token)) return finish();
  if (processor_.IsUnknown(token)) return finish() + kUnknown;
  const std::string& piece = processor_.IdToPiece(token);
  if (processor_.IsByte(token)) {  // spelled <0x41>
    return add_byte(static_cast<uint8_t>(std::strtoul(piece.c_str() + std::min<size_t>(piece.size(), 3), nullptr, 16)));
  }
  std::string text = finish();
  for (size_t i = 0; i < piece.size();) {
    if (piece.compare(i, kSpaceMark.size(), kSpaceMark) == 0) {
      text += ' ';
      i += kSpaceMark.size();
    } else {
      text += piece[i++];
    }
  }
  return text;
}

std::string TextStream::add_byte(uint8_t byte) {
  std::string text;
  const auto first = [this] { return static_cast<uint8_t>(bytes_[0]); };
  if (!bytes_.empty() && !may_follow(bytes_.size() == 1 ? first() : 0x80, byte)) text = finish();
  if (bytes_.empty() && character_length(byte) == 0) return text + kReplacement;
  bytes_ += static_cast<char>(byte);
  if (bytes_.size() == character_length(first())) {
    text += bytes_;
    bytes_.clear();
  }
  return text;
}

std::string TextStream::finish() {
  std::string text;
  for (size_t i = 0; i < bytes_.size(); ++i) text += kReplacement;
  bytes_.clear();
  return text;
}

}  // namespace gemma
