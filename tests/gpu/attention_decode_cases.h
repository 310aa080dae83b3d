// Cases of decode attention for attention_decode_check.h.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_DECODE_CASES_H
#define NVBACKEND_TESTS_GPU_ATTENTION_DECODE_CASES_H

#include <string>
#include <utility>
#include <vector>

#include "common/launch.h"

namespace decode_test {

struct Case {
  std::string name;
  int query_heads = 4, kv_heads = 1;
  std::vector<int> lengths;
  int window = 0;
  float soft_cap = 0;
  uint32_t query_dtype = NVB_BF16, output_dtype = NVB_F32;
  int page_tokens = 0;
  int ring = 0;
  bool bad_pages = false;
  bool slots = false;
  int blocks = 0;
  int rows = 1;
  bool token_major = false;
  bool scaled = false;
  int rounds = 3;
};

inline std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<int> lengths, auto change) {
    Case test;
    test.name = name, test.lengths = std::move(lengths);
    change(test);
    all.push_back(test);
  };
  const auto none = [](Case&) {};
  add("one", {1}, none);
  add("some", {700}, none);
  add("some, few blocks", {700}, [](Case& t) { t.blocks = 3, t.kv_heads = 2, t.query_heads = 8; });
  add("one block", {129, 64, 1}, [](Case& t) { t.blocks = 1; });
  add("lengths", {0, 1, 63, 64, 65, 127, 128, 129, 1000, 16, 15, 17},
      [](Case& t) { t.kv_heads = 2, t.query_heads = 4; });
  add("lengths, 7 blocks", {0, 1, 63, 64, 65, 127, 128, 129, 1000, 16, 15, 17},
      [](Case& t) { t.kv_heads = 2, t.query_heads = 4, t.blocks = 7; });
  add("group 8", {333, 12}, [](Case& t) { t.query_heads = 8; });
  add("group 3", {333, 12}, [](Case& t) { t.query_heads = 3; });
  add("group 16", {333, 12}, [](Case& t) { t.query_heads = 16; });
  add("group 20", {333, 12}, [](Case& t) { t.query_heads = 20; });
  add("window", {1000, 40, 300}, [](Case& t) { t.window = 257; });
  add("soft cap", {500}, [](Case& t) { t.soft_cap = 5; });
  add("f32 queries", {500, 3}, [](Case& t) { t.query_dtype = NVB_F32; });
  add("pages of 16", {500, 3, 1000}, [](Case& t) { t.page_tokens = 16, t.kv_heads = 2, t.query_heads = 8; });
  add("pages of 7", {500, 3, 100}, [](Case& t) { t.page_tokens = 7; });
  add("pages of 1", {100}, [](Case& t) { t.page_tokens = 1; });
  add("pages of 64, window", {500, 3, 100}, [](Case& t) { t.page_tokens = 64, t.window = 99; });
  add("bad pages", {500, 3, 100}, [](Case& t) { t.page_tokens = 16, t.bad_pages = true; });
  add("ring", {500, 3, 100}, [](Case& t) { t.ring = 113, t.window = 100; });
  add("scales", {500, 3, 100}, [](Case& t) { t.scaled = true, t.kv_heads = 2, t.query_heads = 8; });
  add("scales, soft cap, rows", {500, 30, 100},
      [](Case& t) { t.scaled = true, t.kv_heads = 3, t.query_heads = 6, t.rows = 2, t.soft_cap = 4; });
  add("slots", {500, 3, 100, 7, 900}, [](Case& t) { t.slots = true; });
  add("token-major", {500, 3, 100}, [](Case& t) { t.token_major = true, t.kv_heads = 2, t.query_heads = 4; });
  add("token-major pages", {500, 3, 100},
      [](Case& t) { t.token_major = true, t.kv_heads = 2, t.query_heads = 4, t.page_tokens = 16; });
  add("4 rows", {500, 30, 100}, [](Case& t) { t.rows = 4, t.kv_heads = 2, t.query_heads = 4; });
  add("4 rows of 4 heads, window", {500, 30, 100}, [](Case& t) { t.rows = 4, t.window = 40, t.blocks = 5; });
  add("16 rows of 3 heads, pages", {500, 30, 100}, [](Case& t) { t.rows = 16, t.query_heads = 3, t.page_tokens = 16; });
  std::vector<int> many;
  for (int i = 0; i < 150; ++i) many.push_back(i % 7 == 3 ? 0 : (i * 37) % 300);
  add("150 sequences", many, [](Case& t) { t.query_heads = 2, t.rounds = 40; });
  many.resize(100);
  add("100 sequences", many, [](Case& t) { t.query_heads = 2, t.slots = true; });
  return all;
}

}  // namespace decode_test

#endif
