#include "generate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>

#include "error.h"
#include "forward.h"
#include "fp8.h"

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

}  // namespace

void check_request(const Request& request, const Config& config) {
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
}

namespace {

const Request& checked(const Request& request, const Config& config) {
  check_request(request, config);
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
        sequences_(request.prompts.size()),
        longest_(longest(request)),
        row_count_(Decoder::rows_for(backend, request.launching, static_cast<int64_t>(sequences_))),
        pass_tokens_(std::max(row_count_, std::min(total(request), kPrefillTokens))),
        session_(backend, model, static_cast<int64_t>(sequences_), capacity(), pass_tokens_),
        last_rows_(backend, static_cast<size_t>(row_count_ * row_bytes()), session_.stream()),
        decoder_(backend, session_, request.sampling, request.launching, row_count_, capacity()),
        ended_(sequences_, false),
        last_token_(sequences_, 0) {
    // A GPU always has the next launch queued while the host reads the tokens of the one before. The CPU executor has
    // finished when a call returns, so a second launch would only delay the text.
    depth_ = backend.device_info().kind == NVB_DEVICE_CPU ? 1 : 2;
    const int64_t numbers = (2 * decoder_.steps() + 2) * row_count_;
    for (size_t i = 0; i < depth_; ++i) {
      rings_.push_back(
          {nvb::host_buffer(backend, static_cast<size_t>(numbers) * sizeof(int32_t)), nvb::event(backend)});
    }
    set_rows();
  }

  Timing run(const LogitsSink& on_logits) {
    Timing timing;
    timing.cache_bytes = session_.cache_bytes();
    timing.prefill_tokens = total(request_);
    const auto recording_start = Clock::now();
    if (request_.max_tokens > 1 && decoder_.prepare(row_count_, next_length())) {
      timing.recording_seconds = seconds_since(recording_start);
    }
    const auto start = Clock::now();
    prefill(on_logits);
    if (request_.max_tokens > 0) {
      upload_inputs(/*with_tokens=*/true);  // the positions and sequences that the choice reads
      decoder_.choose(nvb::tensor(last_rows_.data(), model_.activation_dtype, {row_count_, model_.config.width}), 0);
      fetch_tokens(1, 0);
      finish_oldest();
    } else {
      session_.stream().synchronize();
    }
    timing.prefill_seconds = seconds_since(start);
    const auto decode_start = Clock::now();
    decode();
    const int64_t first = static_cast<int64_t>(sequences_);
    timing.decode_tokens = delivered_ - std::min(delivered_, first);
    timing.decode_seconds = seconds_since(decode_start);
    const std::string& profile = request_.launching.profile;
    if (!profile.empty()) decoder_.write_profile(row_count_, launched_length_, profile);
    return timing;
  }

 private:
  static constexpr size_t kNobody = ~size_t{0};

  // What one queued launch needs of the host, I32: its inputs as the decoder has them on the device (positions of each
  // step, sequences, tokens), and the tokens that it chose.
  struct Ring {
    nvb::host_buffer memory;
    nvb::event chosen;
  };
  struct Launch {
    std::vector<size_t> rows;  // the sequence of each row, or kNobody
    size_t ring;
    int64_t steps;  // that somebody wants
    int64_t input;  // of which step the token of the first one is
  };

  int64_t row_bytes() const {
    return model_.config.width * static_cast<int64_t>(nvb::dtype_size(model_.activation_dtype));
  }
  int64_t capacity() const { return longest_ + request_.max_tokens; }
  // No position of the next launch reaches this.
  int64_t next_length() const {
    return std::min(capacity(), longest_ + std::max<int64_t>(chosen_steps_, 1) + decoder_.steps() - 1);
  }

  // Runs all prompts, in passes of kPrefillTokens, and gathers the last row of each.
  void prefill(const LogitsSink& on_logits) {
    // Rows of nobody, too, are numbers.
    nvb::check(nvb_memory_fill(memory_, last_rows_.data(), 0, static_cast<size_t>(row_count_ * row_bytes()),
                               session_.stream()));
    std::vector<Segment> segments;
    int64_t rows = 0;
    const auto run_pass = [&] {
      if (request_.launching.fp8) {
        prefill_in_fp8(segments, rows);
      } else {
        session_.prefill(segments);
      }
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

  // Runs a pass as it is and in FP8, and tells how far the logits of its last row are apart.
  void prefill_in_fp8(const std::vector<Segment>& segments, int64_t rows) {
    const size_t vocabulary = static_cast<size_t>(model_.config.vocabulary);
    const nvb::buffer logits(backend_, vocabulary * sizeof(float), session_.stream());
    session_.upload(segments);
    nvb::graph graph(backend_);
    graph.record(session_.stream(), [&] {
      session_.queue_prefill(segments);
      session_.logits(session_.hidden(rows - 1, 1),
                      nvb::tensor(logits.data(), NVB_DTYPE_F32, {1, model_.config.vocabulary}));
    });
    nvb::check(nvb_graph_optimize(graph.get(), request_.launching.optimize, nullptr));
    std::vector<float> exact(vocabulary), found(vocabulary);
    const auto launch = [&](std::vector<float>& to) {
      graph.launch(session_.stream());
      logits.download(to.data(), vocabulary * sizeof(float), session_.stream());
      session_.stream().synchronize();
    };
    launch(exact);
    convert_fp8(graph, session_.stream(), *request_.launching.fp8, "prefill");
    launch(found);
    double squares = 0, reference = 0;
    for (size_t i = 0; i < vocabulary; ++i) {
      squares += (double{found[i]} - exact[i]) * (double{found[i]} - exact[i]);
      reference += double{exact[i]} * exact[i];
    }
    const auto best = [](const std::vector<float>& row) {
      return std::max_element(row.begin(), row.end()) - row.begin();
    };
    std::fprintf(stderr, "fp8 prefill: the last token's logits are off by %.2g of their norm, and choose %s token\n",
                 std::sqrt(squares / reference), best(exact) == best(found) ? "the same" : "another");
  }

  // Logits of the rows of the last pass, in blocks.
  void send_logits(int64_t rows, const LogitsSink& on_logits) {
    const int64_t vocabulary = model_.config.vocabulary;
    const auto bytes = [&](int64_t count) { return static_cast<size_t>(count * vocabulary) * sizeof(float); };
    const int64_t block = std::max<int64_t>(1, std::min(rows, kLogitsBytes / static_cast<int64_t>(bytes(1))));
    const nvb::buffer device(backend_, bytes(block), session_.stream());
    std::vector<float> host(static_cast<size_t>(block * vocabulary));
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t count = std::min(block, rows - first);
      session_.logits(session_.hidden(first, count), nvb::tensor(device.data(), NVB_DTYPE_F32, {count, vocabulary}));
      device.download(host.data(), bytes(count), session_.stream());
      session_.stream().synchronize();
      on_logits(host.data(), count);
    }
  }

  // Gives the sequences that go on the first rows.
  void set_rows() {
    rows_.clear();
    for (size_t i = 0; i < sequences_; ++i) {
      if (!ended_[i]) rows_.push_back(i);
    }
    rows_.resize(static_cast<size_t>(rows_for(rows_.size())), kNobody);
    row_count_ = static_cast<int64_t>(rows_.size());
  }
  int64_t rows_for(size_t sequences) const {
    return Decoder::rows_for(backend_, request_.launching, static_cast<int64_t>(sequences));
  }

  // The inputs of the next launch; tokens and sequences only where they are not on the device already.
  void upload_inputs(bool with_tokens) {
    const size_t rows = rows_.size(), steps = static_cast<size_t>(decoder_.steps());
    int32_t* const positions = static_cast<int32_t*>(rings_[next_ring_].memory.data());
    int32_t* const sequences = positions + steps * rows;
    int32_t* const tokens = sequences + rows;
    for (size_t i = 0; i < rows; ++i) {
      const bool somebody = rows_[i] != kNobody && !ended_[rows_[i]];
      for (size_t step = 0; step < steps; ++step) {
        // The newest token's: prompt tokens count from 0.
        const int64_t chosen = chosen_steps_ + static_cast<int64_t>(step);
        positions[step * rows + i] =
            somebody && chosen < request_.max_tokens
                ? static_cast<int32_t>(request_.prompts[rows_[i]].size()) + static_cast<int32_t>(chosen) - 1
                : decoder_.idle_position();
      }
      sequences[i] = rows_[i] != kNobody ? static_cast<int32_t>(rows_[i]) : 0;
      tokens[i] = rows_[i] != kNobody ? last_token_[rows_[i]] : 0;
    }
    const size_t numbers = (steps + (with_tokens ? 2 : 0)) * rows;
    nvb::check(nvb_memory_copy(memory_, decoder_.positions(row_count_, 0).data, positions, numbers * sizeof(int32_t),
                               NVB_COPY_HOST_TO_DEVICE, session_.stream()));
  }

  // Queues the copy of the tokens that were queued last, `steps` of them from the input of `input` on.
  void fetch_tokens(int64_t steps, int64_t input) {
    const int64_t all = decoder_.steps();
    Ring& ring = rings_[next_ring_];
    int32_t* const tokens = static_cast<int32_t*>(ring.memory.data()) + (all + 2) * row_count_;
    // A whole launch leaves all inputs; what was chosen from the prompts is in one.
    const int64_t first = steps == 1 ? input % all : 0, count = steps == 1 ? 1 : all;
    nvb::check(nvb_memory_copy(memory_, tokens + first * row_count_, decoder_.tokens(row_count_, first).data,
                               static_cast<size_t>(count * row_count_) * sizeof(int32_t), NVB_COPY_DEVICE_TO_HOST,
                               session_.stream()));
    ring.chosen.record(session_.stream());
    in_flight_.push_back({rows_, next_ring_, steps, input});
    next_ring_ = (next_ring_ + 1) % depth_;
    chosen_steps_ += steps;
  }

  // Waits for the oldest launch and hands out its tokens.
  void finish_oldest() {
    const Launch launch = std::move(in_flight_.front());
    in_flight_.pop_front();
    rings_[launch.ring].chosen.synchronize();
    const int64_t all = decoder_.steps(), rows = static_cast<int64_t>(launch.rows.size());
    const int32_t* const inputs = static_cast<const int32_t*>(rings_[launch.ring].memory.data()) + (all + 2) * rows;
    for (int64_t step = 0; step < launch.steps; ++step) {
      const int32_t* const tokens = inputs + (launch.input + step) % all * rows;
      ++finished_steps_;
      for (size_t i = 0; i < launch.rows.size(); ++i) {
        const size_t sequence = launch.rows[i];
        if (sequence == kNobody || ended_[sequence]) continue;  // the end became known after this was queued
        const auto& eos = model_.config.eos;
        const bool stop = request_.stop_at_eos && std::find(eos.begin(), eos.end(), tokens[i]) != eos.end();
        last_token_[sequence] = tokens[i];
        ended_[sequence] = stop || finished_steps_ == request_.max_tokens;
        ++delivered_;
        on_token_(sequence, tokens[i], ended_[sequence]);
      }
    }
  }

  void decode() {
    bool tokens_on_device = true;
    while (true) {
      const size_t live = static_cast<size_t>(std::count(ended_.begin(), ended_.end(), false));
      // What is still queued then is nobody's; the session's end waits for it.
      if (live == 0) return;
      // The rows of sequences that ended stay until fewer rows will do.
      const bool fewer = rows_for(live) < row_count_;
      if (!fewer && in_flight_.size() < depth_ && chosen_steps_ < request_.max_tokens) {
        upload_inputs(!tokens_on_device);
        tokens_on_device = true;
        launched_length_ = next_length();
        decoder_.launch(row_count_, launched_length_);
        fetch_tokens(std::min(decoder_.steps(), request_.max_tokens - chosen_steps_), 1);
      } else if (!in_flight_.empty()) {
        finish_oldest();
      } else if (chosen_steps_ < request_.max_tokens) {
        set_rows();
        tokens_on_device = false;
      } else {
        return;
      }
    }
  }

  const Request& request_;
  const TokenSink& on_token_;
  const Model& model_;
  const nvb::backend& backend_;
  nvb::memory_manager memory_;
  size_t sequences_;
  int64_t longest_;  // prompt
  int64_t row_count_;
  int64_t pass_tokens_;
  size_t depth_ = 1;
  std::vector<Ring> rings_;  // before the session, whose destructor waits for the copies that use them
  Session session_;
  nvb::buffer last_rows_;  // [rows, width]: where prefill ended
  Decoder decoder_;
  std::deque<Launch> in_flight_;
  std::vector<size_t> rows_;  // the sequence of each row, or kNobody
  std::vector<bool> ended_;
  std::vector<int32_t> last_token_;
  size_t next_ring_ = 0;
  int64_t launched_length_ = 0;  // what the last launch was told
  int64_t chosen_steps_ = 0;     // of each sequence, whose choice is queued at the least
  int64_t finished_steps_ = 0;
  int64_t delivered_ = 0;
};

}  // namespace

Timing generate(const nvb::backend& backend, const Model& model, const Request& request, const TokenSink& on_token,
                const LogitsSink& on_logits) {
  return Generator(backend, model, request, on_token).run(on_logits);
}

}  // namespace gemma
