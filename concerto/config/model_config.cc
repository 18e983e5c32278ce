#include "concerto/config/model_config.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "concerto/config/model_fields.h"
#include "concerto/config/model_reader.h"

namespace concerto {

namespace {

// Hugging Face's own model knows one router. The fields of the others are written only where they say something else,
// since their presence marks a file of the older generation.
void add_router(const ModelConfig& c, nlohmann::json& j) {
  nlohmann::json router;
  for (const Field<ModelConfig>& field : model_fields()) {
    if (!field.moe_only || j.contains(field.name)) continue;
    ModelConfig given = c, usual;
    const std::string text = print_json(read(field.slot(given)));
    if (text != print_json(read(field.slot(usual)))) router[field.name] = nlohmann::json::parse(text);
  }
  if (router.empty()) return;
  // The file may now be read as one of the older generation: then nothing may be left to its defaults.
  for (const Field<ModelConfig>& field : model_fields()) {
    ModelConfig given = c;
    if (field.moe_only && !j.contains(field.name))
      j[field.name] = nlohmann::json::parse(print_json(read(field.slot(given))));
  }
}

}  // namespace

ModelConfig load_model_config(const std::string& path) {
  Faults faults;
  std::vector<ModelSetting> settings;
  read_model_file(path, settings, faults);
  faults.throw_if_any(ErrorCode::kModel);
  ModelConfig config = resolve_model(settings, settings[0].file, "", faults);
  faults.throw_if_any(ErrorCode::kModel);
  return config;
}

std::string model_config_json(const ModelConfig& c, const std::string& dtype) {
  CHECK(dtype == "bfloat16" || dtype == "float32", "dtype {}", dtype);
  const bool moe = c.model_type == ModelType::kErnie45Moe;
  const auto token = [](int64_t id) { return id < 0 ? nlohmann::json() : nlohmann::json(id); };
  nlohmann::json j = {
      {"architectures", nlohmann::json::array({moe ? "Ernie4_5_MoeForCausalLM" : "Ernie4_5ForCausalLM"})},
      {"model_type", moe ? "ernie4_5_moe" : "ernie4_5"},
      {"dtype", dtype},
      {"use_cache", true},
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"intermediate_size", c.intermediate_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"num_attention_heads", c.num_attention_heads},
      {"num_key_value_heads", c.num_key_value_heads},
      {"hidden_act", c.hidden_act},
      {"max_position_embeddings", c.max_position_embeddings},
      {"initializer_range", c.initializer_range},
      {"rms_norm_eps", c.rms_norm_eps},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", c.rope_theta}}},
      {"use_bias", c.use_bias},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"pad_token_id", token(c.pad_token_id)},
      {"bos_token_id", token(c.bos_token_id)},
      {"eos_token_id", token(c.eos_token_id)},
  };
  j["head_dim"] = c.head_dim > 0 ? c.head_dim : c.hidden_size / c.num_attention_heads;
  if (moe) {
    j["moe_num_experts"] = c.moe_num_experts;
    j["moe_k"] = c.moe_k;
    j["moe_intermediate_size"] = c.moe_intermediate_size;
    j["moe_num_shared_experts"] = c.moe_num_shared_experts;
    j["moe_layer_start_index"] = c.moe_layer_start_index;
    j["moe_layer_end_index"] =
        c.moe_layer_end_index < 0 ? c.num_hidden_layers - 1 : c.moe_layer_end_index;  // as HF saves it
    j["moe_layer_interval"] = c.moe_layer_interval;
    j["moe_norm_min"] = c.moe_norm_min;
    j["router_aux_loss_coef"] = c.router_aux_loss_coef;
    j["output_router_logits"] = c.output_router_logits;
    add_router(c, j);
  }
  if (c.num_nextn_predict_layers > 0) {
    j["num_nextn_predict_layers"] = c.num_nextn_predict_layers;
    j["mtp_loss_scaling_factor"] = c.mtp_loss_scaling_factor;
    j["mtp_hidden"] = c.mtp_hidden == MtpHidden::kPreNorm ? "pre_norm" : "post_norm";
    j["mtp_positions"] = c.mtp_positions == MtpPositions::kMain ? "main" : "shifted";
  }
  return j.dump(2) + "\n";
}

}  // namespace concerto
