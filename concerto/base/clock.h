// The clock for durations.
#pragma once

#include <chrono>

namespace concerto {

// Seconds since some fixed moment; never goes back.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace concerto
