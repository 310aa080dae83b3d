#include "speculate.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "error.h"
#include "forward.h"

namespace gemma {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens of one prefill pass.
constexpr int64_t kPrefillTokens = 4096;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t longest(const std::vector<std::vector<int32_t>>& prompts) {
  size_t length = 0;
  for (const auto& prompt : prompts) length = std::max(length, prompt.size());
  return static_cast<int64_t>(length);
}

int64_t pass_tokens(const std::vector<std::vector<int32_t>>& prompts, int64_t rows) {
  int64_t tokens = 0;
  for (const auto& prompt : prompts) tokens += static_cast<int64_t>(prompt.size());
  return std::max(rows, std::min(tokens, kPrefillTokens));
}

// Runs all prompts but for their last tokens, with which decoding begins.
void prefill(Session& session, const std::vector<std::vector<int32_t>>& prompts, int64_t pass) {
  std::vector<Segment> segments;
  int64_t rows = 0;
  const auto run_pass = [&] {
    if (rows > 0) session.prefill(segments);
    segments.clear();
    rows = 0;
  };
  for (size_t sequence = 0; sequence < prompts.size(); ++sequence) {
    const int64_t length = static_cast<int64_t>(prompts[sequence].size()) - 1;
    for (int64_t at = 0; at < length;) {
      const int64_t count = std::min(length - at, pass - rows);
      segments.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(at), static_cast<int32_t>(count),
                          prompts[sequence].data() + at});
      at += count;
      rows += count;
      if (rows == pass) run_pass();
    }
  }
  run_pass();
}

class ModelDraft : public Draft {
 public:
  ModelDraft(const nvb::backend& backend, const Model& model, const std::vector<std::vector<int32_t>>& prompts,
             const Launching& launching, int64_t max_tokens, int64_t proposals)
      : prompts_(prompts),
        proposals_(proposals),
        rows_(static_cast<int64_t>(prompts.size())),
        capacity_(longest(prompts) + max_tokens + proposals + 1),
        // A ring keeps what a pass appends beside a window: a sequence goes back by so many tokens at most.
        pass_(pass_tokens(prompts, std::max(rows_, proposals + 1))),
        memory_(backend),
        numbers_(backend, static_cast<size_t>((2 * proposals + 4) * rows_) * sizeof(int32_t)),
        session_(backend, model, rows_, capacity_, pass_),
        // A step more than proposals: the last one is appended too, in case that it is accepted.
        decoder_(backend, session_, {}, {launching.optimize, proposals + 1, {}, {}}, rows_, capacity_) {}

  void begin() override { prefill(session_, prompts_, pass_); }

  void propose(const std::vector<int32_t>& newest, const std::vector<int32_t>& positions, int64_t count,
               int32_t* proposals) override {
    if (count != proposals_) fail("the draft proposes ", proposals_, " tokens, not ", count);
    const int64_t steps = proposals_ + 1;
    int32_t* const inputs = static_cast<int32_t*>(numbers_.data());
    int32_t most = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      const int32_t position = positions[static_cast<size_t>(i)];
      for (int64_t step = 0; step < steps; ++step) {
        inputs[step * rows_ + i] = position < 0 ? -1 : position + static_cast<int32_t>(step);
      }
      inputs[steps * rows_ + i] = static_cast<int32_t>(i);
      inputs[(steps + 1) * rows_ + i] = newest[static_cast<size_t>(i)];
      most = std::max(most, position);
    }
    nvb_stream* const stream = session_.stream();
    nvb::check(nvb_memory_copy(memory_, decoder_.positions(rows_, 0).data, inputs,
                               static_cast<size_t>((steps + 2) * rows_) * sizeof(int32_t), NVB_COPY_HOST_TO_DEVICE,
                               stream));
    decoder_.launch(rows_, most + steps);
    // Step by step, where the caller wants sequence by sequence.
    nvb::check(nvb_memory_copy(memory_, inputs, decoder_.tokens(rows_, 1).data,
                               static_cast<size_t>(proposals_ * rows_) * sizeof(int32_t), NVB_COPY_DEVICE_TO_HOST,
                               stream));
    session_.stream().synchronize();
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t step = 0; step < proposals_; ++step) proposals[i * proposals_ + step] = inputs[step * rows_ + i];
    }
  }

 private:
  const std::vector<std::vector<int32_t>>& prompts_;
  int64_t proposals_;
  int64_t rows_;
  int64_t capacity_;
  int64_t pass_;
  nvb::memory_manager memory_;
  nvb::host_buffer numbers_;  // before the session, whose destructor waits for the copies that use it
  Session session_;
  Decoder decoder_;
};

class TextDraft : public Draft {
 public:
  TextDraft(std::vector<std::vector<int32_t>> texts, const std::vector<std::vector<int32_t>>& prompts, double right,
            int64_t vocabulary)
      : texts_(std::move(texts)), prompts_(prompts), right_(right), vocabulary_(vocabulary) {}

  void begin() override {}

