#include "concerto/arch/model_spec.h"

#include <cmath>

#include "concerto/base/error.h"

namespace concerto {
namespace {

class SpecList {
 public:
  explicit SpecList(const ModelConfig& config) : c_(config) {}

  void add(std::string name, Shape shape, TensorRole role, int layer = -1, int expert = -1, int fused = -1) {
    TensorSpec s{
        .name = std::move(name), .shape = shape, .role = role, .layer = layer, .expert = expert, .fused = fused};
    s.keep_f32 = role == TensorRole::kRouter || role == TensorRole::kCorrectionBias;
    s.trainable = role != TensorRole::kCorrectionBias;
    specs_.push_back(std::move(s));
  }

  void attention(const std::string& prefix, int layer) {
    const int64_t h = c_.hidden_size, q = c_.num_attention_heads * c_.head_dim,
                  kv = c_.num_key_value_heads * c_.head_dim;
    add(prefix + "input_layernorm.weight", {h}, TensorRole::kNorm, layer);
    const std::string a = prefix + "self_attn.";
    const int weights = next_fused_++;
    add(a + "q_proj.weight", {q, h}, TensorRole::kAttentionIn, layer, -1, weights);
    add(a + "k_proj.weight", {kv, h}, TensorRole::kAttentionIn, layer, -1, weights);
    add(a + "v_proj.weight", {kv, h}, TensorRole::kAttentionIn, layer, -1, weights);
    if (c_.use_bias) {
      const int biases = next_fused_++;
      add(a + "q_proj.bias", {q}, TensorRole::kBias, layer, -1, biases);
      add(a + "k_proj.bias", {kv}, TensorRole::kBias, layer, -1, biases);
      add(a + "v_proj.bias", {kv}, TensorRole::kBias, layer, -1, biases);
    }
    add(a + "o_proj.weight", {h, q}, TensorRole::kAttentionOut, layer);
    if (c_.use_bias) add(a + "o_proj.bias", {h}, TensorRole::kBias, layer);
    add(prefix + "post_attention_layernorm.weight", {h}, TensorRole::kNorm, layer);
  }

  void mlp(const std::string& prefix, int64_t width, int layer, bool shared) {
    const int64_t h = c_.hidden_size;
    const TensorRole in = shared ? TensorRole::kSharedIn : TensorRole::kMlpIn;
    const int weights = next_fused_++;
    add(prefix + "gate_proj.weight", {width, h}, in, layer, -1, weights);
    add(prefix + "up_proj.weight", {width, h}, in, layer, -1, weights);
    if (c_.use_bias) {
      const int biases = next_fused_++;
      add(prefix + "gate_proj.bias", {width}, TensorRole::kBias, layer, -1, biases);
      add(prefix + "up_proj.bias", {width}, TensorRole::kBias, layer, -1, biases);
    }
    add(prefix + "down_proj.weight", {h, width}, shared ? TensorRole::kSharedDown : TensorRole::kMlpDown, layer);
    if (c_.use_bias) add(prefix + "down_proj.bias", {h}, TensorRole::kBias, layer);
  }

  void moe(const std::string& prefix, int layer) {
    const int64_t h = c_.hidden_size, f = c_.moe_intermediate_size;
    const int experts = static_cast<int>(c_.moe_num_experts);
    add(prefix + "gate.weight", {experts, h}, TensorRole::kRouter, layer);
    add(prefix + "moe_statics.e_score_correction_bias", {1, experts}, TensorRole::kCorrectionBias, layer);
    const int in = next_fused_++, down = next_fused_++;
    for (int e = 0; e < experts; ++e) {
      const std::string p = prefix + "experts." + std::to_string(e) + ".";
      add(p + "gate_proj.weight", {f, h}, TensorRole::kExpertIn, layer, e, in);
      add(p + "up_proj.weight", {f, h}, TensorRole::kExpertIn, layer, e, in);
    }
    for (int e = 0; e < experts; ++e)
      add(prefix + "experts." + std::to_string(e) + ".down_proj.weight", {h, f}, TensorRole::kExpertDown, layer, e,
          down);
    if (c_.moe_num_shared_experts > 0) mlp(prefix + "shared_experts.", c_.shared_intermediate_size(), layer, true);
  }

