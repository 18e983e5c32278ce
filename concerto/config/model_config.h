// The model's own settings, field for field as in a Hugging Face config.json (`ernie4_5` and `ernie4_5_moe`). Frozen
// after load; what can be computed from it is computed in arch/. Field names are HF's; where HF knows two names, both
// are accepted when read (model_fields.cc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

constexpr int64_t kMostMtpLayers = 8;  // num_nextn_predict_layers; released models have 1

enum class ModelType { kErnie45, kErnie45Moe };
enum class MtpHidden { kPreNorm, kPostNorm };  // which main hidden state an MTP block reads (reference 5.4)
enum class MtpPositions { kMain, kShifted };   // positions 0.. or shifted by depth + 1
enum class Init {
  kHuggingFace,
  kPretrain
};  // reference 8: N(0, initializer_range), or sqrt(0.3333/H) with 1/sqrt(2L) on o_proj and down_proj

enum class RouterGate { kTopK, kTop2 };  // reference 3.6, 4.1
enum class RouterScoring { kSoftmax, kSigmoid };
enum class TokenDrop { kRankMajor, kTokenMajor };  // who gets the room of a full expert (reference 3.5)

struct ModelConfig {
  ModelType model_type = ModelType::kErnie45Moe;
  int64_t vocab_size = 103424;
  int64_t hidden_size = 2560;
  int64_t intermediate_size = 12288;
  int64_t num_hidden_layers = 28;
  int64_t num_attention_heads = 20;
  int64_t num_key_value_heads = 4;
  int64_t head_dim = 0;  // 0 in a MoE file without it: hidden_size / num_attention_heads; dense default 128
  std::string hidden_act = "silu";
  int64_t max_position_embeddings = 131072;
  double initializer_range = 0.02;
  double rms_norm_eps = 1e-5;
  double rope_theta = 500000.0;  // rope_parameters.rope_theta, or rope_theta of older files
  bool use_bias = false;
  bool tie_word_embeddings = true;
  int64_t pad_token_id = 0;  // -1: none
  int64_t bos_token_id = 1;
  int64_t eos_token_id = 2;
  // Mixture of experts (model_type ernie4_5_moe)
  int64_t moe_num_experts = 64;
  int64_t moe_k = 6;
  int64_t moe_intermediate_size = 1536;
  int64_t moe_num_shared_experts = 2;
  int64_t moe_layer_start_index = 1;
  int64_t moe_layer_end_index = -1;  // -1: the last layer; may exceed it
  int64_t moe_layer_interval = 1;
  RouterGate moe_gate = RouterGate::kTopK;
  RouterScoring scoring_func = RouterScoring::kSoftmax;
  bool moe_use_aux_free = true;    // choices look at the correction bias
  bool moe_group_experts = false;  // one choice in each of moe_k groups
  bool sinkhorn_2gate = false;     // of gate top2, in training: second choices by Sinkhorn; other gates do not read it
  double sinkhorn_temp = 0.03;
  std::vector<double> moe_capacity;  // factors in training, evaluation, evaluation of few tokens; empty: no drops
  TokenDrop moe_drop_order = TokenDrop::kRankMajor;
  bool moe_reverse_token_drop = false;
  bool moe_norm_gate_logits = true;  // weights are divided by their sum
  double moe_norm_min = 1e-12;
  double router_aux_loss_coef = 0.001;
  bool output_router_logits = false;    // adds router_aux_loss_coef * aux loss to what is differentiated
  bool moe_aux_loss_per_layer = false;  // so does each layer, without output_router_logits (Baidu's trainers)
  double router_z_loss_coef = 0;
  double moe_orthogonal_loss_lambda = 0;
  bool moe_group_orthogonal_loss = true;   // with groups: inside each group only
  double moe_router_bias_update_rate = 0;  // of the correction bias, after each step
  // Multi-token prediction
  int64_t num_nextn_predict_layers = 0;
  double mtp_loss_scaling_factor = 0.3;
  MtpHidden mtp_hidden = MtpHidden::kPreNorm;
  MtpPositions mtp_positions = MtpPositions::kMain;

  // Layer i is a MoE layer: (i + 1) % interval == 0 and start <= i <= end (reference 3.2).
  bool is_moe_layer(int64_t i) const {
    if (model_type != ModelType::kErnie45Moe || moe_num_experts <= 0) return false;
    const int64_t end = moe_layer_end_index < 0 ? num_hidden_layers - 1 : moe_layer_end_index;
    return (i + 1) % moe_layer_interval == 0 && i >= moe_layer_start_index && i <= end;
  }
  int64_t num_moe_layers() const {
    int64_t n = 0;
    for (int64_t i = 0; i < num_hidden_layers; ++i) n += is_moe_layer(i);
    return n;
  }
  int64_t router_groups() const { return moe_group_experts ? moe_k : 1; }
  bool uses_sinkhorn() const { return moe_gate == RouterGate::kTop2 && sinkhorn_2gate; }
  bool lm_head_bias() const { return use_bias && model_type == ModelType::kErnie45Moe; }
  int64_t shared_intermediate_size() const { return moe_intermediate_size * moe_num_shared_experts; }
};

// Reads DIR/config.json or a config.json; missing fields take Hugging Face's defaults (of the file's model_type).
// Unknown keys that HF itself writes (transformers_version, architectures, dtype, use_cache, ...) are accepted and
// ignored by name; any other unknown key, wrong type or impossible value (heads that do not divide, odd head_dim, k >
// experts, hidden_act other than silu, rope types other than default) is collected, and one Error(kModel) names them
// all with file and key. A MoE file with moe_capacity, moe_gate or sinkhorn_2gate takes missing fields from the old
// defaults (docs/config.md). head_dim and moe_intermediate_size are resolved: never 0 after load.
ModelConfig load_model_config(const std::string& path);
// The text of a config.json that HF's AutoConfig opens, architectures and dtype ("bfloat16" | "float32") included.
std::string model_config_json(const ModelConfig& config, const std::string& dtype);

}  // namespace concerto
