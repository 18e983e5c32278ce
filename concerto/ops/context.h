// What every op is called with. Ops read views and write views; they own nothing and keep nothing between calls.
//
// Rule for kernels: first take scratch from `ctx.scratch` (inside an ArenaScope), then `if (ctx.dry_run) return;`, then
// touch memory. A dry run has null pointers everywhere and exists to measure arenas (tensor/arena.h), so scratch may
// depend on shapes and thread count, never on contents.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "concerto/base/thread_pool.h"
#include "concerto/tensor/arena.h"

namespace concerto {

struct Backend;

enum class OpFamily {
  kDense,
  kExperts,
  kAttention,
  kNorm,
  kRouter,
  kPermute,
  kEmbedding,
  kHead,
  kElementwise,
  kOptimizer,
  kCount
};
const char* op_family_name(OpFamily family);

// Seconds by op family on the calling thread's clock; the outermost op counts (the head's products count as head).
struct OpProfile {
  std::array<double, static_cast<size_t>(OpFamily::kCount)> seconds{};
  std::array<int64_t, static_cast<size_t>(OpFamily::kCount)> calls{};
  int depth = 0;
};

struct Context {
  const Backend* backend = nullptr;
  ThreadPool* pool = nullptr;
  Arena* scratch = nullptr;
  Stream stream;
  bool dry_run = false;
  OpProfile* profile = nullptr;  // may be null
};

class OpScope {
 public:
  OpScope(const Context& ctx, OpFamily family) : profile_(ctx.profile), family_(family) {
    if (profile_ && profile_->depth++ == 0) start_ = std::chrono::steady_clock::now();
  }
  ~OpScope() {
    if (!profile_ || --profile_->depth != 0) return;
    const auto i = static_cast<size_t>(family_);
    profile_->seconds[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    ++profile_->calls[i];
  }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

 private:
  OpProfile* profile_;
  OpFamily family_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace concerto