  std::vector<TensorSpec> take() { return std::move(specs_); }

 private:
  const ModelConfig& c_;
  std::vector<TensorSpec> specs_;
  int next_fused_ = 0;
};

}  // namespace

std::vector<TensorSpec> tensor_specs(const ModelConfig& c) {
  CHECK(c.head_dim > 0, "head_dim is resolved when a config is loaded");
  SpecList list(c);
  list.add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size}, TensorRole::kEmbedding);
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const int layer = static_cast<int>(i);
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    list.attention(prefix, layer);
    if (c.is_moe_layer(i))
      list.moe(prefix + "mlp.", layer);
    else
      list.mlp(prefix + "mlp.", c.intermediate_size, layer, false);
  }
  list.add("model.norm.weight", {c.hidden_size}, TensorRole::kNorm);
  if (!c.tie_word_embeddings) list.add("lm_head.weight", {c.vocab_size, c.hidden_size}, TensorRole::kHead);
  if (c.lm_head_bias()) list.add("lm_head.bias", {c.vocab_size}, TensorRole::kBias);
  for (int64_t m = 0; m < c.num_nextn_predict_layers; ++m) {
    const std::string depth = std::to_string(m);
    const int layer = static_cast<int>(c.num_hidden_layers + m);
    list.add("model.mtp_emb_norm." + depth + ".weight", {c.hidden_size}, TensorRole::kNorm, layer);
    list.add("model.mtp_hidden_norm." + depth + ".weight", {c.hidden_size}, TensorRole::kNorm, layer);
    list.add("model.mtp_linear_proj." + depth + ".weight", {c.hidden_size, 2 * c.hidden_size},
             TensorRole::kMtpProjection, layer);
    if (c.use_bias) list.add("model.mtp_linear_proj." + depth + ".bias", {c.hidden_size}, TensorRole::kBias, layer);
    const std::string prefix = "model.mtp_block." + depth + ".";
    list.attention(prefix, layer);
    list.mlp(prefix + "mlp.", c.intermediate_size, layer, false);
  }
  return list.take();
}

int64_t parameter_count(const ModelConfig& c) {
  int64_t n = 0;
  for (const TensorSpec& s : tensor_specs(c)) n += s.trainable ? s.shape.elements() : 0;
  return n;
}

int64_t active_parameter_count(const ModelConfig& c) {
  int64_t n = c.tie_word_embeddings ? c.vocab_size * c.hidden_size : 0;
  for (const TensorSpec& s : tensor_specs(c)) {
    if (!s.trainable || s.role == TensorRole::kEmbedding) continue;
    if (s.expert < 0 || s.expert < c.moe_k)
      n += s.shape.elements();  // every expert has one shape: any k stand for the chosen
  }
  return n;
}

double flops_per_token(const ModelConfig& c, int64_t seq) {
  const auto real = [](int64_t x) { return static_cast<double>(x); };
  const double products =
      real(active_parameter_count(c)) + real(c.num_nextn_predict_layers) * real(c.vocab_size) * real(c.hidden_size);
  const double attention =
      real(c.num_hidden_layers + c.num_nextn_predict_layers) * real(seq) * real(c.num_attention_heads * c.head_dim);
  return 6.0 * (products + attention);
}

double init_std(const ModelConfig& c, const TensorSpec& s, Init method) {
  if (s.role == TensorRole::kNorm || s.role == TensorRole::kBias || s.role == TensorRole::kCorrectionBias) return 0;
  if (method == Init::kHuggingFace) return c.initializer_range;
  const double base = std::sqrt(0.3333 / static_cast<double>(c.hidden_size));
  const bool output =
      s.role == TensorRole::kAttentionOut || s.role == TensorRole::kMlpDown || s.role == TensorRole::kExpertDown;
  return output ? base / std::sqrt(2.0 * static_cast<double>(c.num_hidden_layers)) : base;
}

}  // namespace concerto
