// Damaged files of gemma.cpp: each is refused with a text that names what is wrong, and none is read beyond its end.
// Built with AddressSanitizer and UndefinedBehaviorSanitizer, without the library.
//
//   test_sbs_damage FOLDER     which has small-TYPE-LAYOUT.sbs, random models of two layers that
//                              tests/tools/make_gemma_sbs.py wrote
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "error.h"
#include "sbs_model.h"
#include "support.h"

namespace {

using gemma_test::require;

const uint32_t kNan = 0x7FC00000;

uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

// A file of layout `last`, or `first`, to be damaged.
class SbsFile {
 public:
  SbsFile(const std::string& folder, const std::string& name) : bytes(gemma_test::read_file(folder + "/" + name)) {}

  uint32_t u32(size_t at) const {
    uint32_t value;
    std::memcpy(&value, &bytes.at(at), sizeof value);
    return value;
  }
  uint64_t u64(size_t at) const { return u32(at) | static_cast<uint64_t>(u32(at + 4)) << 32; }
  void set_u32(size_t at, uint32_t value) { std::memcpy(&bytes.at(at), &value, sizeof value); }
  void set_u64(size_t at, uint64_t value) {
    set_u32(at, static_cast<uint32_t>(value));
    set_u32(at + 4, static_cast<uint32_t>(value >> 32));
  }

  bool first() const { return u32(4) != 0; }
  size_t header() const { return first() ? 0 : bytes.size() - 16; }
  uint32_t count() const { return u32(header() + 4); }
  size_t directory() const { return first() ? 16 : header() - 32 * count(); }
  // Where the directory has a blob's name, and its offset with its size.
  size_t name(const std::string& blob) const {
    std::string padded = blob;
    padded.resize(16, '\0');
    for (size_t i = 0; i < count(); ++i) {
      if (bytes.compare(directory() + 16 * i, 16, padded) == 0) return directory() + 16 * i;
    }
    require(false, "the file has no blob ", blob);
    return 0;
  }
  size_t range(const std::string& blob) const { return name(blob) + 16 * count(); }
  size_t data(const std::string& blob) const { return u64(range(blob)); }

  void set_config(size_t word, uint32_t value) { set_u32(data("config") + 4 * word, value); }
  // A field of a tensor's entry, counted from its type.
  size_t entry(const std::string& tensor) const {
    std::string padded = tensor;
    padded.resize((tensor.size() + 3) / 4 * 4, '\0');
    const size_t toc = data("toc");
    for (size_t at = toc; at < toc + u64(range("toc") + 8); at += 4 * (1 + u32(at))) {
      if (bytes.compare(at + 8, 4 * u32(at + 4), padded) == 0) return at + 8 + padded.size();
    }
    require(false, "toc has no tensor ", tensor);
    return 0;
  }
  void set_entry(const std::string& tensor, size_t field, uint32_t value) { set_u32(entry(tensor) + 4 * field, value); }

