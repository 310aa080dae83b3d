#include "hostile_gguf.h"

#include <cstring>
#include <nvbackend.hpp>

#include "support.h"

namespace gemma_test {
namespace {

// The shipped GGUF file, to be damaged where it lies: every change keeps its size.
class GgufFile {
 public:
  GgufFile() : bytes(read_file("tests/data/tiny-gemma3-q8_0.gguf")) {}

  // The first place after a text, which is a key or a tensor's name.
  size_t after(const std::string& text) const {
    const size_t at = bytes.find(text);
    require(at != std::string::npos, "the file does not hold ", text);
    return at + text.size();
  }
  void rename(const std::string& from, const std::string& to) {
    require(from.size() == to.size(), from, " and ", to, " differ in length");
    bytes.replace(after(from) - from.size(), to.size(), to);
  }
  void set_u32(size_t at, uint32_t value) { std::memcpy(&bytes[at], &value, sizeof value); }
  // A number's value; its type, 4 bytes, comes before it.
  void set_value(const std::string& key, uint32_t value) { set_u32(after(key) + 4, value); }
  void set_type(const std::string& key, uint32_t type) { set_u32(after(key), type); }
  // An array's element: after its type, its elements' type and its count of 8 bytes.
  void set_element(const std::string& key, size_t index, uint32_t value) {
    set_u32(after(key) + 16 + 4 * index, value);
  }
  // A tensor's type: after the number of its extents and the extents, 8 bytes each.
  void set_tensor_type(const std::string& name, size_t rank, uint32_t type) {
    set_u32(after(name) + 4 + 8 * rank, type);
  }

  std::string bytes;
};

struct Damage {
  const char* name;
  void (*damage)(GgufFile&);
  const char* text;
};

const uint32_t kNan = 0x7FC00000;

const Damage kDamages[] = {
    {"empty", [](GgufFile& f) { f.bytes.clear(); }, "0 bytes"},
    {"another format", [](GgufFile& f) { f.bytes[0] = 'X'; }, "GGUF"},
    {"cut in the header", [](GgufFile& f) { f.bytes.resize(10000); }, "byte"},
    {"cut in the data", [](GgufFile& f) { f.bytes.resize(f.bytes.size() / 2); }, "byte"},
    {"another architecture", [](GgufFile& f) { f.rename("gemma3", "llama3"); },
     "general.architecture is \"llama3\"; gemma3 is supported"},
    {"no layers", [](GgufFile& f) { f.set_value("gemma3.block_count", 0); },
     "gemma3.block_count is 0; it must be an integer from 1 to 1024"},
    {"a key that is missing", [](GgufFile& f) { f.rename("gemma3.block_count", "gemma3.black_count"); },
     "there is no metadata gemma3.block_count"},
    {"a float as count", [](GgufFile& f) { f.set_type("gemma3.block_count", 6); },
     "gemma3.block_count is not an integer"},
    {"a huge width", [](GgufFile& f) { f.set_value("gemma3.embedding_length", UINT32_MAX); },
     "gemma3.embedding_length is 4294967295"},
    {"another width", [](GgufFile& f) { f.set_value("gemma3.embedding_length", 128); },
     "tensor \"token_embd.weight\" is [1024, 256]; the metadata asks for [1024, 128]"},
    {"more layers than tensors", [](GgufFile& f) { f.set_value("gemma3.block_count", 7); },
     "no tensor \"blk.6.attn_norm.weight\", [256]"},
    {"heads that do not divide", [](GgufFile& f) { f.set_value("gemma3.attention.head_count_kv", 3); },
     "must be a multiple of gemma3.attention.head_count_kv = 3"},
    {"an odd head", [](GgufFile& f) { f.set_value("gemma3.attention.key_length", 63); },
     "gemma3.attention.key_length is 63; it must be even"},
    {"values of another length", [](GgufFile& f) { f.set_value("gemma3.attention.value_length", 32); },
     "gemma3.attention.value_length is 32"},
    {"an epsilon that is no number", [](GgufFile& f) { f.set_value("gemma3.attention.layer_norm_rms_epsilon", kNan); },
     "layer_norm_rms_epsilon is nan"},
    {"few positions", [](GgufFile& f) { f.set_value("gemma3.context_length", 4); }, "the model has 4"},
    {"an eos beyond", [](GgufFile& f) { f.set_value("tokenizer.ggml.eos_token_id", 5000); },
     "tokenizer.ggml.eos_token_id is 5000"},
    {"no table", [](GgufFile& f) { f.rename("token_embd.weight", "token_emb_.weight"); },
     "there is no tensor \"token_embd.weight\""},
    {"a missing tensor", [](GgufFile& f) { f.rename("blk.0.attn_q.weight", "blk.0.attn_x.weight"); },
     "no tensor \"blk.0.attn_q.weight\", [256, 256]"},
    {"an unknown type", [](GgufFile& f) { f.set_tensor_type("blk.0.attn_q.weight", 2, 200); }, "200"},
    {"a norm of blocks", [](GgufFile& f) { f.set_tensor_type("blk.0.attn_norm.weight", 1, 8); },
     "tensor \"blk.0.attn_norm.weight\" is Q8_0; F32, F16 and BF16 are supported here"},
    {"a scale that is infinite",
     [](GgufFile& f) {
       const nvb::gguf file(f.bytes.data(), f.bytes.size());
       const char* block = static_cast<const char*>(file.tensor("blk.3.ffn_down.weight").data);  // an f16, then codes
       f.bytes.replace(static_cast<size_t>(block - f.bytes.data()), 2, std::string("\x00\x7C", 2));
     },
     "blk.3.ffn_down.weight: NVB_ERROR_INVALID_ARGUMENT: nvb_weight_create: parts[0]: Q8_0 block 0 of row 0 has the "
     "scale inf"},
    {"another tokenizer", [](GgufFile& f) { f.set_u32(f.after("tokenizer.ggml.model") + 12, 0x32747067); },  // "gpt2"
     "tokenizer.ggml.model is \"gpt2a\""},
    {"a score that is no number", [](GgufFile& f) { f.set_element("tokenizer.ggml.scores", 300, kNan); },
     "token 300 has the score nan"},
    {"a piece of an unknown type", [](GgufFile& f) { f.set_element("tokenizer.ggml.token_type", 300, 9); },
     "token 300 has the score -40 and the type 9"},
    {"scores of another type", [](GgufFile& f) { f.set_u32(f.after("tokenizer.ggml.scores") + 4, 5); },
     "tokenizer.ggml.scores is not an array of 1024 numbers of type 6"},
    {"no unknown piece", [](GgufFile& f) { f.set_element("tokenizer.ggml.token_type", 3, 1); },
     "not a SentencePiece model"},
};

}  // namespace

std::vector<HostileGguf> hostile_ggufs() {
  std::vector<HostileGguf> all;
  for (const Damage& damage : kDamages) {
    GgufFile file;
    damage.damage(file);
    all.push_back({damage.name, std::move(file.bytes), damage.text});
  }
  return all;
}

}  // namespace gemma_test
