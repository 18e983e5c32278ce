// The one place that knows every backend by name.
#pragma once

#include <string>

#include "concerto/ops/backend.h"

namespace concerto {
const Backend& backend_by_name(const std::string& name);  // cpu | ref | cuda; Error(kUnsupported) if it is not built
}  // namespace concerto