  std::string bytes;
};

// Writes the bytes and opens them. What open_sbs makes of them must lie in memory that can be read, and be as much as
// the shapes say.
void open(const std::string& bytes) {
  const gemma_test::TemporaryFolder folder;
  const std::string path = folder.path("model.sbs");
  gemma_test::write_file(path, bytes);
  const gemma::SbsModel model = gemma::open_sbs(path);
  unsigned sum = 0;
  for (const auto& [name, tensor] : model.tensors) {
    uint64_t elements = 1;
    for (const int64_t extent : tensor.shape) elements *= static_cast<uint64_t>(extent);
    const auto type = tensor.dtype == "F32"    ? gemma::SbsType::F32
                      : tensor.dtype == "BF16" ? gemma::SbsType::BF16
                      : tensor.dtype == "SFP"  ? gemma::SbsType::SFP
                                               : gemma::SbsType::I8;
    require(tensor.bytes == gemma::sbs_bytes(type, elements), name, " has ", tensor.bytes, " bytes");
    for (size_t i = 0; i < tensor.bytes; ++i) sum += static_cast<const uint8_t*>(tensor.data)[i];
  }
  require(model.tensors.size() > 20 && sum > 0, "no tensors");
}

// Empty if the file is taken.
std::string refusal(const std::string& bytes) {
  try {
    open(bytes);
  } catch (const gemma::Error& error) {
    return error.what();
  }
  return "";
}

struct Damage {
  const char* name;
  void (*damage)(SbsFile&);
  const char* text;
};

// Of small-f32-last.sbs. Words of the configuration: the struct's length, then its fields in their order; the first
// layer's begin at 21.
const Damage kDamages[] = {
    {"empty", [](SbsFile& f) { f.bytes.clear(); }, "0 bytes; a blob store has at least 16"},
    {"a header alone", [](SbsFile& f) { f.bytes.resize(16); }, "cut short"},
    {"another format", [](SbsFile& f) { f.bytes[0] = 'G'; }, "not a blob store of gemma.cpp"},
    {"cut by a byte", [](SbsFile& f) { f.bytes.pop_back(); }, "cut short"},
    {"cut in the middle", [](SbsFile& f) { f.bytes.resize(f.bytes.size() / 2); }, "cut short"},
    {"a byte more", [](SbsFile& f) { f.bytes += '\0'; }, "cut short"},
    {"another size", [](SbsFile& f) { f.set_u64(f.header() + 8, 65537); }, "65536 bytes, where the header says 65537"},
    {"no blobs", [](SbsFile& f) { f.set_u32(f.header() + 4, 0); }, "0 blobs; 1 to 1048576 are possible"},
    {"2^32 blobs", [](SbsFile& f) { f.set_u32(f.header() + 4, UINT32_MAX); }, "4294967295 blobs"},
    {"more blobs than bytes", [](SbsFile& f) { f.set_u32(f.header() + 4, 2048); },
     "a directory of 2048 blobs does not fit into 65536 bytes"},
    {"a blob more", [](SbsFile& f) { f.set_u32(f.header() + 4, f.count() + 1); }, "has no name"},
    {"a name that is empty", [](SbsFile& f) { f.bytes.replace(f.name("toc"), 16, 16, '\0'); }, "has no name"},
    {"a name with a zero in it", [](SbsFile& f) { f.bytes[f.name("toc") + 1] = '\0'; }, "a name with a zero in it"},
    {"a name that is no text", [](SbsFile& f) { f.bytes[f.name("toc")] = '\x80'; }, "a name with the byte 128"},
    {"a name twice", [](SbsFile& f) { f.bytes.replace(f.name("att_w_1"), 7, "att_w_0"); },
     "blob \"att_w_0\" is there twice"},
    {"an offset beyond", [](SbsFile& f) { f.set_u64(f.range("att_w_1"), 1ULL << 40); },
     "blob \"att_w_1\" is at byte 1099511627776; those before it end at"},
    {"an offset that wraps", [](SbsFile& f) { f.set_u64(f.range("att_w_1"), UINT64_MAX - 255); }, "is at byte"},
    {"blobs that overlap", [](SbsFile& f) { f.set_u64(f.range("att_w_1"), f.data("att_w_0")); }, "is at byte"},
    {"an empty blob", [](SbsFile& f) { f.set_u64(f.range("att_w_1") + 8, 0); }, "blob \"att_w_1\" is empty"},
    {"a blob beyond the end", [](SbsFile& f) { f.set_u64(f.range("toc") + 8, 65536); },
     "blob \"toc\" has 65536 bytes from"},
    {"a size that wraps", [](SbsFile& f) { f.set_u64(f.range("toc") + 8, UINT64_MAX - 100); },
     "blob \"toc\" has 18446"},
    {"no configuration", [](SbsFile& f) { f.bytes[f.name("config")] = 'k'; },
     "there is no blob \"config\": the file is of before 2025"},
    {"no tokenizer", [](SbsFile& f) { f.bytes[f.name("tokenizer")] = 'k'; }, "there is no blob \"tokenizer\""},
    {"a tokenizer that was not there", [](SbsFile& f) { f.bytes.replace(f.data("tokenizer"), 11, "unavailable"); },
     "it was written without a tokenizer"},
    {"no entries", [](SbsFile& f) { f.bytes[f.name("toc")] = 'k'; }, "there is no blob \"toc\""},
    {"a tensor without a blob", [](SbsFile& f) { f.bytes[f.name("att_w_1")] = 'k'; }, "there is no blob \"att_w_1\""},

    {"a configuration of 3 bytes", [](SbsFile& f) { f.set_u64(f.range("config") + 8, 515); },
     "a multiple of 4 is needed"},
    {"a struct beyond its blob", [](SbsFile& f) { f.set_config(0, 100000); }, "the model has 100000 words"},
    {"a struct that ends early", [](SbsFile& f) { f.set_config(0, 5); }, "words behind the model"},
    {"another family", [](SbsFile& f) { f.set_config(1, 4); },
     "model_family_version is 4; it must be an integer from 1 to 3"},
    {"a long name", [](SbsFile& f) { f.set_config(2, 65); }, "display_name has 65 words; a text has at most 64"},
    {"a text beyond the end", [](SbsFile& f) { f.set_config(114, 60); }, "scale_base_names has 60 words; 21 are left"},
    {"a name of zeros", [](SbsFile& f) { f.set_config(4, 0), f.set_config(5, 0); }, "padded with more than 3 zeros"},
    {"no layers", [](SbsFile& f) { f.set_config(9, 0); }, "num_layers is 0; it must be an integer from 1 to 1024"},
    {"a huge width", [](SbsFile& f) { f.set_config(10, UINT32_MAX); }, "model_dim is 4294967295"},
    {"another width", [](SbsFile& f) { f.set_config(10, 32); }, "model_dim of layers is 16; that of the model is 32"},
    {"another vocabulary", [](SbsFile& f) { f.set_config(11, 65); },
     "tensor \"c_embedding\" is [64, 16]; the blob \"config\" asks for [65, 16]"},
    {"no vocabulary", [](SbsFile& f) { f.set_config(11, 0); }, "vocab_size is 0"},
    {"no positions", [](SbsFile& f) { f.set_config(12, 0); }, "max_seq_len is 0"},
    {"a cap that is no number", [](SbsFile& f) { f.set_config(14, kNan); }, "att_cap is nan; it must be a number"},
    {"a negative cap", [](SbsFile& f) { f.set_config(15, bits(-1)); }, "final_cap is -1"},
    {"absolute positions", [](SbsFile& f) { f.set_config(16, 1); }, "absolute_pe is 1; only 0 is supported"},
    {"a scale that is not known", [](SbsFile& f) { f.set_config(18, 3); }, "query_scale is 3"},
    {"a layer less", [](SbsFile& f) { f.set_config(19, 1); }, "there are 1 layer_configs; num_layers is 2"},
    {"2^32 layers", [](SbsFile& f) { f.set_config(19, UINT32_MAX); }, "layer_configs has 4294967295 elements"},
    {"a layer beyond the end", [](SbsFile& f) { f.set_config(20, 10000); }, "layer_configs[0] has 10000 words"},
    {"a layer that ends early", [](SbsFile& f) { f.set_config(20, 3); }, "layer_configs[0]: it ends before heads"},
    {"heads that do not divide", [](SbsFile& f) { f.set_config(25, 3), f.set_config(64, 3); },
     "heads is 4; it must be a multiple of kv_heads = 3"},
    {"as many kv_heads as heads", [](SbsFile& f) { f.set_config(25, 4), f.set_config(64, 4); },
     "as many kv_heads as heads, 4, are not supported"},
    {"an odd head", [](SbsFile& f) { f.set_config(26, 7), f.set_config(65, 7); }, "qkv_dim is 7; it must be even"},
    {"layers that differ", [](SbsFile& f) { f.set_config(23, 32); }, "layer_configs[1] differs from the first"},
    {"biases", [](SbsFile& f) { f.set_config(28, 1); }, "ff_biases is 1; only 0 is supported"},
    {"a layer of images", [](SbsFile& f) { f.set_config(32, 1); }, "type is 1; only 0 is supported"},
    {"half a rotation", [](SbsFile& f) { f.set_config(34, 1); }, "post_qk is 1; only 0 is supported"},
    {"a boolean of 2", [](SbsFile& f) { f.set_config(35, 2); }, "use_qk_norm is 2; it must be an integer from 0 to 1"},
    {"norms of queries alone", [](SbsFile& f) { f.set_config(31, 0), f.set_config(70, 0); },
     "use_qk_norm without post_norm is not supported"},
    {"experts", [](SbsFile& f) { f.set_config(37, 8); }, "num_experts is 8; only 0 is supported"},
    {"shared keys", [](SbsFile& f) { f.set_config(40, 3); }, "kv_share_layer_idx is 3; only -1 is supported"},
    {"a window less", [](SbsFile& f) { f.set_config(98, 1); }, "there are 1 attention_window_sizes; num_layers is 2"},
    {"an empty window", [](SbsFile& f) { f.set_config(99, 0); }, "attention_window_sizes is 0"},
    {"a window beyond", [](SbsFile& f) { f.set_config(99, 33); },
     "attention_window_sizes is 33; it must be an integer from 1 to 32"},
    {"two windows", [](SbsFile& f) { f.set_config(100, 5); },
     "windows of 4 and of 5 tokens are not supported together"},
    {"a tower beyond the end", [](SbsFile& f) { f.set_config(102, 1000); }, "vit_config has 1000 words"},
    {"an eos beyond", [](SbsFile& f) { f.set_config(111, 64); }, "eos_id is 64; it must be an integer from 0 to 63"},
    {"many names", [](SbsFile& f) { f.set_config(113, 1000); }, "scale_base_names has 1000 elements"},
    {"a part of a rotation", [](SbsFile& f) { f.set_config(121, bits(0.25F)); },
     "partial_rotary_factor is 0.25; only 1 is supported"},
    {"embeddings for layers", [](SbsFile& f) { f.set_config(122, 256); }, "ple_dim is 256"},
    {"hyper-connections", [](SbsFile& f) { f.set_config(123, 4); }, "hc_mult is above 1"},
    {"a base of 0", [](SbsFile& f) { f.set_config(124, 0); }, "rope_theta is 0"},
    {"an infinite base", [](SbsFile& f) { f.set_config(135, bits(std::numeric_limits<float>::infinity())); },
     "global_rope_theta is inf"},
    {"another tokenizer", [](SbsFile& f) { f.set_config(133, 1); }, "tokenizer_kind is 1; only 0 is supported"},
    {"an encoder", [](SbsFile& f) { f.set_config(134, 1); }, "is_encoder_decoder is 1"},

    {"an entry beyond the end", [](SbsFile& f) { f.set_u32(f.data("toc"), 100000); }, "entry 0 has 100000 words"},
    {"an entry that ends early", [](SbsFile& f) { f.set_u32(f.data("toc"), 6); }, "entry 0: it ends before"},
    {"a missing tensor", [](SbsFile& f) { f.bytes.replace(f.entry("linear_w_1") - 12, 10, "linear_v_1"); },
     "there is no blob \"linear_v_1\""},
    {"an entry twice", [](SbsFile& f) { f.bytes.replace(f.entry("linear_w_1") - 12, 10, "linear_w_0"); },
     "is there twice"},
    {"NUQ", [](SbsFile& f) { f.set_entry("linear_w_1", 0, 4); },
     "tensor \"linear_w_1\" is NUQ; F32, BF16, SFP and I8 are supported"},
    {"MXFP4", [](SbsFile& f) { f.set_entry("linear_w_1", 0, 13); }, "\"linear_w_1\" is MXFP4;"},
    {"a type that is not known", [](SbsFile& f) { f.set_entry("linear_w_1", 0, 77); }, "\"linear_w_1\" is of type 77;"},
    {"elements of another size", [](SbsFile& f) { f.set_entry("linear_w_1", 1, 2); },
     "element_bytes is 2; F32 of 16 x 24 needs 4"},
    {"another count", [](SbsFile& f) { f.set_entry("linear_w_1", 2, 383); },
     "num_elements is 383; F32 of 16 x 24 needs 384"},
    {"no rows", [](SbsFile& f) { f.set_entry("linear_w_1", 3, 0); }, "rows is 0"},
    {"rows that overflow", [](SbsFile& f) { f.set_entry("linear_w_1", 3, UINT32_MAX); }, "rows is 4294967295"},
    {"another shape",
     [](SbsFile& f) {
       f.set_entry("linear_w_1", 3, 24), f.set_entry("linear_w_1", 4, 16), f.set_entry("linear_w_1", 6, 16);
     },
     "tensor \"linear_w_1\" is [24, 16]; the blob \"config\" asks for [16, 24]"},
    {"a scale that is no number", [](SbsFile& f) { f.set_entry("linear_w_1", 5, kNan); }, "scale is nan"},
    {"rows with gaps", [](SbsFile& f) { f.set_entry("linear_w_1", 6, 32); }, "stride is 32; F32 of 16 x 24 needs 24"},
    {"a blob of another size", [](SbsFile& f) { f.set_u64(f.range("linear_w_1") + 8, 1500); },
     "the size of its blob is 1500; F32 of 16 x 24 needs 1536"},
    {"another type of the same size",
     [](SbsFile& f) { f.set_entry("linear_w_1", 0, 3), f.set_entry("linear_w_1", 1, 1); },
     "the size of its blob is 1536; SFP of 16 x 24 needs 384"},
};

void check_damages(const std::string& folder) {
  size_t count = 0;
  for (const Damage& damage : kDamages) {
    SbsFile file(folder, "small-f32-last.sbs");
    damage.damage(file);
    const std::string text = refusal(file.bytes);
    require(text.find(damage.text) != std::string::npos, damage.name, ": it does not say \"", damage.text,
            "\" but: ", text);
    ++count;
  }
  std::printf("        %zu damages\n", count);
}

// In the other layout, and in matrices that are decoded while they are read.
void check_other_damages(const std::string& folder) {
  const auto refused = [&folder](const char* name, const std::function<void(SbsFile&)>& damage, const char* text) {
    SbsFile file(folder, name);
    damage(file);
    const std::string said = refusal(file.bytes);
    require(said.find(text) != std::string::npos, name, ": it does not say \"", text, "\" but: ", said);
  };
  const char* const first = "small-f32-first.sbs";
  refused(first, [](SbsFile& f) { f.bytes.resize(f.bytes.size() - 1); }, "65535 bytes, where the header says 65536");
  refused(first, [](SbsFile& f) { f.set_u32(4, 0); }, "there is no header in the last 16 of 65536 bytes");
  refused(first, [](SbsFile& f) { f.set_u32(4, 2047); }, "is at byte");
  refused(first, [](SbsFile& f) { f.set_u32(4, 2048); }, "a directory of 2048 blobs does not fit");
  refused(first, [](SbsFile& f) { f.set_u64(f.range("toc") + 8, 65536); }, "blobs end at 65536");
  // The two forms of what may be joined.
  refused(
      first,
      [](SbsFile& f) {
        f.bytes.replace(f.name("gating_ein_1"), 16, std::string("gating_ein_9\0\0\0\0", 16));
        f.bytes.replace(f.entry("gating_ein_1") - 12, 12, "gating_ein_9");
      },
      "there is no tensor \"gating1_w_1\", [24, 16]");
  refused("small-nuq-last.sbs", [](SbsFile&) {}, "tensor \"c_embedding\" is NUQ; F32, BF16, SFP and I8 are supported");
  // A head of 8 shares a group of 128 with others.
  const char* const i8 = "small-i8-first.sbs";
  refused(
      i8, [](SbsFile& f) { f.bytes.replace(f.data("att_ein_0") + 132, 2, "\x80\x7F"); },
      "tensor \"att_ein_0\": row 16, column 0 has a group with the scale inf");
  refused(
      i8, [](SbsFile& f) { f.bytes.replace(f.data("att_ein_0") + 2, 2, "\xC0\x7F"); },
      "tensor \"att_ein_0\": row 0, column 0 has a group with the zero nan");
  refused(
      i8, [](SbsFile& f) { f.bytes.replace(f.data("qkv_ein_1"), 4, "\x7F\x7F\x7F\x7F"); },
      "\"qkv_ein_1\": row 0, column 0 is ");
}

// Random changes of all parts but the tensors' numbers. Those of the header, the directory and the entries must be
// refused; others may give another model that is as good.
void check_mutations(const std::string& folder, const std::string& name) {
  constexpr int kChanges = 400;
  const SbsFile original(folder, name);
  require(refusal(original.bytes).empty(), "the file itself is refused: ", refusal(original.bytes));
  std::mt19937_64 random(std::hash<std::string>()(name));
  const auto below = [&random](size_t count) { return static_cast<size_t>(random() % count); };
  const uint32_t values[] = {0, 1, 2, 0x7FFFFFFF, 0x80000000, UINT32_MAX, kNan, 0x7F800000, 256, 65536};
  int refused = 0, taken = 0;
  for (int i = 0; i < kChanges; ++i) {
    SbsFile file = original;
    struct Part {
      const char* name;
      size_t at, bytes;
      bool strict;
    };
    const Part parts[] = {
        {"the header", file.header(), 16, true},
        {"the names", file.directory(), 16 * file.count(), true},
        {"the offsets and sizes", file.directory() + 16 * file.count(), 16 * file.count(), false},
        {"the entries", file.data("toc"), file.u64(file.range("toc") + 8), false},
        {"the configuration", file.data("config"), file.u64(file.range("config") + 8), false},
        {"the configuration", file.data("config"), file.u64(file.range("config") + 8), false},
        {"the file", 0, file.bytes.size(), false},
    };
    const Part& part = parts[below(std::size(parts))];
    const size_t at = part.at + below(part.bytes);
    switch (below(4)) {
      case 0:
        file.bytes[at] = static_cast<char>(file.bytes[at] ^ 1 << below(8));
        break;
      case 1:
        file.bytes[at] = static_cast<char>(file.bytes[at] + 1 + static_cast<char>(below(255)));
        break;
      case 2: {
        const size_t word = part.at + below(part.bytes / 4) * 4;
        file.set_u32(word, file.u32(word) + (below(2) == 0 ? 1 : UINT32_MAX));
        break;
      }
      default:
        file.set_u32(part.at + below(part.bytes / 4) * 4, values[below(std::size(values))]);
    }
    if (file.bytes == original.bytes) continue;
    const bool accepted = refusal(file.bytes).empty();
    require(!accepted || !part.strict, "a change of ", part.name, " is taken");
    ++(accepted ? taken : refused);
  }
  for (int i = 0; i < 40; ++i) {
    const std::string cut = original.bytes.substr(0, below(original.bytes.size()));
    require(!refusal(cut).empty(), "a file of ", cut.size(), " bytes is taken");
    ++refused;
  }
  std::printf("        %s: %d changes refused, %d taken\n", name.c_str(), refused, taken);
  require(refused > kChanges / 4, "only ", refused, " changes are refused");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: test_sbs_damage FOLDER\n");
    return 2;
  }
  const std::string folder = arguments[1];
  std::vector<gemma_test::Test> tests = {{"damages", [=] { check_damages(folder); }},
                                         {"other damages", [=] { check_other_damages(folder); }}};
  for (const char* type : {"f32", "sfp_scaled", "i8", "mixed"}) {
    for (const char* layout : {"first", "last"}) {
      const std::string name = std::string("small-") + type + "-" + layout + ".sbs";
      tests.push_back({"mutations of " + name, [=] { check_mutations(folder, name); }});
    }
  }
  return gemma_test::run_tests(tests);
}
