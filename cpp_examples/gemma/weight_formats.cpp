#include "weight_formats.h"

#include <nvbackend.h>

#include "error.h"

namespace gemma {
namespace {

uint32_t parse(const char* option, const std::string& text) {
  if (text.empty()) return NVB_WEIGHT_FORMAT_AS_IS;
  for (const uint32_t format :
       {NVB_WEIGHT_FORMAT_BF16, NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_WEIGHT_FORMAT_INT8, NVB_WEIGHT_FORMAT_INT4}) {
    if (text == weight_format_name(format)) return format;
  }
  fail(option, " is \"", text, "\"; it must be bf16, fp8, int8 or int4");
}

}  // namespace

WeightFormats parse_weight_formats(const std::string& layers, const std::string& table, bool zero_points) {
  WeightFormats formats;
  formats.layers = parse("--weights", layers);
  formats.table = parse("--weights-table", table);
  if (table.empty() && !layers.empty()) {
    formats.table = layers == "int4" ? NVB_WEIGHT_FORMAT_INT8 : NVB_WEIGHT_FORMAT_BF16;
  }
  if (zero_points && formats.layers != NVB_WEIGHT_FORMAT_INT4 && formats.table != NVB_WEIGHT_FORMAT_INT4) {
    fail("--weights-zero-points goes with int4");
  }
  formats.zero_points = zero_points;
  return formats;
}

const char* weight_format_name(uint32_t format) {
  switch (format) {
    case NVB_WEIGHT_FORMAT_BF16:
      return "bf16";
    case NVB_WEIGHT_FORMAT_F16:
      return "f16";
    case NVB_WEIGHT_FORMAT_F32:
      return "f32";
    case NVB_WEIGHT_FORMAT_FP8_E4M3:
      return "fp8";
    case NVB_WEIGHT_FORMAT_INT8:
      return "int8";
    case NVB_WEIGHT_FORMAT_INT4:
      return "int4";
    case NVB_WEIGHT_FORMAT_SFP:
      return "sfp";
    default:
      return "other";
  }
}

}  // namespace gemma
