// The field table of a model, and what else may stand in a config.json: keys without a meaning here, and keys that may
// only say what we do anyway.
#pragma once

#include <string>
#include <vector>

#include "concerto/config/field.h"

namespace concerto {

const std::vector<Field<ModelConfig>>& model_fields();
const std::vector<Rule<ModelConfig>>& model_rules();

// Keys that Hugging Face and Baidu's tools write and that do not change what the model computes.
const std::vector<std::string>& ignored_model_keys();

// Those of them that lay a training run out. In the `model` section of a run file they are refused.
const std::vector<std::string>& layout_model_keys();

// Keys of features that are not built: accepted where their value means "off" or what this version does, else refused
// with the reason.
struct LimitedKey {
  std::string name;
  std::string accepted;  // for the docs: the values that pass
  bool (*passes)(const Value&);
  std::string reason;  // "group gating is not supported yet"
};
const std::vector<LimitedKey>& limited_model_keys();

// The defaults of a file: Hugging Face's for the model type; those of the older remote-code configuration for a MoE
// file that has moe_capacity, moe_gate or sinkhorn_2gate (docs/config.md).
ModelConfig default_model_config(ModelType type, bool old_generation);

}  // namespace concerto
