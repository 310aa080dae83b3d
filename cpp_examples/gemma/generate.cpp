#include "generate.h"

#include <algorithm>
#include <chrono>
#include <deque>

#include "error.h"
#include "forward.h"

namespace gemma {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens of one prefill pass. Products are at full speed long before; more would only need more memory.
constexpr int64_t kPrefillTokens = 4096;
// Host memory for the logits of prompt tokens.
constexpr int64_t kLogitsBytes = 256 << 20;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t longest(const Request& request) {
  size_t length = 0;
  for (const auto& prompt : request.prompts) length = std::max(length, prompt.size());
  return static_cast<int64_t>(length);
}

int64_t total(const Request& request) {
  int64_t tokens = 0;
  for (const auto& prompt : request.prompts) tokens += static_cast<int64_t>(prompt.size());
  return tokens;
}

const Request& checked(const Request& request, const Config& config) {
  if (request.prompts.empty()) fail("there is no prompt");
  for (const auto& prompt : request.prompts) {
    if (prompt.empty()) fail("a prompt has no tokens");
    for (const int32_t token : prompt) {
      if (token < 0 || token >= config.vocabulary) {
        fail("token ", token, " of a prompt is outside the vocabulary of ", config.vocabulary);
      }
    }
  }
  const int64_t length = longest(request);
  if (length > config.max_positions || request.max_tokens > config.max_positions - length) {
    fail("a prompt of ", length, " tokens and ", request.max_tokens, " new ones need ", length + request.max_tokens,
         " positions; the model has ", config.max_positions, " (max_position_embeddings)");
  }
  return request;
}

class Generator {
 public:
  Generator(const nvb::backend& backend, const Model& model, const Request& request, const TokenSink& on_token)
      : request_(checked(request, model.config)),
        on_token_(on_token),
        model_(model),
        backend_(backend),
        memory_(backend),
        sequences_(static_cast<int64_t>(request.prompts.size())),
        longest_(longest(request)),
        pass_tokens_(std::max(sequences_, std::min(total(request), kPrefillTokens))),
        session_(backend, model, sequences_, longest_ + request.max_tokens, pass_tokens_),
        last_rows_(backend, static_cast<size_t>(sequences_ * row_bytes()), session_.stream()),
        logit_rows_(backend, logits_bytes(sequences_), session_.stream()),
        ended_(request.prompts.size(), false),
        last_token_(request.prompts.size(), 0) {
    // A GPU always has the next step queued while the host reads the tokens of the one before. The CPU executor has
    // finished when a call returns, so a second step would only delay the text.
    depth_ = backend.device_info().kind == NVB_DEVICE_CPU ? 1 : 2;
    for (size_t i = 0; i < depth_; ++i) {
      rings_.push_back(
          {nvb::host_buffer(backend, static_cast<size_t>(4 * sequences_) * sizeof(int32_t)), nvb::event(backend)});
    }
    for (size_t i = 0; i < request.prompts.size(); ++i) live_.push_back(i);
  }

  Timing run(const LogitsSink& on_logits) {
    Timing timing;
    timing.cache_bytes = session_.cache_bytes();
    timing.prefill_tokens = total(request_);
    const auto start = Clock::now();
    prefill(on_logits);
    if (request_.max_tokens > 0) {
      upload_inputs(/*with_tokens=*/true);  // the positions and sequences that sampling reads
      sample(nvb::tensor(last_rows_.data(), model_.activation_dtype, {sequences_, model_.config.width}));
      finish_oldest();
    } else {
      session_.stream().synchronize();
    }
    timing.prefill_seconds = seconds_since(start);
    const auto decode_start = Clock::now();
    decode();
    timing.decode_tokens = delivered_ - std::min(delivered_, sequences_);
    timing.decode_seconds = seconds_since(decode_start);
    return timing;
  }

 private:
  // What one queued step needs of the host: I32 [tokens, positions, sequences, sampled tokens] of `rows` each.
  struct Ring {
    nvb::host_buffer memory;
    nvb::event sampled;
  };
  struct Step {
    std::vector<size_t> rows;  // the sequence of each row
    size_t ring;
  };

