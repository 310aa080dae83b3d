#include "tensor_names.h"

#include "error.h"

namespace gemma {
namespace {

// llama.cpp's names, of which Gemma 3 uses these: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py.
TensorNames gguf_names() {
  TensorNames names;
  names.embedding = "token_embd";
  names.final_norm = "output_norm";
  names.head = "output";
  names.layers = "blk.";
  names.input_norm = "attn_norm";
  names.query = "attn_q";
  names.key = "attn_k";
  names.value = "attn_v";
  names.output = "attn_output";
  names.query_norm = "attn_q_norm";
  names.key_norm = "attn_k_norm";
  names.post_attention_norm = "post_attention_norm";
  names.pre_feed_forward_norm = "ffn_norm";
  names.post_feed_forward_norm = "post_ffw_norm";
  names.gate = "ffn_gate";
  names.up = "ffn_up";
  names.down = "ffn_down";
  return names;
}

// gemma.cpp's names, of what sbs_model.cpp makes of its files.
TensorNames sbs_names() {
  TensorNames names;
  names.embedding = "c_embedding";
  names.final_norm = "c_final_norm";
  names.head = "lm_head";
  names.layers = "layer ";
  names.input_norm = "pre_att_ns";
  names.query = "query";
  names.key = "key";
  names.value = "value";
  names.output = "att_w";
  names.query_norm = "query_norm";
  names.key_norm = "key_norm";
  names.post_attention_norm = "post_att_ns";
  names.pre_feed_forward_norm = "pre_ff_ns";
  names.post_feed_forward_norm = "post_ff_ns";
  names.gate = "gating1_w";
  names.up = "gating2_w";
  names.down = "linear_w";
  return names;
}

TensorNames hugging_face_names(const Config& config, const std::string& prefix, const std::string& head) {
  TensorNames names;
  names.embedding = prefix + "embed_tokens";
  names.final_norm = prefix + "norm";
  names.head = head;
  names.layers = prefix + "layers.";
  names.input_norm = "input_layernorm";
  names.query = "self_attn.q_proj";
  names.key = "self_attn.k_proj";
  names.value = "self_attn.v_proj";
  names.output = "self_attn.o_proj";
  names.query_norm = "self_attn.q_norm";
  names.key_norm = "self_attn.k_norm";
  names.post_attention_norm = "post_attention_layernorm";
  // Gemma 1 gives the name of the norm after attention to the one before the feed-forward part.
  names.pre_feed_forward_norm = config.post_norm() ? "pre_feedforward_layernorm" : "post_attention_layernorm";
  names.post_feed_forward_norm = "post_feedforward_layernorm";
  names.gate = "mlp.gate_proj";
  names.up = "mlp.up_proj";
  names.down = "mlp.down_proj";
  return names;
}

}  // namespace

TensorNames find_tensor_names(const Config& config, const TensorMap& tensors) {
  // Where the text model lies: alone, or inside a multimodal one, whose layout has changed over time.
  const TensorNames candidates[] = {
      hugging_face_names(config, "model.", "lm_head"),
      hugging_face_names(config, "model.language_model.", "lm_head"),
      hugging_face_names(config, "language_model.model.", "language_model.lm_head"),
      hugging_face_names(config, "", "lm_head"),
      gguf_names(),
      sbs_names(),
  };
  for (const TensorNames& names : candidates) {
    if (tensors.count(names.embedding + ".weight") != 0) return names;
  }
  fail(
      "the model has no tensor \"model.embed_tokens.weight\", nor one where multimodal models keep it, nor GGUF's "
      "\"token_embd.weight\", nor gemma.cpp's \"c_embedding\"");
}

}  // namespace gemma
