// Decode steps: the layers over the newest token of each row, its logits, and the choice of the token after it, which
// stays on the device as the input of the next step.
//
// A launch runs one step or several. Its calls are the same each time, as all that differs lies in device memory, so
// they are recorded once as a graph for a number of rows and a length, optimised and replayed.
#ifndef GEMMA_DECODER_H
#define GEMMA_DECODER_H

#include <cstdint>
#include <map>
#include <nvbackend.hpp>
#include <optional>
#include <string>
#include <utility>

#include "forward.h"

namespace gemma {

// How tokens are chosen.
struct Sampling {
  float temperature = 0;  // 0: the most probable token
  uint32_t top_k = 0;     // 0: off
  float top_p = 1;        // 1: off
  uint64_t seed = 0;
};

// How launches are made.
struct Launching {
  uint32_t optimize = 2;  // 0: the calls of a step are queued each time; more: recorded, and optimised at this level
  int64_t steps = 0;      // of a launch; 0: what suits the device
  // Products in FP8 whose errors stay within this; 0: whatever the error; absent: none.
  std::optional<float> fp8;
  std::string profile;  // the file for the times of a launch's operations, as a Chrome trace; empty: none
};

class Decoder {
 public:
  // Launches of up to `rows` rows, as `session` has room for, over `capacity` tokens of a sequence. Session and backend
  // outlive the decoder.
  Decoder(const nvb::backend& backend, Session& session, const Sampling& sampling, const Launching& launching,
          int64_t rows, int64_t capacity);

  // The rows of a launch for `sequences` sequences. A GPU that replays has a graph for each of a few numbers.
  static int64_t rows_for(const nvb::backend& backend, const Launching& launching, int64_t sequences);
  // The steps of a launch, whose tokens are known together.
  int64_t steps() const { return steps_; }
  // The position of a row whose token nobody wants. A GPU computes nothing for -1, which the CPU refuses: there it is
  // the last place of a sequence that has ended.
  int32_t idle_position() const { return cpu_ ? static_cast<int32_t>(capacity_) - 1 : -1; }

  // What a launch of `rows` rows reads, I32 in device memory, in this order without gaps:
  nvb_tensor positions(int64_t rows, int64_t step) const { return part(rows, step); }  // [rows] for each step
  nvb_tensor sequences(int64_t rows) const { return part(rows, steps_); }              // [rows]
  // Where step `step` finds its tokens, [rows]. A launch reads those of step 0; step n leaves its choice in the input
  // of step n + 1, the last one in that of step 0, for the next launch.
  nvb_tensor tokens(int64_t rows, int64_t step) const { return part(rows, steps_ + 1 + step % steps_); }

  // Queues the choice of a token for each row of `hidden`, as sequences and positions of step 0 say, into the input of
  // `step`.
  void choose(const nvb_tensor& hidden, int64_t step) { choose(hidden, step, positions(hidden.shape[0], 0)); }

  // Queues the steps of a launch. No position reaches `max_kv_length`.
  void launch(int64_t rows, int64_t max_kv_length);

  // Records the graph of such a launch and launches it once on rows that leave nothing, so that the next launch takes
  // as long as any. Returns whether it did, as only a GPU that replays needs it. Waits.
  bool prepare(int64_t rows, int64_t max_kv_length);

  // Measures the operations of the graph that serves such a launch, on what lies in memory now; the Chrome trace goes
  // to `file`, the table to standard error. Waits.
  void write_profile(int64_t rows, int64_t max_kv_length, const std::string& file);

 private:
  nvb_tensor part(int64_t rows, int64_t index) const {
    return nvb::tensor(static_cast<int32_t*>(inputs_.data()) + index * rows, NVB_DTYPE_I32, {rows});
  }
  int64_t length_bucket(int64_t max_kv_length) const;
  void queue_steps(int64_t rows, int64_t max_kv_length);
  void choose(const nvb_tensor& hidden, int64_t step, const nvb_tensor& positions);

  const nvb::backend& backend_;
  Session& session_;
  Sampling sampling_;
  bool cpu_;
  bool recorded_;
  uint32_t optimize_;  // the level
  std::optional<float> fp8_;
  int64_t capacity_;
  int64_t steps_;
  nvb::buffer inputs_;
  nvb::buffer logits_;                                        // F32 [rows, vocabulary]
  std::map<std::pair<int64_t, int64_t>, nvb::graph> graphs_;  // of a number of rows and a length
};

}  // namespace gemma

#endif  // GEMMA_DECODER_H