  int64_t row_bytes() const {
    return model_.config.width * static_cast<int64_t>(nvb::dtype_size(model_.activation_dtype));
  }
  size_t logits_bytes(int64_t rows) const {
    return static_cast<size_t>(rows * model_.config.vocabulary) * sizeof(float);
  }
  nvb_tensor logits_tensor(const nvb::buffer& buffer, int64_t rows) const {
    return nvb::tensor(buffer.data(), NVB_DTYPE_F32, {rows, model_.config.vocabulary});
  }
  size_t ring_of(int64_t step) const { return static_cast<size_t>(step) % depth_; }
  int32_t* host(size_t ring, size_t index) const {
    return static_cast<int32_t*>(rings_[ring].memory.data()) + index * live_.size();
  }

  // Runs all prompts, in passes of kPrefillTokens, and gathers the last row of each.
  void prefill(const LogitsSink& on_logits) {
    std::vector<Segment> segments;
    int64_t rows = 0;
    const auto run_pass = [&] {
      session_.prefill(segments);
      int64_t end = 0;
      for (const Segment& segment : segments) {
        end += segment.count;
        const size_t sequence = static_cast<size_t>(segment.sequence);
        if (segment.position + segment.count < static_cast<int32_t>(request_.prompts[sequence].size())) continue;
        char* row = static_cast<char*>(last_rows_.data()) + segment.sequence * row_bytes();
        nvb::check(nvb_memory_copy(memory_, row, session_.hidden(end - 1, 1).data, static_cast<size_t>(row_bytes()),
                                   NVB_COPY_DEVICE_TO_DEVICE, session_.stream()));
      }
      if (on_logits) send_logits(rows, on_logits);
      segments.clear();
      rows = 0;
    };
    for (size_t sequence = 0; sequence < request_.prompts.size(); ++sequence) {
      const auto& prompt = request_.prompts[sequence];
      const int64_t length = static_cast<int64_t>(prompt.size());
      for (int64_t at = 0; at < length;) {
        const int64_t count = std::min(length - at, pass_tokens_ - rows);
        segments.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(at), static_cast<int32_t>(count),
                            prompt.data() + at});
        at += count;
        rows += count;
        if (rows == pass_tokens_) run_pass();
      }
    }
    if (rows > 0) run_pass();
  }

  // Logits of the rows of the last pass, in blocks.
  void send_logits(int64_t rows, const LogitsSink& on_logits) {
    const int64_t block = std::max<int64_t>(1, std::min(rows, kLogitsBytes / static_cast<int64_t>(logits_bytes(1))));
    const nvb::buffer device(backend_, logits_bytes(block), session_.stream());
    std::vector<float> host(static_cast<size_t>(block * model_.config.vocabulary));
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t count = std::min(block, rows - first);
      session_.logits(session_.hidden(first, count), logits_tensor(device, count));
      device.download(host.data(), logits_bytes(count), session_.stream());
      session_.stream().synchronize();
      on_logits(host.data(), count);
    }
  }

  // The inputs of the next step; its tokens only where they are not on the device already.
  void upload_inputs(bool with_tokens) {
    const size_t rows = live_.size();
    const size_t ring = ring_of(sampled_steps_);
    for (size_t i = 0; i < rows; ++i) {
      const size_t sequence = live_[i];
      host(ring, 0)[i] = last_token_[sequence];
      // The newest token's: prompt tokens count from 0.
      host(ring, 1)[i] =
          static_cast<int32_t>(request_.prompts[sequence].size() + static_cast<size_t>(sampled_steps_)) - 1;
      host(ring, 2)[i] = static_cast<int32_t>(sequence);
    }
    const nvb_tensor target = with_tokens ? session_.tokens(live_rows()) : session_.positions(live_rows());
    nvb::check(nvb_memory_copy(memory_, target.data, host(ring, with_tokens ? 0 : 1),
                               (with_tokens ? 3 : 1) * rows * sizeof(int32_t), NVB_COPY_HOST_TO_DEVICE,
                               session_.stream()));
  }

  int64_t live_rows() const { return static_cast<int64_t>(live_.size()); }

  // Queues the choice of a token for each row: into the next step's input on the device, and to the host.
  void sample(const nvb_tensor& hidden) {
    const int64_t rows = live_rows();
    const nvb_tensor logits = logits_tensor(logit_rows_, rows);
    session_.logits(hidden, logits);
    const nvb_tensor tokens = session_.tokens(rows);
    if (request_.temperature > 0) {
      auto args = nvb::make<nvb_sample_args>();
      args.logits = logits;
      args.tokens = tokens;
      // A draw depends on the sequence and the position alone, not on who else is in the batch.
      args.sequences = session_.sequences(rows);
      args.positions = session_.positions(rows);
      args.temperature = request_.temperature;
      args.top_k = request_.top_k;
      args.top_p = request_.top_p;
      args.seed = request_.seed;
      nvb::sample(backend_, args, session_.stream());
    } else {
      auto args = nvb::make<nvb_argmax_args>();
      args.logits = logits;
      args.tokens = tokens;
      nvb::argmax(backend_, args, session_.stream());
    }
    const size_t ring = ring_of(sampled_steps_);
    nvb::check(nvb_memory_copy(memory_, host(ring, 3), tokens.data, live_.size() * sizeof(int32_t),
                               NVB_COPY_DEVICE_TO_HOST, session_.stream()));
    rings_[ring].sampled.record(session_.stream());
    in_flight_.push_back({live_, ring});
    ++sampled_steps_;
  }

  // Waits for the oldest queued step and hands out its tokens.
  void finish_oldest() {
    const Step step = std::move(in_flight_.front());
    in_flight_.pop_front();
    rings_[step.ring].sampled.synchronize();
    ++finished_steps_;
    const int32_t* tokens = static_cast<const int32_t*>(rings_[step.ring].memory.data()) + 3 * step.rows.size();
    for (size_t i = 0; i < step.rows.size(); ++i) {
      const size_t sequence = step.rows[i];
      if (ended_[sequence]) continue;  // its end became known after this step was queued
      const auto& eos = model_.config.eos;
      const bool stop = request_.stop_at_eos && std::find(eos.begin(), eos.end(), tokens[i]) != eos.end();
      last_token_[sequence] = tokens[i];
      ended_[sequence] = stop || finished_steps_ == request_.max_tokens;
      ++delivered_;
      on_token_(sequence, tokens[i], ended_[sequence]);
    }
  }

  void decode() {
    bool tokens_on_device = true;
    while (true) {
      const bool someone_ended = std::any_of(live_.begin(), live_.end(), [this](size_t i) { return ended_[i]; });
      if (!someone_ended && in_flight_.size() < depth_ && sampled_steps_ < request_.max_tokens) {
        upload_inputs(!tokens_on_device);
        tokens_on_device = true;
        session_.decode(live_rows(), longest_ + sampled_steps_);
        sample(session_.hidden(0, live_rows()));
      } else if (!in_flight_.empty()) {
        finish_oldest();
      } else {
        // Sequences that ended leave the batch; the others move up.
        live_.erase(std::remove_if(live_.begin(), live_.end(), [this](size_t i) { return ended_[i]; }), live_.end());
        tokens_on_device = false;
        if (live_.empty() || sampled_steps_ >= request_.max_tokens) return;
      }
    }
  }

  const Request& request_;
  const TokenSink& on_token_;
  const Model& model_;
  const nvb::backend& backend_;
  nvb::memory_manager memory_;
  int64_t sequences_;
  int64_t longest_;  // prompt
  int64_t pass_tokens_;
  size_t depth_ = 1;
  std::vector<Ring> rings_;  // before the session, whose destructor waits for the copies that use them
  Session session_;
  nvb::buffer last_rows_;   // [sequences, width]: where prefill ended
  nvb::buffer logit_rows_;  // F32 [sequences, vocabulary]
  std::deque<Step> in_flight_;
  std::vector<size_t> live_;  // the sequence of each row
  std::vector<bool> ended_;
  std::vector<int32_t> last_token_;
  int64_t sampled_steps_ = 0;
  int64_t finished_steps_ = 0;
  int64_t delivered_ = 0;
};

}  // namespace

Timing generate(const nvb::backend& backend, const Model& model, const Request& request, const TokenSink& on_token,
                const LogitsSink& on_logits) {
  return Generator(backend, model, request, on_token).run(on_logits);
}

}  // namespace gemma
