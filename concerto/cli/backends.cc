#include "concerto/cli/backends.h"

#include "concerto/config/run_fields.h"
#include "concerto/ops/cpu/cpu_backend.h"
#include "concerto/ops/cuda/cuda_backend.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto {

const Backend& backend_by_name(const std::string& text) {
  const std::string name = backend_word(text);
  if (name == "cpu") return cpu_backend();
  if (name == "ref") return ref_backend();
  if (name == "cuda") return cuda_backend();
  throw Error(ErrorCode::kConfig, "backend", fmt::format("'{}' is not a backend", text), "Use cpu or ref.");
}

}  // namespace concerto
