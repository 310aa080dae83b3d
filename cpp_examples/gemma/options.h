// The command line.
#ifndef GEMMA_OPTIONS_H
#define GEMMA_OPTIONS_H

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "decoder.h"
#include "model.h"
#include "weight_formats.h"

namespace gemma {

struct Options {
  std::string model;
  std::string random;
  std::vector<std::string> prompts;
  std::string device = "auto";
  std::string logits;
  int64_t batch = 1;
  int64_t prompt_tokens = 128;
  std::optional<int64_t> max_tokens;
  uint32_t threads = 0;
  uint64_t memory_limit = 0;  // bytes of the device; 0: none
  Sampling sampling;
  Launching launching;
  WeightFormats weights;
  KvDtypes kv_dtypes;
  std::string draft;                  // a folder, a file, or with --random a name; empty: none
  std::optional<double> draft_right;  // of a draft that knows the text
  int64_t draft_tokens = 4;
  bool memory = false;
  bool help = false;
  bool version = false;
};

// The text of --help.
std::string help_text();

// Errors: an option that is unknown, lacks its value, is out of its range, or needs or excludes another one.
Options parse_options(int count, char** arguments);

}  // namespace gemma

#endif  // GEMMA_OPTIONS_H
