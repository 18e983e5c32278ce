// Settings on the command line.
#pragma once

#include <string>
#include <vector>

#include "concerto/config/run_config.h"

namespace concerto {

// What the command's own options left over: `--section.key=value` or `--section.key value`. Anything else is an
// Error(kUsage). Whether the key exists is for load_run_config to say.
Overrides parse_overrides(const std::vector<std::string>& arguments);

}  // namespace concerto
