// From settings to a ModelConfig: what load_model_config and load_run_config share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "concerto/config/faults.h"
#include "concerto/config/model_config.h"
#include "concerto/config/value.h"

namespace concerto {

struct ModelSetting {
  std::string name;  // as written: a field, an alias, or another key of a config.json
  Value value;
  std::string file;  // as in Fault
  int line = 0;
  std::string key;  // as shown to the user: "hidden_size" of a config.json, "model.hidden_size" of a run
};

// The canonical name of a field or of one of its aliases; "" if it is neither.
std::string model_field_name(const std::string& name);

// Whether the settings give every field that a file could give, so that no file need be read.
bool gives_every_field(const std::vector<ModelSetting>& settings);

// Adds the entries of PATH/config.json (or of a config.json) to `settings`, or a fault that says why there are none.
void read_model_file(const std::string& path, std::vector<ModelSetting>& settings, Faults& faults);

// Later settings win over those of earlier files. `file` and `prefix` name what no setting says ("config.json",
// "model."). `places` receives for each canonical name the setting that gave it (an index into `settings`).
ModelConfig resolve_model(const std::vector<ModelSetting>& settings, const std::string& file, const std::string& prefix,
                          Faults& faults, std::map<std::string, size_t>* places = nullptr);

}  // namespace concerto