  void propose(const std::vector<int32_t>&, const std::vector<int32_t>& positions, int64_t count,
               int32_t* proposals) override {
    for (size_t i = 0; i < texts_.size(); ++i) {
      // The token behind the newest, counted from the first behind the prompt.
      const int64_t first = positions[i] + 1 - static_cast<int64_t>(prompts_[i].size());
      for (int64_t step = 0; step < count; ++step) {
        const size_t at = static_cast<size_t>(std::max<int64_t>(first + step, 0));
        const int32_t known = at < texts_[i].size() ? texts_[i][at] : 0;
        const bool right = std::uniform_real_distribution<double>()(random_) < right_;
        proposals[static_cast<int64_t>(i) * count + step] =
            right ? known : static_cast<int32_t>((known + 1) % vocabulary_);
      }
    }
  }

 private:
  std::vector<std::vector<int32_t>> texts_;
  const std::vector<std::vector<int32_t>>& prompts_;
  double right_;
  int64_t vocabulary_;
  std::mt19937_64 random_{1};
};

// The passes of the model over the newest token and the proposals of each sequence, whose choices come to the host.
class Verifier {
 public:
  Verifier(const nvb::backend& backend, const Model& model, const Request& request, int64_t proposals)
      : backend_(backend),
        sequences_(static_cast<int64_t>(request.prompts.size())),
        rows_(proposals + 1),
        optimize_(request.launching.optimize),
        capacity_(longest(request.prompts) + request.max_tokens + rows_),
        pass_(pass_tokens(request.prompts, sequences_ * rows_)),
        memory_(backend),
        numbers_(backend, static_cast<size_t>(numbers()) * sizeof(int32_t)),
        session_(backend, model, sequences_, capacity_, pass_),
        inputs_(backend, numbers_.size(), session_.stream()),
        logits_(backend, static_cast<size_t>(sequences_ * rows_ * model.config.vocabulary) * sizeof(float),
                session_.stream()) {
    for (int64_t i = 0; i < sequences_ * rows_; ++i) of_row()[i] = static_cast<int32_t>(i / rows_);
    for (int64_t i = 0; i < sequences_; ++i) of_sequence()[i] = static_cast<int32_t>(i);
  }

  void begin(const std::vector<std::vector<int32_t>>& prompts) {
    prefill(session_, prompts, pass_);
    session_.stream().synchronize();
  }

  // [sequences, rows], to be filled in before a pass.
  int32_t* tokens() { return static_cast<int32_t*>(numbers_.data()); }
  int32_t* positions() { return tokens() + sequences_ * rows_; }
  // The choice behind each row, after it.
  const int32_t* chosen() { return positions() + 2 * sequences_ * rows_ + sequences_; }

  // Runs the rows, of which none stands at `max_kv_length` or behind, and waits for the choices.
  void run(int64_t max_kv_length) {
    nvb_stream* const stream = session_.stream();
    const int64_t given = numbers() - sequences_ * rows_;
    nvb::check(nvb_memory_copy(memory_, inputs_.data(), numbers_.data(), static_cast<size_t>(given) * sizeof(int32_t),
                               NVB_COPY_HOST_TO_DEVICE, stream));
    if (optimize_ == 0) {
      queue(max_kv_length);
    } else {
      // A graph for each power of two of the length, which attention divides its work by.
      int64_t length = 512;
      while (length < max_kv_length) length *= 2;
      length = std::min(length, capacity_);
      nvb::graph& graph = graphs_[length];
      if (graph.get() == nullptr) {
        nvb::graph recorded(backend_);
        recorded.record(session_.stream(), [&] { queue(length); });
        nvb::check(nvb_graph_optimize(recorded.get(), optimize_, nullptr));
        graph = std::move(recorded);
      }
      graph.launch(session_.stream());
    }
    nvb::check(nvb_memory_copy(memory_, tokens() + given, part(given, 0).data,
                               static_cast<size_t>(sequences_ * rows_) * sizeof(int32_t), NVB_COPY_DEVICE_TO_HOST,
                               stream));
    session_.stream().synchronize();
  }

  uint64_t cache_bytes() const { return session_.cache_bytes(); }

 private:
  // Tokens, positions and sequences of the rows, the sequences themselves, and the choices.
  int64_t numbers() const { return 4 * sequences_ * rows_ + sequences_; }
  int32_t* of_row() { return tokens() + 2 * sequences_ * rows_; }
  int32_t* of_sequence() { return tokens() + 3 * sequences_ * rows_; }
  nvb_tensor part(int64_t first, int64_t count) const {
    return nvb::tensor(static_cast<int32_t*>(inputs_.data()) + first, NVB_DTYPE_I32, {count});
  }

  void queue(int64_t max_kv_length) {
    const int64_t rows = sequences_ * rows_;
    const Inputs inputs{part(0, rows), part(rows, rows), part(2 * rows, rows)};
    session_.verify(inputs, part(3 * rows, sequences_), rows_, max_kv_length);
    const nvb_tensor logits = nvb::tensor(logits_.data(), NVB_DTYPE_F32, {rows, session_.model().config.vocabulary});
    session_.logits(session_.hidden(0, rows), logits);
    auto args = nvb::make<nvb_argmax_args>();
    args.logits = logits;
    args.tokens = part(3 * rows + sequences_, rows);
    nvb::argmax(backend_, args, session_.stream());
  }

