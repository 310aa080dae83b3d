// The forward pass of Gemma 1, 2 and 3 through the library's calls.
#ifndef GEMMA_FORWARD_H
#define GEMMA_FORWARD_H

#include <cstdint>
#include <nvbackend.hpp>
#include <vector>

#include "model.h"

namespace gemma {

// Consecutive tokens of one sequence.
struct Segment {
  int32_t sequence;  // the sequence's place in the cache
  int32_t position;  // of the first token
  int32_t count;
  const int32_t* tokens;  // host memory
};

// What a pass reads for each of its tokens, I32 [tokens] in device memory.
struct Inputs {
  nvb_tensor tokens;
  nvb_tensor positions;
  nvb_tensor sequences;  // places in the cache
};

// The working memory of a model for one stream of calls: caches of keys and values, and the activations of one pass.
// Everything is allocated here, once; the passes only queue work.
class Session {
 public:
  // Caches of `sequences` sequences of up to `capacity` tokens, and passes of up to `max_tokens`. Backend and model
  // outlive the session.
  Session(const nvb::backend& backend, const Model& model, int64_t sequences, int64_t capacity, int64_t max_tokens);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  // Waits for the queued work.
  ~Session() { static_cast<void>(nvb_stream_synchronize(stream_)); }

  // Runs the layers over whole prompts or pieces of them, one segment after the other. Waits for earlier work, queues.
  void prefill(const std::vector<Segment>& segments);

  // The two parts of it, of which the second can be recorded.
  void upload(const std::vector<Segment>& segments);
  void queue_prefill(const std::vector<Segment>& segments);

  // Queues the layers over one token for each row, as `inputs` say when the stream gets there. No position reaches
  // `max_kv_length`.
  void decode(const Inputs& inputs, int64_t max_kv_length);

  // Queues the layers over `rows` consecutive tokens of each of `sequences`, I32 places in the cache, one sequence
  // after the other: 2 to 16, of which some may have position -1. No position reaches `max_kv_length`.
  void verify(const Inputs& inputs, const nvb_tensor& sequences, int64_t rows, int64_t max_kv_length);

  // Rows of the last pass after the final norm, [count, width] in the activations' dtype.
  nvb_tensor hidden(int64_t first, int64_t count) const;

  // Queues logits F32 [rows, vocabulary] of such rows, soft cap included.
  void logits(const nvb_tensor& rows, const nvb_tensor& output);

  // Calls `visit` with each buffer that holds nothing between passes.
  template <typename Visit>
  void visit_activations(const Visit& visit) const {
    for (const nvb::buffer* buffer : {&residual_, &hidden_, &qkv_, &attended_, &gated_}) visit(*buffer);
  }

  nvb::stream& stream() { return stream_; }
  const Model& model() const { return model_; }
  uint64_t cache_bytes() const {
    return (local_cache_.get() != nullptr ? local_cache_.bytes() : 0) +
           (global_cache_.get() != nullptr ? global_cache_.bytes() : 0);
  }

 private:
  // Where the keys and values of a layer of the model lie.
  struct Place {
    const nvb_kv_cache* cache;
    uint32_t layer;
  };
  Place place(size_t layer) const;
  nvb_tensor activation(const nvb::buffer& buffer, int64_t rows, int64_t columns) const;
  void linear(const nvb_tensor& input, const nvb::weight& weight, const Vector& bias, const nvb_tensor& output,
              uint32_t activation);
  void add_and_norm(const Vector& post_norm, const Vector& next_norm, int64_t rows);
  nvb_tensor rotate_and_append(const Layer& layer, int64_t index, const Inputs& inputs);
  template <typename Attend>
  void run(const Inputs& inputs, Attend attend);

  const nvb::backend& backend_;
  const Model& model_;
  nvb::stream stream_;
  nvb::kv_cache local_cache_;
  nvb::kv_cache global_cache_;
  nvb::attention local_;
  nvb::attention global_;
  float embedding_scale_;
  nvb::buffer inputs_;        // I32 [3, tokens] of a prefill: tokens, positions, sequences
  nvb::host_buffer staging_;  // the same, on the host
  nvb::buffer residual_;      // F32 [tokens, width]: the stream that each branch adds to
  nvb::buffer hidden_;        // [tokens, width]: the input of a branch, then its output
  nvb::buffer qkv_;           // [tokens, query_width + 2 · kv_width]
  nvb::buffer attended_;      // [tokens, query_width]
  nvb::buffer gated_;         // [tokens, feed_forward]
};

}  // namespace gemma

#endif  // GEMMA_FORWARD_H
