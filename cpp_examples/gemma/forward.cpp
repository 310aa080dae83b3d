#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"

namespace gemma {
namespace {

// Rounded to nearest even.
float round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

nvb::attention make_attention(const nvb::backend& backend, const Config& config, int64_t window) {
  auto options = nvb::make<nvb_attention_options>();
  options.query_heads = static_cast<uint32_t>(config.query_heads);
  options.kv_heads = static_cast<uint32_t>(config.kv_heads);
  options.head_dim = static_cast<uint32_t>(config.head_dim);
  options.window = static_cast<uint32_t>(window);
  options.scale = config.attention_scale;
  options.soft_cap = config.attention_soft_cap;
  return nvb::attention(backend, options);
}

// The cache of the local layers or of the others, empty if the model has none of them. What a local layer no longer
// sees need not be kept: its cache is a ring of a window's tokens and those of one pass.
nvb::kv_cache make_cache(const nvb::backend& backend, const Model& model, int64_t sequences, int64_t capacity,
                         int64_t max_tokens, bool local) {
  const std::vector<bool>& kinds = model.config.local;
  auto options = nvb::make<nvb_kv_cache_options>();
  options.layers = static_cast<uint32_t>(std::count(kinds.begin(), kinds.end(), local));
  if (options.layers == 0) return nvb::kv_cache();
  if (local) {
    options.window = static_cast<uint32_t>(model.config.window);
    options.max_append = static_cast<uint32_t>(max_tokens);
  }
  options.sequences = static_cast<uint32_t>(sequences);
  options.kv_heads = static_cast<uint32_t>(model.config.kv_heads);
  options.head_dim = static_cast<uint32_t>(model.config.head_dim);
  options.capacity = static_cast<uint32_t>(capacity);
  const uint32_t activations = model.activation_dtype;
  options.dtype = model.kv_dtypes.key != 0 ? model.kv_dtypes.key : activations;
  options.value_dtype = model.kv_dtypes.value;
  const bool other_float =
      options.dtype == NVB_DTYPE_F32 || options.dtype == NVB_DTYPE_F16 || options.dtype == NVB_DTYPE_BF16;
  if (options.dtype != activations && other_float && activations != NVB_DTYPE_F32) {
    fail("--kv-dtype must name bf16, fp8, int8, q8_0 or q4_0 for keys here: this model computes in BF16");
  }
  return nvb::kv_cache(backend, options);
}

// The heads [first, first + heads) of each token's row of `row_heads` heads.
nvb_tensor head_slice(const nvb_tensor& rows, int64_t first, int64_t heads, int64_t head_dim) {
  char* data = static_cast<char*>(rows.data) + static_cast<size_t>(first * head_dim) * nvb::dtype_size(rows.dtype);
  return nvb::tensor(data, rows.dtype, {rows.shape[0], heads, head_dim}, {rows.shape[1], head_dim, 1});
}

}  // namespace

Session::Session(const nvb::backend& backend, const Model& model, int64_t sequences, int64_t capacity,
                 int64_t max_tokens)
    : backend_(backend),
      model_(model),
      stream_(backend),
      local_cache_(make_cache(backend, model, sequences, capacity, max_tokens, true)),
      global_cache_(make_cache(backend, model, sequences, capacity, max_tokens, false)),
      local_(make_attention(backend, model.config, model.config.window)),
      global_(make_attention(backend, model.config, 0)),
      embedding_scale_(std::sqrt(static_cast<float>(model.config.width))) {
  const Config& config = model.config;
  // transformers rounds √width to the dtype that it computes in.
  if (model.activation_dtype == NVB_DTYPE_BF16) embedding_scale_ = round_to_bf16(embedding_scale_);
  const size_t tokens = static_cast<size_t>(max_tokens);
  const auto allocate = [&](int64_t columns, uint32_t dtype) {
    return nvb::buffer(backend, tokens * static_cast<size_t>(columns) * nvb::dtype_size(dtype), stream_);
  };
  inputs_ = allocate(3, NVB_DTYPE_I32);
  staging_ = nvb::host_buffer(backend, inputs_.size());
  residual_ = allocate(config.width, NVB_DTYPE_F32);
  hidden_ = allocate(config.width, model.activation_dtype);
  qkv_ = allocate(config.qkv_width(), model.activation_dtype);
  attended_ = allocate(config.query_width(), model.activation_dtype);
  gated_ = allocate(config.feed_forward, model.activation_dtype);
}

Session::Place Session::place(size_t layer) const {
  const std::vector<bool>& kinds = model_.config.local;
  const auto end = kinds.begin() + static_cast<std::ptrdiff_t>(layer);
  return Place{kinds[layer] ? local_cache_.get() : global_cache_.get(),
               static_cast<uint32_t>(std::count(kinds.begin(), end, kinds[layer]))};
}

nvb_tensor Session::activation(const nvb::buffer& buffer, int64_t rows, int64_t columns) const {
  return nvb::tensor(buffer.data(), model_.activation_dtype, {rows, columns});
}

nvb_tensor Session::hidden(int64_t first, int64_t count) const {
  nvb_tensor rows = activation(hidden_, count, model_.config.width);
  rows.data = static_cast<char*>(rows.data) +
              static_cast<size_t>(first * model_.config.width) * nvb::dtype_size(model_.activation_dtype);
  return rows;
}

void Session::linear(const nvb_tensor& input, const nvb::weight& weight, const Vector& bias, const nvb_tensor& output,
                     uint32_t activation) {
  auto args = nvb::make<nvb_linear_args>();
  args.input = input;
  args.weight = weight;
  args.bias = bias.tensor;
  args.output = output;
  args.activation = activation;
  nvb::linear(backend_, args, stream_);
}

// residual += norm(hidden, post_norm), or hidden itself where there is no such norm; hidden = norm(residual,
// next_norm).
void Session::add_and_norm(const Vector& post_norm, const Vector& next_norm, int64_t rows) {
  auto args = nvb::make<nvb_rms_norm_args>();
  args.input = args.output = hidden(0, rows);
  args.post_weight = post_norm.tensor;
  args.residual = args.residual_output = nvb::tensor(residual_.data(), NVB_DTYPE_F32, {rows, model_.config.width});
  args.weight = next_norm.tensor;
  args.epsilon = model_.config.epsilon;
  args.weight_offset = model_.config.norm_offset;
  nvb::rms_norm(backend_, args, stream_);
}

// Norms (Gemma 3) and rotates the queries and keys where they lie in the row that the product wrote, and appends keys
// and values to the cache. Returns the queries.
nvb_tensor Session::rotate_and_append(const Layer& layer, int64_t index, const Inputs& inputs) {
  const Config& config = model_.config;
  const int64_t rows = inputs.tokens.shape[0];
  const Rope& rope = config.local[static_cast<size_t>(index)] ? config.local_rope : config.global_rope;
  const nvb_tensor qkv = activation(qkv_, rows, config.qkv_width());
  auto args = nvb::make<nvb_rope_args>();
  args.query = args.query_output = head_slice(qkv, 0, config.query_heads, config.head_dim);
  args.key = head_slice(qkv, config.query_heads, config.kv_heads, config.head_dim);
  args.value = head_slice(qkv, config.query_heads + config.kv_heads, config.kv_heads, config.head_dim);
  args.query_norm = layer.query_norm.tensor;
  args.key_norm = layer.key_norm.tensor;
  args.positions = inputs.positions;
  args.sequences = inputs.sequences;
  const Place place = this->place(static_cast<size_t>(index));
  args.cache = place.cache;
  args.layer = place.layer;
  args.base = rope.base;
  args.position_scale = rope.position_scale;
  args.epsilon = config.epsilon;
  args.weight_offset = config.norm_offset;
  nvb::rope(backend_, args, stream_);
  return args.query;
}

// All layers. `attend(attention, place, query, output)` is what prefill and decode differ in.
template <typename Attend>
void Session::run(const Inputs& inputs, Attend attend) {
  const Config& config = model_.config;
  const int64_t rows = inputs.tokens.shape[0];
  const Vector none;
  auto embedding = nvb::make<nvb_embedding_args>();
  embedding.tokens = inputs.tokens;
  embedding.table = model_.embedding;
  embedding.output = nvb::tensor(residual_.data(), NVB_DTYPE_F32, {rows, config.width});
  embedding.scale = embedding_scale_;
  nvb::embedding(backend_, embedding, stream_);

  auto first_norm = nvb::make<nvb_rms_norm_args>();
  first_norm.input = embedding.output;
  first_norm.weight = model_.layers.front().input_norm.tensor;
  first_norm.output = hidden(0, rows);
  first_norm.epsilon = config.epsilon;
  first_norm.weight_offset = config.norm_offset;
  nvb::rms_norm(backend_, first_norm, stream_);

  for (size_t i = 0; i < model_.layers.size(); ++i) {
    const Layer& layer = model_.layers[i];
    const nvb_tensor qkv = activation(qkv_, rows, config.qkv_width());
    const nvb_tensor attended = activation(attended_, rows, config.query_width());
    const nvb_tensor gated = activation(gated_, rows, config.feed_forward);

    linear(hidden(0, rows), layer.query_key_value, layer.query_key_value_bias, qkv, NVB_ACTIVATION_NONE);
    const nvb_tensor query = rotate_and_append(layer, static_cast<int64_t>(i), inputs);
    attend(config.local[i] ? local_ : global_, place(i), query,
           head_slice(attended, 0, config.query_heads, config.head_dim));
    linear(attended, layer.output, layer.output_bias, hidden(0, rows), NVB_ACTIVATION_NONE);
    add_and_norm(layer.post_attention_norm, layer.pre_feed_forward_norm, rows);

    linear(hidden(0, rows), layer.gate_up, none, gated, config.activation);
    linear(gated, layer.down, none, hidden(0, rows), NVB_ACTIVATION_NONE);
    const bool last = i + 1 == model_.layers.size();
    add_and_norm(layer.post_feed_forward_norm, last ? model_.final_norm : model_.layers[i + 1].input_norm, rows);
  }
}

void Session::prefill(const std::vector<Segment>& segments) {
  upload(segments);
  queue_prefill(segments);
}

void Session::upload(const std::vector<Segment>& segments) {
  int64_t rows = 0;
  for (const Segment& segment : segments) rows += segment.count;
  stream_.synchronize();  // an earlier copy may still be reading the staging memory
  int32_t* token = static_cast<int32_t*>(staging_.data());
  int32_t* position = token + rows;
  int32_t* sequence = position + rows;
  for (const Segment& segment : segments) {
    for (int32_t i = 0; i < segment.count; ++i) {
      *token++ = segment.tokens[i];
      *position++ = segment.position + i;
      *sequence++ = segment.sequence;
    }
  }
  inputs_.upload(staging_.data(), static_cast<size_t>(3 * rows) * sizeof(int32_t), stream_);
}

void Session::queue_prefill(const std::vector<Segment>& segments) {
  std::vector<int32_t> query_starts = {0}, sequence_numbers, kv_lengths;
  for (const Segment& segment : segments) {
    query_starts.push_back(query_starts.back() + segment.count);
    sequence_numbers.push_back(segment.sequence);
    kv_lengths.push_back(segment.position + segment.count);
  }
  const int64_t rows = query_starts.back();
  const auto input = [&](int64_t index) {
    return nvb::tensor(static_cast<int32_t*>(inputs_.data()) + index * rows, NVB_DTYPE_I32, {rows});
  };

  run({input(0), input(1), input(2)},
      [&](const nvb::attention& attention, Place place, const nvb_tensor& query, const nvb_tensor& output) {
        auto args = nvb::make<nvb_attention_prefill_args>();
        args.query = query;
        args.output = output;
        args.query_starts = query_starts.data();
        args.sequence_count = segments.size();
        args.cache = place.cache;
        args.layer = place.layer;
        args.sequences = sequence_numbers.data();
        args.kv_lengths = kv_lengths.data();
        attention.prefill(args, stream_);
      });
}

void Session::decode(const Inputs& inputs, int64_t max_kv_length) {
  verify(inputs, inputs.sequences, 1, max_kv_length);
}

void Session::verify(const Inputs& inputs, const nvb_tensor& sequences, int64_t rows, int64_t max_kv_length) {
  run(inputs, [&](const nvb::attention& attention, Place place, const nvb_tensor& query, const nvb_tensor& output) {
    auto args = nvb::make<nvb_attention_decode_args>();
    args.query = query;
    args.output = output;
    args.cache = place.cache;
    args.layer = place.layer;
    args.positions = inputs.positions;
    args.sequences = sequences;
    args.rows_per_sequence = static_cast<uint32_t>(rows);
    args.max_kv_length = static_cast<uint32_t>(max_kv_length);
    attention.decode(args, stream_);
  });
}

void Session::logits(const nvb_tensor& rows, const nvb_tensor& output) {
  linear(rows, model_.head.get() != nullptr ? model_.head : model_.embedding, Vector(), output, NVB_ACTIVATION_NONE);
  if (model_.config.logit_soft_cap == 0) return;
  auto cap = nvb::make<nvb_elementwise_args>();
  cap.input = cap.output = output;
  cap.factor = model_.config.logit_soft_cap;
  nvb::soft_cap(backend_, cap, stream_);
}

}  // namespace gemma