  const nvb::backend& backend_;
  int64_t sequences_;
  int64_t rows_;  // of a sequence
  uint32_t optimize_;
  int64_t capacity_;
  int64_t pass_;
  nvb::memory_manager memory_;
  nvb::host_buffer numbers_;  // before the session, whose destructor waits for the copies that use it
  Session session_;
  nvb::buffer inputs_;
  nvb::buffer logits_;  // F32 [sequences * rows, vocabulary]
  std::map<int64_t, nvb::graph> graphs_;
};

}  // namespace

std::unique_ptr<Draft> draft_by_model(const nvb::backend& backend, const Model& model,
                                      const std::vector<std::vector<int32_t>>& prompts, const Launching& launching,
                                      int64_t max_tokens, int64_t proposals) {
  return std::make_unique<ModelDraft>(backend, model, prompts, launching, max_tokens, proposals);
}

std::unique_ptr<Draft> draft_by_text(std::vector<std::vector<int32_t>> texts,
                                     const std::vector<std::vector<int32_t>>& prompts, double right,
                                     int64_t vocabulary) {
  return std::make_unique<TextDraft>(std::move(texts), prompts, right, vocabulary);
}

Speculated speculate(const nvb::backend& backend, const Model& model, const Request& request, Draft& draft,
                     int64_t proposals, const TokenSink& on_token) {
  check_request(request, model.config);
  if (request.sampling.temperature > 0) fail("a draft goes with the most probable token: --temperature 0");
  if (proposals < 1 || proposals > kMaxProposals) {
    fail("a draft proposes 1 to ", kMaxProposals, " tokens a pass, not ", proposals);
  }
  const size_t sequences = request.prompts.size();
  const size_t rows = static_cast<size_t>(proposals) + 1;
  Verifier verifier(backend, model, request, proposals);
  Speculated result;
  result.timing.cache_bytes = verifier.cache_bytes();
  for (const auto& prompt : request.prompts) result.timing.prefill_tokens += static_cast<int64_t>(prompt.size());
  const auto start = Clock::now();
  draft.begin();
  verifier.begin(request.prompts);
  result.timing.prefill_seconds = seconds_since(start);

  // The newest token of each sequence, whose key no cache has yet, and how many were delivered.
  std::vector<int32_t> newest(sequences), positions(sequences), proposed(sequences * static_cast<size_t>(proposals));
  std::vector<int64_t> delivered(sequences, 0);
  for (size_t i = 0; i < sequences; ++i) {
    newest[i] = request.prompts[i].back();
    positions[i] = request.max_tokens > 0 ? static_cast<int32_t>(request.prompts[i].size()) - 1 : -1;
  }
  const auto decode_start = Clock::now();
  const auto& eos = model.config.eos;
  while (std::any_of(positions.begin(), positions.end(), [](int32_t position) { return position >= 0; })) {
    const auto draft_start = Clock::now();
    draft.propose(newest, positions, proposals, proposed.data());
    result.draft_seconds += seconds_since(draft_start);
    int32_t most = 0;
    for (size_t i = 0; i < sequences; ++i) {
      for (size_t row = 0; row < rows; ++row) {
        // No more rows than tokens are wanted.
        const bool wanted = positions[i] >= 0 && delivered[i] + static_cast<int64_t>(row) < request.max_tokens;
        const int32_t position = wanted ? positions[i] + static_cast<int32_t>(row) : -1;
        const int32_t token = row == 0 ? newest[i] : proposed[i * (rows - 1) + row - 1];
        // A draft's tokens are its own; the table is the model's.
        verifier.tokens()[i * rows + row] = token >= 0 && token < model.config.vocabulary ? token : 0;
        verifier.positions()[i * rows + row] = position;
        most = std::max(most, position);
      }
    }
    verifier.run(most + 1);
    ++result.passes;
    for (size_t i = 0; i < sequences; ++i) {
      if (positions[i] < 0) continue;
      result.proposed += proposals;
      // The choice behind a row counts as long as all rows before it were right.
      for (size_t row = 0; positions[i] >= 0; ++row) {
        const int32_t token = verifier.chosen()[i * rows + row];
        const bool stop = request.stop_at_eos && std::find(eos.begin(), eos.end(), token) != eos.end();
        const bool last = stop || ++delivered[i] == request.max_tokens;
        if (stop) ++delivered[i];
        newest[i] = token;
        positions[i] = last ? -1 : positions[i] + 1;
        ++result.timing.decode_tokens;
        on_token(i, token, last);
        if (last || row + 1 == rows || verifier.tokens()[i * rows + row + 1] != token) break;
        ++result.accepted;
      }
    }
  }
  result.timing.decode_seconds = seconds_since(decode_start);
  return result;
}

}  // namespace gemma
