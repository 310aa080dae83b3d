// Cases of prefill attention, for the emulated kernels (tests/emulated) and for a device (attention_prefill_wgmma.cu).
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CASES_H
#define NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CASES_H

#include "attention_prefill_check.h"

namespace attention_cases {

// Sinks, chunks and prefixes, alone and with one another and the other masks: tiles that no row sees, that some see and
// that all do, rows that see no key, and sinks of rows without one.
inline void add_terms(
    const std::function<void(const char*, std::vector<Lengths>, const std::function<void(Case&)>&)>& add) {
  const auto causal = [](Case& one) { one.causal = true, one.query_heads = 3; };
  add("sinks", {{130, 300}, {3, 0}, {140, 20}, {1, 1}}, [&](Case& one) { causal(one), one.sinks = true; });
  add("sinks full", {{70, 200}}, [&](Case& one) { one.sinks = true; });
  add("sinks, soft cap", {{70, 200}},
      [&](Case& one) { causal(one), one.sinks = true, one.soft_cap = 3, one.spread = 6; });
  for (const int chunk : {1, 37, 128, 300}) {
    add("chunks", {{200, 520}, {140, 20}, {1, 301}}, [&](Case& one) { causal(one), one.chunk = chunk; });
  }
  add("chunks, not causal", {{200, 520}}, [](Case& one) { one.chunk = 200; });
  add("chunks, window, sinks", {{200, 520}}, [&](Case& one) {
    causal(one);
    one.chunk = 200, one.window = 90, one.sinks = true;
  });
  for (const int prefix : {1, 130, 256, 1000}) {
    add("prefix", {{300, 520}, {140, 20}, {5, 5}}, [&](Case& one) { causal(one), one.prefix = prefix; });
  }
  add("prefix, window, sinks", {{300, 420}}, [&](Case& one) {
    causal(one);
    one.prefix = 260, one.window = 150, one.sinks = true;
  });
  add("prefix, chunks", {{300, 420}}, [&](Case& one) { causal(one), one.prefix = 260, one.chunk = 128; });
  for (const int head_dim : {64, 128, 256}) {
    const auto with = [&](const std::function<void(Case&)>& change) {
      return [&, change](Case& one) {
        one.head_dim = one.value_dim = head_dim;
        one.query_heads = 2;
        change(one);
      };
    };
    const std::vector<Lengths> some = {{140, 270}, {0, 0}, {3, 5}, {20, 2}, {1, 129}};
    add("slopes, soft cap", some, with([&](Case& one) { one.causal = one.slopes = true, one.soft_cap = 4; }));
    for (const bool mask_tiles : {false, true}) {
      add("bits", some, with([&](Case& one) { one.mask = NVB_I32, one.mask_tiles = mask_tiles; }));
    }
    // The latter has more tiles of 64 keys than a word has bits.
    add("bits, causal, window, sinks", {{140, 500}, {3, head_dim == 256 ? 2200 : 700}},
        with([&](Case& one) { one.mask = NVB_I32, one.causal = true, one.window = 300, one.sinks = true; }));
    add("mask", some, with([&](Case& one) { one.mask = NVB_F16; }));
    add("dropout, bits", some, with([&](Case& one) { one.dropout = 0.1f, one.mask = NVB_I32, one.dtype = NVB_F16; }));
    add("dropout, causal, sinks, slopes", some, with([&](Case& one) {
          one.dropout = 0.9f, one.causal = one.sinks = one.slopes = true, one.f32_output = true;
        }));
    if (head_dim != 128) continue;
    add("slopes full", {{70, 300}}, with([&](Case& one) { one.slopes = true; }));
    add("bits of heads", {{140, 400}}, with([&](Case& one) { one.mask = NVB_I32, one.mask_of_heads = true; }));
    add("bits in pages", {{140, 270}, {3, 700}}, with([&](Case& one) { one.mask = NVB_I32, one.page_tokens = 24; }));
    for (const uint32_t mask : {NVB_F32, NVB_BF16}) {
      add("mask", some, with([&](Case& one) { one.mask = mask; }));
    }
    add("mask of heads, causal", {{140, 200}},
        with([&](Case& one) { one.mask = NVB_F16, one.mask_of_heads = one.causal = true, one.soft_cap = 3; }));
  }
  for (const int head_dim : {64, 256}) {
    add("sinks, chunks, prefix", {{200, 270}, {60, 81}}, [&](Case& one) {
      causal(one);
      one.head_dim = one.value_dim = head_dim;
      one.sinks = true, one.chunk = 150, one.prefix = 100;
    });
  }
}

inline std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<Lengths> sequences, const std::function<void(Case&)>& change) {
    Case one;
    one.name = name;
    one.sequences = std::move(sequences);
    change(one);
    all.push_back(one);
  };
  const auto dims = [](int head_dim, int value_dim) {
    return [=](Case& one) { one.head_dim = head_dim, one.value_dim = value_dim; };
  };
  const auto causal = [](Case& one) { one.causal = true; };

  // Edges of tiles of 128 rows, and of 128 and 176 keys.
  const std::vector<Lengths> edges = {{0, 0}, {1, 1},    {1, 0},    {127, 127}, {128, 128}, {129, 129},
                                      {3, 5}, {64, 175}, {65, 176}, {2, 177},   {5, 353},   {0, 9}};
  add("edges full", edges, [](Case&) {});
  add("edges causal", edges, causal);
  add("causal, more keys", {{130, 400}, {7, 260}}, causal);
  add("causal, more queries", {{260, 130}, {140, 1}}, causal);
  add("causal, cache", {{130, 300}, {40, 129}, {1, 1}}, [&](Case& one) {
    causal(one);
    one.cache = true;
    one.query_heads = 4, one.kv_heads = 2;
  });
  add("window", {{300, 420}, {40, 700}}, [&](Case& one) {
    causal(one);
    one.window = 90;
  });
  add("window of one", {{130, 131}}, [&](Case& one) {
    causal(one);
    one.window = 1;
  });
  add("window, not causal", {{200, 500}}, [](Case& one) { one.window = 140; });
  add("soft cap", {{130, 300}}, [&](Case& one) {
    causal(one);
    one.soft_cap = 5;
    one.spread = 8;
  });
  add("grouped heads, persistent", {{140, 300}, {140, 300}, {20, 500}}, [&](Case& one) {
    one.query_heads = 6, one.kv_heads = 2;
    one.multiprocessors = 3;
    one.l2_bytes = 400 * 1024;
  });
  // Groups that start with rounds of their own, which leave places empty.
  add("causal, groups", {{300, 300}, {300, 300}}, [&](Case& one) {
    causal(one);
    one.query_heads = 6, one.kv_heads = 2;
    one.multiprocessors = 4;
    one.l2_bytes = 300 * 1024;
  });
  add_terms(add);
  add("rising scores", {{70, 900}}, [](Case& one) { one.spread = 12; });
  add("f32 output", {{70, 200}}, [](Case& one) { one.f32_output = true; });
  add("f16", {{140, 260}}, [&](Case& one) {
    causal(one);
    one.dtype = NVB_F16;
  });
  add("f16 full", {{65, 360}}, [](Case& one) { one.dtype = NVB_F16; });

  // Pages of more and of fewer tokens than a tile has keys, the copies of which are then of 8, 16 or 32.
  for (const int page_tokens : {8, 16, 24, 256}) {
    for (const int head_dim : {64, 128, 256}) {
      add("pages", {{130, 300}, {40, 129}, {1, 1}, {0, 0}, {60, 520}}, [&](Case& one) {
        one.head_dim = one.value_dim = head_dim;
        one.causal = page_tokens != 24;
        one.query_heads = 4, one.kv_heads = 2;
        one.page_tokens = page_tokens;
      });
    }
  }

  // Every other tile, in both dtypes, and dims between them.
  struct Dims {
    int head_dim, value_dim;
  };
  for (const Dims dim : {Dims{64, 64}, Dims{96, 96}, Dims{192, 192}, Dims{192, 128}, Dims{256, 256}}) {
    for (const uint32_t dtype : {NVB_BF16, NVB_F16}) {
      for (const bool is_causal : {false, true}) {
        add("tile", {{200, 270}, {1, 80}, {60, 81}}, [&](Case& one) {
          dims(dim.head_dim, dim.value_dim)(one);
          one.dtype = dtype;
          one.causal = is_causal;
        });
      }
    }
  }
  for (const Dims dim : {Dims{8, 8}, Dims{40, 40}, Dims{80, 80}, Dims{112, 104}, Dims{136, 136}, Dims{248, 200}}) {
    add("between tiles", {{70, 140}}, dims(dim.head_dim, dim.value_dim));
  }
  return all;
}

