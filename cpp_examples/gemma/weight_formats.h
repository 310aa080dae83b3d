// What a model's matrices are kept in on the device.
#ifndef GEMMA_WEIGHT_FORMATS_H
#define GEMMA_WEIGHT_FORMATS_H

#include <cstdint>
#include <string>

namespace gemma {

// NVB_WEIGHT_FORMAT_… of the layers' matrices and of the token table, which with the published Gemmas is the head too.
struct WeightFormats {
  uint32_t layers = 0;  // NVB_WEIGHT_FORMAT_AS_IS: as the file has them
  uint32_t table = 0;
  bool zero_points = false;  // of matrices in int4: 5 bits a number instead of 4.5, nearer to the original
};

// Formats for --weights and --weights-table, either of which may be empty: as the file has it. Without a format of its
// own the table takes twice the bits of the layers, int8 for int4 and bf16 for the others: its rows are the model's
// input and, as the head, score every token. Errors: another word than bf16, fp8, int8 and int4; zero points where
// neither is int4.
WeightFormats parse_weight_formats(const std::string& layers, const std::string& table, bool zero_points = false);

// "int8"
const char* weight_format_name(uint32_t format);

}  // namespace gemma

#endif  // GEMMA_WEIGHT_FORMATS_H
