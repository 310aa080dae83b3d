#include "decoder.h"

#include <algorithm>
#include <cstdio>

#include "error.h"
#include "fp8.h"

namespace gemma {
namespace {

// Attention divides its work by the length that it is told; up to this one it does so in one way.
constexpr int64_t kShortest = 512;

// Steps of a launch on a GPU that replays: copies and the start of a launch cost it some ten microseconds, while the
// text comes in pieces of so many tokens, and up to twice as many are computed past the end of a sequence. Elsewhere
// one: the CPU has finished when a call returns, so a second step would only delay the text.
constexpr int64_t kReplayedSteps = 4;

bool is_cpu(const nvb::backend& backend) {
  return backend.device_info().kind == NVB_DEVICE_CPU;
}

}  // namespace

int64_t Decoder::rows_for(const nvb::backend& backend, const Launching& launching, int64_t sequences) {
  if (launching.optimize == 0 || is_cpu(backend)) return sequences;
  constexpr int64_t kMost = 64;  // of the powers of two; multiples of it follow
  if (sequences > kMost) return (sequences + kMost - 1) / kMost * kMost;
  int64_t rows = 1;
  while (rows < sequences) rows *= 2;
  return rows;
}

Decoder::Decoder(const nvb::backend& backend, Session& session, const Sampling& sampling, const Launching& launching,
                 int64_t rows, int64_t capacity)
    : backend_(backend),
      session_(session),
      sampling_(sampling),
      cpu_(is_cpu(backend)),
      recorded_(launching.optimize > 0),
      optimize_(launching.optimize),
      fp8_(launching.fp8),
      capacity_(capacity),
      steps_(launching.steps > 0  ? launching.steps
             : recorded_ && !cpu_ ? kReplayedSteps
                                  : 1),
      inputs_(backend, static_cast<size_t>((2 * steps_ + 1) * rows) * sizeof(int32_t), session.stream()),
      logits_(backend, static_cast<size_t>(rows * session.model().config.vocabulary) * sizeof(float),
              session.stream()) {}

int64_t Decoder::length_bucket(int64_t max_kv_length) const {
  int64_t length = kShortest;
  while (length < max_kv_length) length *= 2;
  return std::min(length, capacity_);
}

void Decoder::choose(const nvb_tensor& hidden, int64_t step, const nvb_tensor& positions) {
  const int64_t rows = hidden.shape[0];
  const nvb_tensor logits = nvb::tensor(logits_.data(), NVB_DTYPE_F32, {rows, session_.model().config.vocabulary});
  session_.logits(hidden, logits);
  if (sampling_.temperature > 0) {
    auto args = nvb::make<nvb_sample_args>();
    args.logits = logits;
    args.tokens = tokens(rows, step);
    // A draw depends on the sequence and the position alone, not on who else is in the batch.
    args.sequences = sequences(rows);
    args.positions = positions;
    args.temperature = sampling_.temperature;
    args.top_k = sampling_.top_k;
    args.top_p = sampling_.top_p;
    args.seed = sampling_.seed;
    nvb::sample(backend_, args, session_.stream());
  } else {
    auto args = nvb::make<nvb_argmax_args>();
    args.logits = logits;
    args.tokens = tokens(rows, step);
    nvb::argmax(backend_, args, session_.stream());
  }
}

void Decoder::queue_steps(int64_t rows, int64_t max_kv_length) {
  for (int64_t step = 0; step < steps_; ++step) {
    session_.decode({tokens(rows, step), positions(rows, step), sequences(rows)}, max_kv_length);
    choose(session_.hidden(0, rows), step + 1, positions(rows, step));
  }
}

void Decoder::launch(int64_t rows, int64_t max_kv_length) {
  if (!recorded_) return queue_steps(rows, max_kv_length);
  const int64_t length = length_bucket(max_kv_length);
  nvb::graph& graph = graphs_[{rows, length}];
  if (graph.get() == nullptr) {
    nvb::graph recorded(backend_);
    recorded.record(session_.stream(), [&] { queue_steps(rows, length); });
    // Launches follow each other on one stream, so one workspace is enough for the graphs of all numbers of rows.
    for (const auto& [shape, other] : graphs_) {
      if (other.get() != nullptr) recorded.share_workspace(other);
    }
    // What a step computes on its way, nobody reads behind a launch. Tokens and the cache stay.
    const auto mark = [&](const nvb::buffer& memory) {
      const nvb_tensor bytes =
          nvb::tensor(memory.data(), NVB_DTYPE_BF16, {static_cast<int64_t>(memory.size() / sizeof(uint16_t))});
      nvb::check(nvb_graph_mark_internal(recorded.get(), &bytes));
    };
    session_.visit_activations(mark);
    // In FP8 the logits are the outputs whose error counts.
    if (!fp8_) mark(logits_);
    nvb::check(nvb_graph_optimize(recorded.get(), optimize_, nullptr));
    if (fp8_) convert_fp8(recorded, session_.stream(), *fp8_, "decode");
    graph = std::move(recorded);
  }
  graph.launch(session_.stream());
}

bool Decoder::prepare(int64_t rows, int64_t max_kv_length) {
  if (!recorded_ || cpu_) return false;
  nvb::memory_manager memory(backend_);
  const auto fill = [&](const nvb_tensor& first, int64_t parts, uint32_t byte) {
    nvb::check(nvb_memory_fill(memory, first.data, byte, static_cast<size_t>(parts * rows) * sizeof(int32_t),
                               session_.stream()));
  };
  fill(positions(rows, 0), steps_, 0xFF);  // -1
  fill(sequences(rows), 1 + steps_, 0);    // and the tokens behind them
  launch(rows, max_kv_length);
  session_.stream().synchronize();
  return true;
}

void Decoder::write_profile(int64_t rows, int64_t max_kv_length, const std::string& file) {
  const auto found = graphs_.find({rows, length_bucket(max_kv_length)});
  if (found == graphs_.end())
    fail("--profile needs a launch of a recorded step: --optimize 1 to 3, and two new tokens");
  nvb::graph& graph = found->second;
  graph.profile(session_.stream());
  std::fputs(graph.profiled(NVB_GRAPH_FORMAT_TEXT).c_str(), stderr);
  const std::string trace = graph.profiled(NVB_GRAPH_FORMAT_CHROME_TRACE);
  std::FILE* out = std::fopen(file.c_str(), "wb");
  if (out == nullptr) fail(file, " cannot be opened for writing");
  const bool complete = std::fwrite(trace.data(), 1, trace.size(), out) == trace.size();
  if (std::fclose(out) != 0 || !complete) fail(file, " cannot be written");
}

}  // namespace gemma