// Of the kernel of FP8.
inline std::vector<Case> fp8_cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<Lengths> sequences, const std::function<void(Case&)>& change) {
    Case one;
    one.name = name;
    one.dtype = NVB_F8_E4M3;
    one.sequences = std::move(sequences);
    change(one);
    all.push_back(one);
  };
  const auto causal = [](Case& one) { one.causal = true; };
  const auto equal = [](Case& one) { one.spread = 0, one.f32_output = true; };

  // Edges of tiles of 128 rows and 224 keys, and of blocks of 128 keys.
  const std::vector<Lengths> edges = {{0, 0}, {1, 1},    {1, 0},    {127, 127}, {128, 128}, {129, 129},
                                      {3, 5}, {64, 223}, {65, 224}, {2, 225},   {5, 449},   {0, 9}};
  add("edges full", edges, [](Case&) {});
  add("edges causal", edges, causal);
  // Weights are 256 then, and every key counts.
  add("equal weights", edges, equal);
  add("equal weights, causal", edges, [&](Case& one) { equal(one), causal(one); });
  add("causal, more keys", {{130, 400}, {7, 260}}, causal);
  add("causal, more queries", {{260, 130}, {140, 1}}, causal);
  add("causal, cache", {{130, 300}, {40, 129}, {1, 1}}, [&](Case& one) {
    causal(one);
    one.cache = true;
    one.query_heads = 4, one.kv_heads = 2;
    one.scales = true;
  });
  add("window", {{300, 420}, {40, 700}}, [&](Case& one) { causal(one), one.window = 90; });
  add("window, not causal", {{200, 500}}, [](Case& one) { one.window = 140; });
  add("soft cap", {{130, 300}}, [&](Case& one) {
    causal(one);
    one.soft_cap = 5;
    one.spread = 8;
    one.scales = true;
  });
  add("grouped heads, persistent", {{140, 300}, {140, 300}, {20, 500}}, [&](Case& one) {
    one.query_heads = 6, one.kv_heads = 2;
    one.multiprocessors = 3;
    one.l2_bytes = 200 * 1024;
    one.scales = true;
  });
  add("rising scores", {{70, 900}}, [](Case& one) { one.spread = 12; });
  // O leaves the sums of the tensor cores more than once.
  add("long", {{66, 5000}}, [](Case& one) { one.fp8_output = NVB_F16; });
  add("long, rising scores", {{20, 5000}}, [&](Case& one) { causal(one), one.spread = 12; });
  add("long, equal weights", {{20, 5000}}, equal);
  add("f16 output", {{70, 200}}, [](Case& one) { one.fp8_output = NVB_F16; });
  add("f32 output", {{70, 200}}, [](Case& one) { one.f32_output = true; });
  for (const uint32_t dtype : {uint32_t{NVB_F8_E4M3}, uint32_t{NVB_F8_E5M2}}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const bool is_equal : {false, true}) {
        add("tile", {{200, 270}, {1, 80}, {60, 161}}, [&](Case& one) {
          one.head_dim = one.value_dim = head_dim;
          one.dtype = dtype;
          one.causal = true;
          one.spread = is_equal ? 0 : 1;
        });
      }
    }
  }
  for (const int head_dim : {16, 48, 80, 112, 144, 240}) {
    add("between tiles", {{70, 140}}, [&](Case& one) { one.head_dim = one.value_dim = head_dim; });
  }
  // Pages of more and of fewer tokens than a tile has keys, the copies of which are then of 8, 16 or 32.
  for (const int page_tokens : {8, 16, 24, 256}) {
    for (const int head_dim : {64, 128, 256}) {
      add("pages", {{130, 300}, {40, 129}, {1, 1}, {0, 0}, {60, 520}}, [&](Case& one) {
        one.head_dim = one.value_dim = head_dim;
        one.causal = page_tokens != 24;
        one.query_heads = 4, one.kv_heads = 2;
        one.page_tokens = page_tokens;
      });
    }
  }
  add("value dim", {{70, 240}}, [&](Case& one) { one.head_dim = 192, one.value_dim = 128; });
  return all;
}

}  // namespace attention_cases

#endif  // NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CASES_H
